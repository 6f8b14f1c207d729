"""Tensor parallelism with fewer and with compressed sums, compared with DeepSpeed alone."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed_compress
from deepspeed_compress.backends.deepspeed.activations.tensor import is_column, is_row
from deepspeed_compress.config import SECTION
from tests.support.activations import accumulate, flattened, interrupt
from tests.support.forks import run_forks
from tests.support.jobs import largest_difference, make_engine, weights
from tests.support.split_llama import LAYERS, Job, loss_of, replicated, start, tokens, train

pytestmark = pytest.mark.sampled(6)

MERGED: Mapping[str, Any] = {"tensor": {}}
EIGHT: Mapping[str, Any] = {"tensor": {"bits": 8}}
FOUR: Mapping[str, Any] = {"tensor": {"bits": 4}}
MIXED: Mapping[str, Any] = {"tensor": {"bits": 4, "backward_bits": 8}}
UNMERGED: Mapping[str, Any] = {"tensor": {"merge": False, "bits": 8}}


class Sums(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counter of all-reduces of activations, which have three dimensions."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::allreduce_":
            self.count += args[0][0].dim() == 3
        return func(*args, **(kwargs or {}))


@dataclass(frozen=True)
class Outcome:
    """Results of a rank: losses, parameters, and the number of uncompressed sums of activations."""

    losses: list[float]
    parameters: dict[str, list[float]]
    sums: int


def train_all(rank: int, *jobs: Job) -> list[Outcome]:
    return [train_one(job) for job in jobs]


def train_one(job: Job) -> Outcome:
    engine = start(job)
    with Sums() as sums:
        losses = train(engine)
    outcome = Outcome(losses, weights(engine), sums.count)
    engine.destroy()
    return outcome


def check_replicas(ranks: list[Outcome]) -> None:
    """Check that tensor-parallel ranks have equal losses, and equal copies of what they share."""
    for other in ranks[1:]:
        assert other.losses == ranks[0].losses
        assert replicated(other.parameters) == replicated(ranks[0].parameters)
    assert len(replicated(ranks[0].parameters)) >= 4 * LAYERS + 1


SUMS = 2 * (7 * LAYERS + 1)
"""Sums in two steps of DeepSpeed: seven for each layer, and one of the head's gradient."""


@pytest.mark.parametrize(
    "stage", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow), 3]
)
def test_merged_sums_are_those_of_deepspeed(stage: int) -> None:
    jobs = [Job(activations, stage) for activations in (None, MERGED)]
    for plain, merged in run_forks(2, train_all, *jobs, shared_memory=True):
        assert merged.losses == pytest.approx(plain.losses, rel=1e-6)
        # Adam's first steps make 1e-3 of any difference in sign.
        assert largest_difference(plain.parameters, merged.parameters) < 2e-4
        assert (plain.sums, merged.sums) == (SUMS, 2 * (4 * LAYERS + 1))


@pytest.mark.parametrize("activations", [MERGED, EIGHT, FOUR], ids=["merged", "8 bits", "4 bits"])
@pytest.mark.parametrize("stage", [0, 3])
def test_recomputation_changes_no_bit(stage: int, activations: Mapping[str, Any]) -> None:
    jobs = [Job(activations, stage, reentrant=reentrant) for reentrant in (None, True, False)]
    ranks = run_forks(2, train_all, *jobs, shared_memory=True)
    for stored, *recomputed in ranks:
        for one in recomputed:
            assert (one.losses, one.parameters) == (stored.losses, stored.parameters)
    for job in range(len(jobs)):
        check_replicas([rank[job] for rank in ranks])


FROZEN = ("q_proj", "k_proj", "gate_proj", "o_proj", "embed_tokens", "layers.0.")


@pytest.mark.parametrize("name", FROZEN)
@pytest.mark.parametrize("activations", [MERGED, EIGHT], ids=["merged", "8 bits"])
def test_frozen_parameters(activations: Mapping[str, Any], name: str) -> None:
    """With the first layer and the embedding frozen, some inputs need no gradient."""
    ranks = run_forks(2, train_all, *(Job(kind, frozen=name) for kind in (None, activations)), shared_memory=True)
    for plain, ours in ranks:
        assert ours.losses == pytest.approx(plain.losses, rel=1e-6 if activations is MERGED else 1e-3)
    for replicas in zip(*ranks, strict=True):
        check_replicas(list(replicas))


