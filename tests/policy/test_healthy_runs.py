"""A guard with its defaults does nothing to healthy training, of whatever kind, and still sees what is wrong.

`python -m tests.policy.test_healthy_runs` prints the figures of docs/results.md.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.support.healthy import CHANGING, RUNS, Fault, Outcome, train

OFTEN = {"gpt", "gpt, high rate at once", "gpt, dense start"} | {name for name in RUNS if not name.startswith("gpt")}
"""The other ones take part in long runs of the tests alone."""
EVERY = [name if name in OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in RUNS]


@contextmanager
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def guarded(name: str, fault: Fault | None = None) -> Outcome:
    with one_thread():
        return train(RUNS[name], {}, fault) if fault is not None else train(RUNS[name], {})


@pytest.mark.parametrize("name", EVERY)
def test_a_guard_does_nothing_to_a_healthy_run(name: str) -> None:
    found = guarded(name)
    assert [str(event) for event in found.events] == []
    assert found.skipped == 0
    assert math.isfinite(found.loss)


def test_there_are_enough_kinds_of_runs() -> None:
    assert len(RUNS) >= 20
    assert len({kind.seed for kind in RUNS.values()}) == len(RUNS)


AT = 200
"""Steps done when the fault begins."""


def not_a_number(step: int, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * math.nan if step == AT else grad), kept


def far_too_large(step: int, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * 1e6 if step == AT else grad), kept


def too_large_for_long(step: int, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return (grad * 100 if AT <= step < AT + 20 else grad), kept


def damaged_memory(step: int, grad: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    return grad, (kept + 1e8 if step == AT else kept)


@pytest.mark.parametrize("fault", [not_a_number, far_too_large, damaged_memory])
@pytest.mark.parametrize("name", ["heavy tails, no clipping", "memorised, one at a time", "recurrent", "rewards"])
def test_a_guard_skips_what_no_batch_explains(name: str, fault: Fault) -> None:
    found = guarded(name, fault)
    assert next((event.step, event.kind, event.after) for event in found.events) == (AT + 1, "anomaly", "none")
    assert found.skipped == 1
    assert math.isfinite(found.loss)


@pytest.mark.parametrize("name", ["heavy tails, no clipping", "recurrent"])
def test_a_guard_softens_what_persists_and_skips_none_of_it(name: str) -> None:
    found = guarded(name, too_large_for_long)
    assert (found.events[0].kind, found.events[0].after) == ("anomaly", "none")
    assert AT < found.events[0].step <= AT + 10
    assert found.skipped == 0


@pytest.mark.slow
def test_data_of_another_kind_soften_and_are_not_skipped() -> None:
    """A loss that stays three times as high is what a fault looks like, too; that costs bytes, and no step."""
    with one_thread():
        found = train(CHANGING, {})
    assert {event.after for event in found.events if event.kind == "anomaly"} == {"none"}
    assert found.skipped == 0


def main() -> None:
    print("| run | acts of the guard | steps skipped | loss |\n|---|---|---|---|")
    for name in RUNS:
        found = guarded(name)
        print(f"| {name} | {len(found.events)} | {found.skipped} | {found.loss:.4f} |", flush=True)


if __name__ == "__main__":
    main()
