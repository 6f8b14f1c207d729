"""A guard with default settings leaves healthy training of many kinds alone, and still detects faults.

`python -m tests.policy.test_healthy_runs` prints the figures of docs/results.md.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.support.healthy import CHANGING, RUNS, Fault, Outcome, train

pytestmark = pytest.mark.sampled(8)

OFTEN = {"gpt", "gpt, high rate at once", "gpt, dense start"} | {name for name in RUNS if not name.startswith("gpt")}
"""Runs in CI. The others are slow tests."""
EVERY = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def train_guarded(name: str, fault: Fault | None = None) -> Outcome:
    with one_thread():
        return train(RUNS[name], {}, fault) if fault is not None else train(RUNS[name], {})


@pytest.mark.parametrize("name", EVERY)
def test_a_guard_changes_nothing_in_a_healthy_run(name: str) -> None:
    found = train_guarded(name)
    assert [str(event) for event in found.events] == []
    assert found.skipped == 0
    assert math.isfinite(found.loss)


def test_there_are_at_least_twenty_runs_with_distinct_seeds() -> None:
    assert len(RUNS) >= 20
    assert len({kind.seed for kind in RUNS.values()}) == len(RUNS)


AT = 200
"""Number of steps done when the fault begins."""


def send_nan(step: int, grad: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * math.nan if step == AT else grad), residual


def send_huge_gradient(step: int, grad: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * 1e6 if step == AT else grad), residual


def send_large_gradients(step: int, grad: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * 100 if AT <= step < AT + 20 else grad), residual


def damage_residual(step: int, grad: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    return grad, (residual + 1e8 if step == AT else residual)


@pytest.mark.parametrize("fault", [send_nan, send_huge_gradient, damage_residual])
@pytest.mark.parametrize("name", ["heavy tails, no clipping", "memorized, one at a time", "recurrent", "rewards"])
def test_a_guard_skips_a_step_that_no_batch_explains(name: str, fault: Fault) -> None:
    found = train_guarded(name, fault)
    assert next((event.step, event.kind, event.after) for event in found.events) == (AT + 1, "anomaly", "none")
    assert found.skipped == 1
    assert math.isfinite(found.loss)


@pytest.mark.parametrize("name", ["heavy tails, no clipping", "recurrent"])
def test_a_guard_softens_a_persistent_fault_without_skipping_steps(name: str) -> None:
    found = train_guarded(name, send_large_gradients)
    assert (found.events[0].kind, found.events[0].after) == ("anomaly", "none")
    assert AT < found.events[0].step <= AT + 10
    assert found.skipped == 0


@pytest.mark.slow
def test_a_guard_softens_but_skips_no_step_when_the_data_change() -> None:
    """A loss that triples and stays there looks like a fault. The reaction costs bytes but no step."""
    with one_thread():
        found = train(CHANGING, {})
    assert {event.after for event in found.events if event.kind == "anomaly"} == {"none"}
    assert found.skipped == 0


def main() -> None:
    print("| run | events of the guard | steps skipped | loss |\n|---|---|---|---|")
    for name in RUNS:
        found = train_guarded(name)
        print(f"| {name} | {len(found.events)} | {found.skipped} | {found.loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