def test_compressed_sums_are_near_those_of_deepspeed() -> None:
    jobs = [Job(activations) for activations in (None, EIGHT, FOUR, UNMERGED, MIXED)]
    ranks = run_forks(2, train_all, *jobs, shared_memory=True)
    for plain, eight, four, unmerged, mixed in ranks:
        assert eight.losses == pytest.approx(plain.losses, rel=1e-3)
        assert unmerged.losses == pytest.approx(plain.losses, rel=1e-3)
        assert four.losses == pytest.approx(plain.losses, rel=1e-2)
        # The gradient of the head is summed as before.
        assert [one.sums for one in (eight, four, unmerged, mixed)] == [2] * 4
        assert mixed.losses[0] == four.losses[0], "the first forward pass has 4 bits"
        assert mixed.losses[1] != four.losses[1], "its backward pass has 8 bits"
    for job in range(len(jobs)):
        check_replicas([rank[job] for rank in ranks])


Records = list[Any]
Program = Callable[[Job], Records]


def accumulated(job: Job) -> Records:
    engine = start(replace(job, extra={"gradient_accumulation_steps": 3}))
    accumulate(engine, lambda seed: loss_of(engine, tokens(seed)))
    return [weights(engine)]


def unsynchronised(job: Job) -> Records:
    engine = start(replace(job, stage=0, extra={"gradient_accumulation_steps": 2}))
    with engine.no_sync():
        engine.backward(loss_of(engine, tokens(0)))
    engine.backward(loss_of(engine, tokens(1)))
    engine.step()
    return [weights(engine)]


def interrupted(job: Job) -> Records:
    engine = start(job)
    interrupt(engine, lambda: loss_of(engine, tokens(0)))
    return [train(engine), weights(engine)]


def two_engines(job: Job) -> Records:
    """Interleave two engines whose layers have one tensor group, and evaluate in between."""
    engines = [start(job), start(job)]
    found: Records = []
    for step in range(2):
        losses = [loss_of(engine, tokens(step + place)) for place, engine in enumerate(engines)]
        with torch.no_grad():
            found += [float(loss_of(engine, tokens(9))) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    return [*found, *(weights(engine) for engine in engines)]


def one_model_twice(job: Job) -> Records:
    """Use a model in a second engine after the first has been destroyed."""
    engine = start(job)
    train(engine)
    engine.destroy()
    second = make_engine(engine.module, job.config())
    return [train(second), weights(second)]


def run_program(rank: int, program: Program, *jobs: Job) -> list[Records]:
    return [program(job) for job in jobs]


@pytest.mark.parametrize("program", [accumulated, unsynchronised, interrupted, two_engines, one_model_twice])
def test_programs_compute_the_same_as_with_deepspeed_alone(program: Program) -> None:
    """Merged sums differ by rounding, and compressed ones are equal on both ranks."""
    found, other = run_forks(2, run_program, program, Job(), Job(MERGED), Job(EIGHT), shared_memory=True)
    plain, merged, eight = map(flattened, found)
    assert (plain - merged).abs().max() < 5e-4
    assert (plain - eight).abs().mean() < 1e-3
    for mine, theirs in zip(found[2], other[2], strict=True):
        if isinstance(mine, dict):
            mine, theirs = replicated(mine), replicated(theirs)
        assert mine == theirs


def exact_outputs(rank: int, *jobs: Job) -> list[list[Any]]:
    return [outputs_of(start(job)) for job in jobs]


def outputs_of(engine: Any) -> list[Any]:
    """Return what is computed without gradients, also by a copy of the model, and by the copy with gradients."""
    engine.eval()
    prompt = tokens(0)[:1, :4]
    with torch.no_grad():
        found = [engine(input_ids=tokens(0), use_cache=False).logits.tolist()]
        found.append(engine.module.generate(prompt, max_new_tokens=4, do_sample=False, pad_token_id=0).tolist())
    other = copy.deepcopy(engine.module)
    loss = loss_of(other, tokens(1))
    loss.backward()  # type: ignore[no-untyped-call]
    found += [
        float(loss.detach()),
        [parameter.grad.tolist() for parameter in other.parameters() if parameter.grad is not None],
    ]
    return found


def test_evaluation_generation_and_copies_are_exact() -> None:
    jobs = [Job(activations, 0) for activations in (None, EIGHT)]
    for plain, ours in run_forks(2, exact_outputs, *jobs, shared_memory=True):
        assert ours == plain


def detached(rank: int) -> list[tuple[int, Outcome]]:
    """Return the number of hooks and the results of DeepSpeed alone, and of an engine after `detach`."""
    found: list[tuple[int, Outcome]] = []
    for activations in (None, EIGHT):
        engine = start(Job(activations))
        if activations is not None:
            assert hooks_of(engine.module) == found[0][0] + ADDED
            assert deepspeed_compress.detach(engine) is engine
            assert "compile" not in vars(engine)
        found.append((hooks_of(engine.module), Outcome(train(engine), weights(engine), 0)))
        engine.destroy()
    return found


ADDED = LAYERS * (7 * 2 + 2 + 3 * 2) + 2 * 2
"""For each layer, two hooks of each split layer, one of each module around layers that share an input, and two of each
module with parts. In addition, two of the list of layers, and of the module that has it."""


def hooks_of(model: nn.Module) -> int:
    """Return the number of hooks of split layers and of the modules around them."""
    parts = [part for part in model.modules() if part is not model]
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in parts)


