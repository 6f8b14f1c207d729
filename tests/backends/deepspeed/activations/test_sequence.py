"""Sequence parallelism with compressed all-to-alls, compared with DeepSpeed alone."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.comm import comm
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from tests.support.activations import accumulate, flattened, interrupt
from tests.support.forks import run_forks
from tests.support.jobs import make_engine, network, train_on, weights
from tests.support.messages import refusal
from tests.support.ulysses import (
    HEAD_SIZE,
    HEADS,
    KEY_HEADS,
    LAYERS,
    LENGTH,
    RANKS,
    ROWS,
    VOCABULARY,
    Job,
    loss_of,
    register,
    share,
    start,
    train,
)

SAMPLED, SLOW = pytest.mark.sampled(6), pytest.mark.slow
EIGHT: Mapping[str, Any] = {"sequence": {}}
FOUR: Mapping[str, Any] = {"sequence": {"bits": 4}}
UNCOMPRESSED: Mapping[str, Any] = {SECTION: {"gradients": {"method": "none"}}}


@dataclass
class Outcome:
    """Results of a rank: losses, parameters, and bytes of sequence parallelism of each step, sent and saved."""

    losses: list[float]
    parameters: dict[str, list[float]]
    bytes: list[tuple[int, int]]


def train_all(rank: int, *jobs: Job) -> list[Outcome]:
    mpu = register()
    return [train_one(rank, job, mpu) for job in jobs]


def train_one(rank: int, job: Job, mpu: Any) -> Outcome:
    engine = start(job, mpu)
    counted: list[tuple[int, int]] = []
    if "compression" in vars(engine):
        engine.compression.subscribe(lambda step: counted.append((step.bytes_sequence, step.bytes_sequence_saved)))
    outcome = Outcome(train(engine, rank), weights(engine), counted)
    engine.destroy()
    assert "all_to_all_single" not in vars(comm.cdb)
    return outcome


ELEMENTS = 2 * LAYERS * ROWS * LENGTH // RANKS * (2 * HEADS + 2 * KEY_HEADS) * HEAD_SIZE // RANKS
"""Elements that a rank sends in a step: query, key, value and output, and their gradients."""


def payload(bits: int) -> int:
    """Return the bytes of all messages of a step: codes, and a scale in bf16 for each 64 elements."""
    return ELEMENTS * bits // 8 + ELEMENTS // 64 * 2


def test_losses_bytes_and_recomputation() -> None:
    """Losses are near those of DeepSpeed, bytes are those on the wire, and recomputed layers get the same bits."""
    plain, none, eight, four = (Job(), Job(extra=UNCOMPRESSED), Job(EIGHT), Job(FOUR))
    recomputed = [replace(eight, reentrant=reentrant) for reentrant in (True, False)]
    ranks = run_forks(RANKS, train_all, plain, none, eight, four, *recomputed)
    for alone, counted, in_8, in_4, *others in ranks:
        assert (counted.losses, counted.parameters) == (alone.losses, alone.parameters)
        assert in_8.losses == pytest.approx(alone.losses, rel=1e-3)
        assert in_4.losses == pytest.approx(alone.losses, rel=1e-2)
        assert alone.losses != in_8.losses != in_4.losses
        for other in others:
            assert (other.losses, other.parameters) == (in_8.losses, in_8.parameters)
    _, counted, in_8, in_4, *_ = ranks[0]
    assert counted.bytes == [(4 * ELEMENTS, 0)] * 2
    assert in_8.bytes == [(payload(8), 4 * ELEMENTS - payload(8))] * 2
    assert in_4.bytes == [(payload(4), 4 * ELEMENTS - payload(4))] * 2


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_stages_with_recomputation(stage: int) -> None:
    jobs = [Job(), *(Job(FOUR, reentrant=reentrant) for reentrant in (None, True, False))]
    for alone, stored, *others in run_forks(RANKS, train_all, *(replace(job, stage=stage) for job in jobs)):
        assert stored.losses == pytest.approx(alone.losses, rel=1e-2)
        assert all((other.losses, other.parameters) == (stored.losses, stored.parameters) for other in others)


@pytest.mark.slow
def test_bf16_with_replicas() -> None:
    jobs = [Job(kind, 2, extra={"bf16": {"enabled": True}}) for kind in (None, EIGHT, FOUR)]
    for alone, in_8, in_4 in run_forks(2 * RANKS, train_all, *jobs):
        assert in_8.losses == pytest.approx(alone.losses, rel=1e-2)
        assert in_4.losses == pytest.approx(alone.losses, rel=2e-2)


Program = Callable[[int, Job, Any], list[Any]]


def outside_of_training(rank: int, job: Job, mpu: Any) -> list[Any]:
    """Evaluate, and train a copy of the model, around a forward pass whose backward pass comes later."""
    engine = start(job, mpu)
    loss = loss_of(engine, 0, rank)
    with torch.no_grad():
        found: list[Any] = [float(loss_of(engine, 1, rank))]
    other = copy.deepcopy(engine.module)
    loss_of(other, 1, rank).backward()
    found += [parameter.grad.tolist() for parameter in other.parameters() if parameter.grad is not None]
    engine.backward(loss)
    loss_of(other, 2, rank).backward()
    engine.step()
    return [*found, *(parameter.grad.tolist() for parameter in other.parameters() if parameter.grad is not None)]


def between_micro_batches(rank: int, job: Job, mpu: Any) -> list[Any]:
    """Evaluate a part of the model, and another model, after a backward pass that was started on the loss."""
    other = start(replace(job, activations=None), mpu).module
    engine = start(replace(job, extra={"gradient_accumulation_steps": 2}), mpu)
    loss_of(engine, 0, rank).backward()  # type: ignore[no-untyped-call]  # torch has no types here
    engine.step()
    tokens, positions = share(1, rank)
    with torch.no_grad():
        hidden = engine.module.model(input_ids=tokens, position_ids=positions, use_cache=False).last_hidden_state
        return [hidden.tolist(), float(loss_of(other, 1, rank))]


def after_detach(rank: int, job: Job, mpu: Any) -> list[Any]:
    engine = start(job, mpu)
    if job.activations is not None:
        deepspeed_compress.detach(engine)
    engine.compile(backend="eager")
    return [train(engine, rank), weights(engine)]


def one_alone_beside_another(rank: int, job: Job, mpu: Any) -> list[Any]:
    """Interleave an engine that is attached with one that is not, over one group."""
    engines = [start(job, mpu), start(replace(job, activations=None), mpu)]
    for step in range(2):
        losses = [loss_of(engine, step, rank) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in reversed(engines):
            engine.step()
    return [weights(engines[1])]


def accumulated(rank: int, job: Job, mpu: Any) -> list[Any]:
    engine = start(replace(job, extra={"gradient_accumulation_steps": 3}), mpu)
    accumulate(engine, lambda seed: loss_of(engine, seed, rank))
    return [weights(engine)]


def backward_of_a_tensor(rank: int, job: Job, mpu: Any) -> list[Any]:
    """Start backward passes on the loss, in place of the engine's method."""
    engine = start(job, mpu)
    for step in range(2):
        loss_of(engine, step, rank).backward()  # type: ignore[no-untyped-call]  # torch has no types here
        engine.step()
    return [weights(engine)]


