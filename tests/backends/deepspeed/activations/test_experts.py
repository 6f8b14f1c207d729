"""Layers of experts with compressed exchanges of tokens, compared with DeepSpeed alone."""

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from deepspeed.module_inject import auto_ep_layer
from deepspeed.moe import sharded_moe
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import deepspeed_compress
from deepspeed_compress.backends.activations.tokens import row_bytes
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from tests.support.expert_layers import WIDTH, Job, batch, loss_of, start, start_mixtral, step, step_mixtral
from tests.support.forks import run_forks
from tests.support.jobs import weights
from tests.support.messages import refusal

SLOW = pytest.mark.slow
EIGHT: Mapping[str, Any] = {"experts": {"dispatch": {}, "combine": {}}}
FOUR: Mapping[str, Any] = {"experts": {"dispatch": {"bits": 4}, "combine": {"bits": 4}}}
DISPATCH: Mapping[str, Any] = {"experts": {"dispatch": {"bits": 8}}}
COMBINE: Mapping[str, Any] = {"experts": {"combine": {"bits": 8}}}


Sent = tuple[int, int, int]
"""Bytes of uncompressed and of compressed tokens, and of their counts."""


class Wire(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
    """Recorder of the bytes that this rank sends in exchanges: uncompressed (in floating point), compressed, counts."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch has no types here
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "c10d::alltoall_base_":
            _, sent, group, _, splits = args[:5]
            ranks = dist.ProcessGroup.unbox(group)
            parts = sent.split(list(splits) or len(sent) // ranks.size())
            kind = "exact" if sent.is_floating_point() else "counts"
            self.sent[kind] += sum(part.nbytes for rank, part in enumerate(parts) if rank != ranks.rank())
        elif func.name() == "c10d::send" and args[0][0].dtype is torch.uint8:
            self.sent["compressed"] += args[0][0].nbytes
        return func(*args, **(kwargs or {}))

    def step(self) -> Sent:
        """Return the bytes since the last call."""
        found = tuple(self.sent[kind] for kind in ("exact", "compressed", "counts"))
        self.sent.clear()
        return found  # type: ignore[return-value]  # three counters


@dataclass(frozen=True)
class Outcome:
    """Results of a rank: losses, parameters, bytes on the wire in each step, and those that rank 0 reports."""

    losses: list[float]
    parameters: dict[str, list[float]]
    wire: list[Sent]
    reported: list[tuple[int, int]]


Kind = tuple[Callable[[Job], Any], Callable[[Any, int], float]]
DEEPSPEED: Kind = (start, step)
AUTO_EP: Kind = (start_mixtral, step_mixtral)


def train_all(rank: int, kind: Kind, *jobs: Job) -> list[Outcome]:
    return [train_one(kind, job) for job in jobs]


def train_one(kind: Kind, job: Job) -> Outcome:
    """Train three steps."""
    begin, take = kind
    engine = begin(job)
    outcome = Outcome([], {}, [], [])
    if job.activations is not None:
        engine.compression.subscribe(
            lambda figures: outcome.reported.append((figures.bytes_experts, figures.bytes_experts_saved))
        )
    with Wire() as wire:
        for number in range(3):
            outcome.losses.append(take(engine, number))
            outcome.wire.append(wire.step())
    outcome.parameters.update(weights(engine))
    engine.destroy()
    return outcome


BITS = (0, 8, 4, 8, 8)
"""Bits of the jobs of a comparison, of which the first is DeepSpeed alone."""


@pytest.mark.parametrize(
    ("kind", "stage"),
    [(DEEPSPEED, 1), pytest.param(AUTO_EP, 3, marks=SLOW), pytest.param(AUTO_EP, 1, marks=pytest.mark.slow)],
    ids=["layers of DeepSpeed", "AutoEP, ZeRO 3", "AutoEP"],
)
def test_losses_are_near_and_bytes_are_those_on_the_wire(kind: Kind, stage: int) -> None:
    jobs = [Job(activations, stage) for activations in (None, EIGHT, FOUR, DISPATCH, COMBINE)]
    ranks = run_forks(2, train_all, kind, *jobs)
    for plain, eight, four, dispatch, combine in ranks:
        for ours in (eight, dispatch, combine):
            assert ours.losses == pytest.approx(plain.losses, rel=1e-2)
            assert ours.losses != plain.losses
        assert four.losses == pytest.approx(plain.losses, rel=0.1)
        # Routes of the first step are equal.
        alone, _, counts = plain.wire[0]
        for ours, bits in ((eight, 8), (four, 4)):
            assert ours.wire[0] == (0, alone * row_bytes(WIDTH, bits) // (4 * WIDTH), counts)
        assert dispatch.wire[0][0] + combine.wire[0][0] == alone
    for bits, *outcomes in zip(BITS, *ranks, strict=True):
        check_reports(bits, outcomes)


def check_reports(bits: int, ranks: Sequence[Outcome]) -> None:
    """Check that rank 0 reports the bytes of the rank that sends the most, and what they would be without us."""
    for number, (sent, saved) in enumerate(ranks[0].reported):
        largest = max((rank.wire[number] for rank in ranks), key=sum)
        assert sent == sum(largest)
        assert 4 * WIDTH * largest[1] == row_bytes(WIDTH, bits) * (largest[1] + saved)


@pytest.mark.parametrize("activations", [pytest.param(EIGHT, marks=pytest.mark.slow), FOUR], ids=["8 bits", "4 bits"])
def test_recomputation_changes_no_bit(activations: Mapping[str, Any]) -> None:
    jobs = [Job(activations, recompute=kind) for kind in ("", "reentrant", "other", "deepspeed")]
    for stored, *recomputed in run_forks(2, train_all, DEEPSPEED, *jobs):
        for one in recomputed:
            assert (one.losses, one.parameters) == (stored.losses, stored.parameters)
            # Both exchanges of the forward pass run again.
            assert one.wire[0][1] == stored.wire[0][1] * 3 // 2


SPREAD = ({"ep_size": 1}, {"ep_size": 2}, {"ep_size": 4}, {"ep_size": 2, "drop_tokens": False})


def spread_losses(rank: int) -> list[list[Any]]:
    """Return the losses and the wire of four ranks without and with the key, for some sizes of the groups."""
    found = []
    for spread in SPREAD:
        jobs = [Job(activations, 2, spread={"num_experts": 8, **spread}) for activations in (None, EIGHT)]
        if spread["ep_size"] == 1:
            with pytest.raises(UnsupportedError, match="activations/experts has no effect, because no layer has"):
                start(jobs[1])
            continue
        found.append([train_one(DEEPSPEED, job) for job in jobs])
    return found


@pytest.mark.slow
def test_groups_of_several_sizes() -> None:
    """Later steps may route some of the few tokens to other experts."""
    for rank in run_forks(4, spread_losses):
        for plain, ours in rank:
            assert ours.losses[0] == pytest.approx(plain.losses[0], rel=1e-2)
            assert ours.wire[0][1] == plain.wire[0][0] * row_bytes(WIDTH, 8) // (4 * WIDTH)


def without_gradients(rank: int) -> list[list[Any]]:
    """Return losses of an evaluation, of a copy, and of the engine after `detach`, for both kinds of layers.

    The evaluation of DeepSpeed's layers comes after a pass that was interrupted in the last of them.
    """
    found: list[list[Any]] = [[], []]
    for place, activations in enumerate((None, EIGHT)):
        for begin, take in (DEEPSPEED, AUTO_EP):
            engine = begin(Job(activations, 0))
            theirs = sharded_moe._AllToAll, auto_ep_layer._AllToAllV
            for layer in [one for one in engine.module.modules() if type(one) is sharded_moe.MOELayer][-1:]:
                with pytest.raises(KeyboardInterrupt), patch.object(layer, "forward", side_effect=KeyboardInterrupt):
                    output_of(engine.module, begin)
            with torch.no_grad():
                found[place].append(float(output_of(engine.module, begin).sum()))
            # Groups of ranks cannot be copied.
            groups = {vars(module).get("ep_group") for module in engine.module.modules()} - {None}
            other = copy.deepcopy(engine.module, {id(group): group for group in groups})
            torch.autograd.backward(output_of(other, begin).sum())
            found[place].append(
                [parameter.grad.tolist() for parameter in other.parameters() if parameter.grad is not None]
            )
            if activations is not None:
                deepspeed_compress.detach(engine)
            found[place].append([take(engine, number) for number in range(2)])
            assert (sharded_moe._AllToAll, auto_ep_layer._AllToAllV) == theirs
            engine.destroy()
    return found


def output_of(model: Any, begin: Callable[[Job], Any]) -> Tensor:
    if begin is start:
        return model(batch(7))  # type: ignore[no-any-return]  # torch returns Any
    return model(input_ids=torch.arange(6)[None], use_cache=False).logits  # type: ignore[no-any-return]  # torch returns Any


def test_evaluation_copies_and_detached_engines_are_exact() -> None:
    for plain, ours in run_forks(2, without_gradients):
        assert ours == plain


def two_engines(rank: int) -> list[Any]:
    """Interleave two engines whose layers share a group, and let a pass of one fail in its experts."""
    found: list[Any] = []
    for separate in (True, False):
        losses: list[list[float]] = [[], []]
        engines = [start(Job(EIGHT)), start(Job(FOUR))]
        layer = engines[0].module.experts[1].deepspeed_moe.experts
        for number in range(2):
            if separate:
                for place, engine in enumerate(engines):
                    losses[place].append(step(engine, number))
                continue
            with pytest.raises(KeyboardInterrupt), patch.object(layer, "forward", side_effect=KeyboardInterrupt):
                loss_of(engines[0], batch(5))
            open_losses = [loss_of(engine, batch(number)) for engine in engines]
            for place in (1, 0):
                engines[place].backward(open_losses[place])
                engines[place].step()
                losses[place].append(float(open_losses[place].detach()))
        found.append((losses, [weights(engine) for engine in engines]))
        for engine in engines:
            engine.destroy()
        found.append(sharded_moe._AllToAll.__module__)
    return found


def test_engines_that_share_a_group_do_not_disturb_each_other() -> None:
    for separate, first, interleaved, second in run_forks(2, two_engines):
        assert interleaved == separate
        assert first == second == sharded_moe.__name__


def poisoned(rank: int) -> list[Any]:
    """Return, for each job, what is not finite after rank 1 has a number that is not."""
    found = []
    for activations in (None, EIGHT, FOUR):
        engine = start(Job(activations, 0))
        x = batch(0)
        if rank == 1:
            x[3, 0] = float("nan")
        output = engine.module(x)
        output.sum().backward()
        spoiled = [name for name, parameter in engine.module.named_parameters() if not parameter.grad.isfinite().all()]
        found.append((output.isfinite().flatten().tolist(), sorted(spoiled)))
        engine.destroy()
    return found


def test_a_number_that_is_not_finite_goes_where_it_does_without_us() -> None:
    ranks = run_forks(2, poisoned)
    for plain, eight, four in ranks:
        assert eight == four == plain
    assert all(spoiled for _, spoiled in ranks[0])


def refused(rank: int) -> list[str]:
    """Return the messages for layers and models whose exchanges cannot be taken over."""
    found = []
    engine = start(Job())
    engine.config[SECTION] = {"gradients": {"method": "none"}, "activations": dict(EIGHT)}
    layer = engine.module.experts[0].deepspeed_moe
    for owner, name, value in ((layer, "use_tutel", True), (layer, "comm_backend", "deepep")):
        vars(owner)[name] = value
        found.append(refusal(UnsupportedError, deepspeed_compress.attach, engine))
        del vars(owner)[name]
    layer.use_tutel = False
    with patch.object(engine, "sequence_parallel_size", 2):
        found.append(refusal(UnsupportedError, deepspeed_compress.attach, engine))
    engine.module.first.compile(backend="eager")
    found.append(refusal(UnsupportedError, deepspeed_compress.attach, engine))
    engine.module.first._compiled_call_impl = None
    deepspeed_compress.attach(engine)
    found.append(refusal(UnsupportedError, engine.compile))
    engine.module.experts[0].compile(backend="eager")
    return [*found, refusal(UnsupportedError, step, engine, 0)]


REFUSED = (
    "Tutel's layers (use_tutel) are not available",
    "expert_parallel.comm_backend exchanges by itself",
    "experts combined with pipeline, tensor or sequence parallelism, which includes expert slicing",
    "exchanges inside a compiled graph cannot be taken over; do not compile the model",
    "exchanges inside a compiled graph cannot be taken over; do not call engine.compile()",
    "exchanges inside a compiled graph cannot be taken over; do not compile experts.0, or remove the key",
)


def test_what_cannot_be_taken_over_is_refused_by_name() -> None:
    for messages in run_forks(2, refused, compiled=True):
        for text, message in zip(REFUSED, messages, strict=True):
            assert f"/deepspeed_compress/activations/experts: {text}" in message