def test_a_detached_engine_equals_plain_deepspeed() -> None:
    for plain, ours in run_forks(2, detached, shared_memory=True):
        assert ours == plain


def without_the_key(rank: int) -> bool:
    """Return whether attaching a section without `activations` leaves the hooks of all layers as they are."""
    engine = start(Job())
    engine.config[SECTION] = {"gradients": {"method": "none"}}
    before = hooks_of(engine.module)
    deepspeed_compress.attach(engine)
    return hooks_of(engine.module) == before and "compile" not in vars(engine)


def test_without_the_key_nothing_is_attached() -> None:
    assert run_forks(2, without_the_key, shared_memory=True) == [True, True]


def poisoned(rank: int) -> list[bool]:
    """Return whether the loss is finite after one rank alone has a weight that is not."""
    found = []
    for activations in (EIGHT, FOUR):
        engine = start(Job(activations))
        if rank == 1:
            engine.module.model.layers[0].self_attn.o_proj.weight.data[0, 0] = float("nan")
        loss = loss_of(engine, tokens(0))
        found.append(bool(loss.isfinite()))
    return found


def test_a_number_that_is_not_finite_reaches_all_ranks() -> None:
    assert run_forks(2, poisoned, shared_memory=True) == [[False, False]] * 2


def in_bf16(rank: int) -> list[tuple[list[float], dict[str, list[float]]]]:
    found = []
    for activations in (None, EIGHT):
        engine = start(Job(activations, 2, extra={"bf16": {"enabled": True}}))
        found.append((train(engine), weights(engine)))
    return found


@pytest.mark.slow
def test_bf16_with_replicas() -> None:
    ranks = run_forks(4, in_bf16, shared_memory=True)
    for (plain, _), (ours, _) in ranks:
        assert ours == pytest.approx(plain, rel=5e-3)
    for _, (_, found) in ranks:
        assert replicated(found) == replicated(ranks[0][1][1])


def kinds(rank: int) -> tuple[list[str], list[str]]:
    modules = dict(start(Job(MERGED)).module.named_modules())
    columns = [name.rpartition(".")[2] for name, module in modules.items() if is_column(module)]
    rows = [name.rpartition(".")[2] for name, module in modules.items() if is_row(module)]
    return columns, rows


def test_split_layers_are_found_and_the_head_is_not_among_them() -> None:
    columns, rows = run_forks(2, kinds, shared_memory=True)[0]
    assert set(columns) == {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
    assert set(rows) == {"o_proj", "down_proj"}
    assert (len(columns), len(rows)) == (5 * LAYERS, 2 * LAYERS)