def interrupted(rank: int, job: Job, mpu: Any) -> list[Any]:
    engine = start(job, mpu)
    interrupt(engine, lambda: loss_of(engine, 0, rank))
    return [train(engine, rank), weights(engine)]


def two_engines(rank: int, job: Job, mpu: Any) -> list[Any]:
    """Interleave two engines over one group, with other bits."""
    bits = None if job.activations is None else FOUR
    engines = [start(job, mpu), start(replace(job, activations=bits), mpu)]
    for step in range(2):
        losses = [loss_of(engine, step + place, rank) for place, engine in enumerate(engines)]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            engine.step()
    return [weights(engine) for engine in engines]


def run_program(rank: int, program: Program, *jobs: Job) -> list[list[Any]]:
    mpu = register()
    return [program(rank, job, mpu) for job in jobs]


@pytest.mark.parametrize(
    "program",
    [
        outside_of_training,
        between_micro_batches,
        *(pytest.param(one, marks=SLOW) for one in (after_detach, one_alone_beside_another)),
    ],
)
def test_everything_outside_of_training_is_exact(program: Program) -> None:
    for plain, ours in run_forks(RANKS, run_program, program, Job(), Job(EIGHT)):
        assert ours == plain


@SAMPLED
@pytest.mark.parametrize("program", [accumulated, backward_of_a_tensor, interrupted, two_engines])
def test_programs_see_nearly_what_they_see_with_deepspeed_alone(program: Program) -> None:
    for plain, ours in run_forks(RANKS, run_program, program, Job(), Job(EIGHT)):
        assert 0 < (flattened(plain) - flattened(ours)).abs().mean() < 1e-3


def parts_alone(rank: int, *jobs: Job) -> list[dict[str, list[float]]]:
    """Train by calling the parts of the model in place of the engine, and evaluate them in between."""
    mpu, found = register(), []
    for job in jobs:
        engine = start(job, mpu)
        batch, positions = share(0, rank)
        read = {"input_ids": batch, "position_ids": positions, "use_cache": False}
        for _ in range(2):
            hidden = engine.module.model(**read).last_hidden_state
            with torch.no_grad():
                engine.module.model(**read)
            loss = nn.functional.cross_entropy(engine.module.lm_head(hidden).flatten(0, 1), batch.flatten())
            train_on(engine, loss)
        found.append(weights(engine))
        engine.destroy()
    return found


@SAMPLED
def test_recomputation_in_parts_that_are_called_by_themselves_changes_no_bit() -> None:
    jobs = [Job(FOUR, reentrant=reentrant) for reentrant in (None, True, False)]
    for stored, *recomputed in run_forks(RANKS, parts_alone, *jobs):
        assert all(one == stored for one in recomputed)


class Attention(nn.Module):
    """Attention of DeepSpeed's `DistributedAttention`, with the batch in the first place, over tokens and one more.

    Args:
        group: the sequence-parallel group.
        heads: number of heads of queries, keys and values, which the ranks need not divide.
    """

    def __init__(self, group: Any, heads: int) -> None:
        from deepspeed.sequence.layer import DistributedAttention

        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(VOCABULARY, heads * HEAD_SIZE)
        self.inner = nn.Linear(heads * HEAD_SIZE, 3 * heads * HEAD_SIZE)
        self.outer = nn.Linear(heads * HEAD_SIZE, VOCABULARY)
        self.attention = DistributedAttention(_Local(), group, 2, 1)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.inner(self.embedding(tokens))
        parts = hidden.view(*tokens.shape, 3, self.heads, HEAD_SIZE).unbind(2)
        return self.outer(self.attention(*parts, 0).flatten(2))


class _Local(nn.Module):
    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        parts = [one.transpose(1, 2) for one in (query, key, value)]
        return nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2)


def with_own_attention(rank: int, *jobs: Job) -> list[list[Any]]:
    return [train_attention(rank, job, heads) for heads in (4, 3) for job in jobs]


def train_attention(rank: int, job: Job, heads: int) -> list[Any]:
    torch.manual_seed(0)
    deepspeed.init_distributed("gloo")
    config = {**job.config(), "sequence_parallel_size": RANKS, "data_parallel_size": 1, "train_batch_size": ROWS}
    model = Attention(None, heads)
    engine = make_engine(model, config)
    model.attention.spg = engine.seq_parallel_group
    losses = []
    for step in range(2):
        tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH // RANKS), generator=torch.Generator().manual_seed(step))
        losses.append(train_on(engine, nn.functional.cross_entropy(engine(tokens).flatten(0, 1), tokens.flatten())))
    engine.destroy()
    return losses


@SAMPLED
def test_attention_of_deepspeed_with_even_and_uneven_heads() -> None:
    for even, even_8, uneven, uneven_8 in run_forks(RANKS, with_own_attention, Job(), Job(EIGHT)):
        assert even != even_8 == pytest.approx(even, rel=1e-3)
        assert uneven != uneven_8 == pytest.approx(uneven, rel=1e-3)


def poisoned(rank: int, *jobs: Job) -> list[list[bool]]:
    mpu = register()
    return [poison(rank, start(job, mpu)) for job in jobs]


def poison(rank: int, engine: Any) -> list[bool]:
    """Return whether loss and gradients are finite after one rank alone has an activation that is not."""
    engine.module.model.layers[1].self_attn.v_proj.register_forward_hook(
        lambda module, inputs, output: output.index_fill(1, torch.tensor(0), torch.nan) if rank == 1 else output
    )
    loss = loss_of(engine, 0, rank)
    engine.backward(loss)
    gradients = [parameter.grad for parameter in engine.module.parameters()]
    return [bool(loss.isfinite()), all(bool(gradient.isfinite().all()) for gradient in gradients)]


@SAMPLED
def test_a_number_that_is_not_finite_reaches_the_gradients_of_all() -> None:
    for plain, ours in run_forks(RANKS, poisoned, Job(stage=0), Job(FOUR, 0)):
        assert ours == plain
        assert not ours[1]


def refused(rank: int) -> list[str]:
    """Return the messages for an engine without sequence parallelism, a compiled model, and one without attention."""
    mpu = register()
    config = {**Job(EIGHT).config(), "train_micro_batch_size_per_gpu": 3}
    engine = start(Job(EIGHT), mpu)
    later = refusal(UnsupportedError, engine.compile, backend="eager")
    engine.destroy()
    engine = start(Job(), mpu)
    engine.config[SECTION] = config[SECTION]
    engine.module.model.layers[0].mlp.compile(backend="eager")
    compiled = refusal(UnsupportedError, deepspeed_compress.attach, engine)
    made = make_engine(network(), config, mpu=mpu)
    made.backward(made(torch.ones(3, 12)).sum())
    return [later, compiled, refusal(UnsupportedError, made.step)]


@SAMPLED
def test_engines_whose_messages_cannot_be_taken_over() -> None:
    for later, compiled, idle in run_forks(RANKS, refused):
        assert "/activations/sequence: messages inside a compiled graph cannot be taken over" in later
        assert "/activations/sequence: messages inside a compiled graph cannot be taken over" in compiled
        assert "/activations/sequence has no effect: no attention has exchanged anything" in idle


def compiled_later(rank: int) -> list[list[float]]:
    """Return the losses without compiled parts, and with one that is compiled after attaching."""
    mpu, found = register(), []
    for compiled in (False, True):
        engine = start(Job(EIGHT), mpu)
        if compiled:
            engine.module.model.layers[0].compile(backend="eager")
        found.append(train(engine, rank))
        engine.destroy()
    return found


@SLOW
def test_messages_of_parts_that_are_compiled_later_are_compressed() -> None:
    """Graphs end before an all-to-all, so that nothing in them has to be taken over."""
    for plain, compiled in run_forks(RANKS, compiled_later, compiled=True):
        assert compiled == plain
