"""Compressed weights in every engine that sends weights: bit-identical replicas, learning, saving, skipped steps."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from deepspeed.runtime import utils
from deepspeed.runtime.zero import stage_1_and_2

from deepspeed_compress import SeamError, UnsupportedError
from deepspeed_compress.backends.deepspeed.checks import check_on_all_ranks
from deepspeed_compress.backends.deepspeed.engine_facts import shared_parameters
from deepspeed_compress.backends.deepspeed.weights.zero_12 import Weights
from deepspeed_compress.collectives.gather import EXACT, DifferenceGather
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.reducer import Run
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise, Cast
from deepspeed_compress.config import CompressConfig, WeightsConfig
from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.config.places import BlockwiseWeights
from deepspeed_compress.monitor import Meter
from tests.support.forks import RankError, run_forks
from tests.support.jobs import (
    Job,
    data,
    make_engine,
    network,
    own_data,
    run,
    start,
    steady_data,
    weights,
)
from tests.support.methods import BF16, FP16, FP32_SUMS, NONE
from tests.support.seeds import SEEDS, Excess

SAMPLED = pytest.mark.sampled(8)

INT8 = Blockwise(bits=8, block_size=32)
INT4_STOCHASTIC = Blockwise(bits=4, block_size=32, stochastic=True)
OWN_ADAM = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}

JOBS: Mapping[str, Job] = {
    "zero_1": Job(stage=1),
    "zero_2": Job(stage=2, accumulation=2),
    "round_robin": Job(stage=1, zero={"round_robin_gradients": True}),
    "bf16": Job(stage=2, extra=BF16),
    "fp16": Job(stage=1, extra=FP16),
    "offload": Job(stage=2, zero={"offload_optimizer": {"device": "cpu"}}, extra=OWN_ADAM),
    "bf16_optimizer": Job(stage=1, extra=FP32_SUMS, accumulation=2),
}
PIPELINES: Mapping[str, Job] = {
    "zero_1": Job(stage=1, stages=2, accumulation=2),
    "bf16_optimizer": Job(stage=1, stages=2, accumulation=2, extra=FP32_SUMS),
}


@dataclass(frozen=True)
class Setting:
    """Settings of sending weights. `raw` sends every parameter uncompressed in our messages."""

    codec: Codec = field(default_factory=lambda: Codec(INT8))
    raw: bool = False
    dense_steps: int = 0


@dataclass(frozen=True)
class Outcome:
    """Results of a run.

    After every step, `bits` holds all weights, `errors` the largest distance of the own weights from the master
    weights, `moves` the largest change of the master weights, and `sent` the bytes sent.
    """

    losses: list[float]
    bits: list[bytes]
    errors: list[float]
    moves: list[float]
    sent: list[int]
    parameters: dict[str, list[float]]
    skipped: int


def attached(engine: Any, setting: Setting) -> tuple[Weights, Meter]:
    exact, meter = set(shared_parameters(engine)), Meter()

    def make_gather(group: Any, sizes: Any, dtype: torch.dtype) -> DifferenceGather:
        channels = (Channel(Codec(Cast(dtype))), Channel(setting.codec))
        channel_of = {name: EXACT if setting.raw or name in exact else 1 for name, _ in sizes}
        shared = Run(engine.compression.clock, meter)
        return DifferenceGather(group, sizes, Messages(channels, channel_of), shared, chunk_numel=400)

    session = engine.compression
    written, exact_ones = BlockwiseWeights(), NoCompression()

    def in_force() -> WeightsConfig:
        return exact_ones if session.clock.step < setting.dense_steps else written

    return Weights(engine, lambda _: make_gather, written, in_force, session.patches), meter


def masters(engine: Any) -> list[torch.Tensor]:
    """Return copies of the rank's own master weights, one per parameter group."""
    optimizer = engine.optimizer
    name = "fp32_groups_flat_partition" if hasattr(optimizer, "bf16_groups") else "single_partition_of_fp32_groups"
    return [part.detach().float().clone() for part in getattr(optimizer, name)]


def held(engine: Any) -> list[torch.Tensor]:
    """Return copies of all weights, one flat buffer per parameter group."""
    optimizer = engine.optimizer
    name = "bf16_groups_flat" if hasattr(optimizer, "bf16_groups") else "bit16_groups_flat"
    return [flat.clone() for flat in getattr(optimizer, name)]


def distance(engine: Any) -> float:
    """Return the largest difference between the own part of the weights and the master weights."""
    rank, ranks = engine.seq_data_parallel_group.rank(), engine.seq_data_parallel_group.size()
    parts = zip(held(engine), masters(engine), strict=True)
    return max(float((flat.chunk(ranks)[rank].float() - master).abs().max()) for flat, master in parts)


def observe(engine: Any, meter: Meter, batches: list[Any]) -> Outcome:
    """Train, and record the state after every step."""
    per_step = engine.gradient_accumulation_steps()
    losses, bits, errors, moves, sent = [], [], [], [], []
    for first in range(0, len(batches), per_step):
        before, meter.bytes_weights = masters(engine), 0
        losses += run(engine, batches[first : first + per_step])
        bits.append(b"".join(bytes(flat.view(torch.uint8).tolist()) for flat in held(engine)))
        errors.append(distance(engine))
        after = zip(masters(engine), before, strict=True)
        moves.append(max(float((new - old).abs().max()) for new, old in after))
        sent.append(meter.bytes_weights)
    return Outcome(losses, bits, errors, moves, sent, weights(engine), engine.skipped_steps)


def begin(job: Job) -> Any:
    return start(replace(job, section=NONE))


def batches_of(engine: Any, rank: int, job: Job) -> list[Any]:
    """Return the micro-batches of a data-parallel rank."""
    if job.stages == 1:
        return data(rank, job)
    dtype = next(engine.module.parameters()).dtype
    return [(x.to(dtype), y.to(dtype)) for x, y in own_data(engine, rank, job)]


def train(rank: int, job: Job, *settings: Setting | None, steady: bool = False) -> list[Outcome]:
    """Train once for each setting; None leaves the weights to DeepSpeed."""
    outcomes = []
    for setting in settings:
        engine = begin(job)
        meter = attached(engine, setting)[1] if setting else Meter()
        outcomes.append(observe(engine, meter, steady_data(rank, job) if steady else batches_of(engine, rank, job)))
        engine.destroy()
    return outcomes


def train_steadily(rank: int, jobs: Sequence[Job]) -> list[list[Outcome]]:
    """Train each of the jobs twice, without compression of weights and with it."""
    return [train(rank, job, None, Setting(), steady=True) for job in jobs]


def assert_followed(ranks: Sequence[Outcome], epsilon: float) -> None:
    """Check that weights have the same bits everywhere after every step, near the masters, and that the loss falls."""
    first = ranks[0]
    assert all(rank.bits == first.bits for rank in ranks)
    assert len(set(first.bits)) == len(first.bits)
    largest = max(max(map(abs, values)) for values in first.parameters.values())
    for rank in ranks:
        for (before, error), move in zip(pairwise([0.0, *rank.errors]), rank.moves, strict=True):
            assert error <= (move + before) / 253 + epsilon * largest
    assert late(first) < 0.8 * sum(first.losses[:10])


def late(outcome: Outcome) -> float:
    return sum(outcome.losses[-10:])


def epsilon_of(job: Job) -> float:
    dtype = torch.bfloat16 if "bf16" in job.extra else torch.float16 if "fp16" in job.extra else torch.float32
    return torch.finfo(dtype).eps


@SAMPLED
@pytest.mark.parametrize("name", JOBS)
def test_replicas_agree_and_follow_the_masters(name: str) -> None:
    job = replace(JOBS[name], steps=40)
    [(_, one)], [(_, other)] = run_forks(2, train_steadily, [job])
    assert_followed([one, other], epsilon_of(job))


@pytest.mark.slow
@pytest.mark.parametrize("name", JOBS)
def test_mean_losses_over_seeds_are_those_of_uncompressed_training(name: str) -> None:
    jobs = [replace(JOBS[name], steps=40, seed=seed) for seed in SEEDS]
    first, second = run_forks(2, train_steadily, jobs)
    for (_, one), (_, other) in zip(first, second, strict=True):
        assert_followed([one, other], epsilon_of(jobs[0]))
    assert Excess.of([late(ours) for _, ours in first], [late(plain) for plain, _ in first]).is_within(0.05)


def pipelines(job: Job, setting: Setting | None) -> list[Outcome]:
    """Run in processes of their own, because DeepSpeed keeps the groups of a pipeline in module state."""
    return [outcome for (outcome,) in run_forks(4, train, job, setting)]


@SAMPLED
@pytest.mark.parametrize("name", PIPELINES)
def test_pipelines(name: str) -> None:
    """Ranks 0 and 1 have the first stage. Both stages hold the tied matrix, whose copies must stay equal."""
    job = replace(PIPELINES[name], steps=40)
    plain, results = pipelines(job, None), pipelines(job, Setting())
    for stage in (slice(0, 2), slice(2, 4)):
        assert_followed(results[stage], epsilon_of(job))
        assert late(results[stage][0]) == pytest.approx(late(plain[0]), rel=0.05)
    tied = [[value for name, value in result.parameters.items() if "tied" in name] for result in results]
    assert tied[0]
    assert tied[0] == tied[2]


@SAMPLED
@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("setting", [Setting(raw=True), Setting(dense_steps=99)], ids=["raw", "dense"])
def test_uncompressed_is_deepspeed_to_the_bit(name: str, setting: Setting) -> None:
    for ours, plain in run_forks(2, train, replace(JOBS[name], steps=6), setting, None):
        assert ours.bits == plain.bits
        assert ours.losses == plain.losses
        assert min(ours.sent) > 0


@SAMPLED
@pytest.mark.parametrize("name", PIPELINES)
def test_uncompressed_pipeline_is_deepspeed_to_the_bit(name: str) -> None:
    job = replace(PIPELINES[name], steps=4)
    plain, raw = pipelines(job, None), pipelines(job, Setting(raw=True))
    assert [rank.bits for rank in plain] == [rank.bits for rank in raw]


def test_compression_begins_after_dense_steps() -> None:
    for plain, ours in run_forks(2, train, Job(stage=2, steps=5), None, Setting(dense_steps=3)):
        same = [one == other for one, other in zip(plain.bits, ours.bits, strict=True)]
        assert same == [True] * 3 + [False] * 2


def test_bytes_are_those_of_the_messages() -> None:
    """The 1004 elements are 502 per rank, in two rounds of 251."""
    for dense, compressed in run_forks(2, train, Job(stage=2), Setting(dense_steps=99), Setting()):
        assert dense.sent == [502 * 4] * 4
        assert compressed.sent == [2 * INT8.payload_bytes(251)] * 4


@SAMPLED
@pytest.mark.parametrize("name", ["zero_1", "zero_2", "fp16", "bf16_optimizer"])
def test_a_skipped_step_leaves_no_trace(name: str) -> None:
    """After a NaN in one rank's batch nothing is sent, and training continues as if the step had not happened."""
    job = replace(JOBS[name], steps=5)
    poisoned = run_forks(2, train, replace(job, poison=(2, 1)), Setting())
    without = run_forks(2, train, replace(job, skip=(2,)), Setting())
    for (bad,), (good,) in zip(poisoned, without, strict=True):
        assert bad.skipped == 1
        assert bad.sent[2] == 0
        assert bad.bits[2] == bad.bits[1]
        assert bad.parameters == good.parameters


def two_groups(rank: int) -> tuple[list[bool], list[list[bytes]]]:
    """Return whether DeepSpeed's function was restored after each step, and the bits of both groups."""
    model = network()
    matrices = {"params": [parameter for parameter in model.parameters() if parameter.ndim == 2]}
    vectors = {"params": [parameter for parameter in model.parameters() if parameter.ndim == 1], "weight_decay": 0.0}
    job = Job(stage=2, section=NONE)
    engine = make_engine(model, job.config(), [matrices, vectors])
    attached(engine, Setting())
    restored, bits = [], []
    for batch in data(rank, job):
        run(engine, [batch])
        restored.append(stage_1_and_2.all_gather_dp_groups is utils.all_gather_dp_groups)
        bits.append([bytes(flat.view(torch.uint8).tolist()) for flat in held(engine)])
    assert distance(engine) < 1e-3
    return restored, bits


def test_parameter_groups() -> None:
    (restored, bits), (_, others) = run_forks(2, two_groups)
    assert restored == [True] * 4
    assert bits == others
    assert all(len(groups) == 2 for groups in bits)
    assert all(one != other for before, after in pairwise(bits) for one, other in zip(before, after, strict=True))


def two_engines(rank: int) -> list[dict[str, list[float]]]:
    """Return parameters of an uncompressed engine, alone and next to a compressed one, and those of the latter."""
    job = Job(stage=2)
    batches = data(rank, job)
    alone = begin(job)
    run(alone, batches)
    beside, compressed = begin(job), begin(job)
    attached(compressed, Setting())
    for batch in batches:
        run(beside, [batch])
        run(compressed, [batch])
    return [weights(engine) for engine in (alone, beside, compressed)]


def test_other_engines_are_unchanged() -> None:
    for alone, beside, compressed in run_forks(2, two_engines):
        assert alone == beside
        assert alone != compressed


def without_gather(rank: int, job: Job) -> None:
    engine = begin(job)
    engine.optimizer.step = lambda: None
    attached(engine, Setting())
    engine.optimizer.step()


@pytest.mark.parametrize("name", ["zero_2", "bf16_optimizer"])
def test_a_step_that_gathers_otherwise_is_an_error(name: str) -> None:
    with pytest.raises(RankError, match=f"{SeamError.__name__}.*did not call all_gather_dp_groups"):
        run_forks(2, without_gather, JOBS[name])


def check_only(rank: int, job: Job) -> None:
    config = CompressConfig.model_validate({"weights": {"method": "blockwise", "bits": 8}})
    check_on_all_ranks(begin(job), config, None)


@pytest.mark.parametrize("job", [Job(stage=0), Job(stage=0, extra=FP16)], ids=["zero_0", "fp16"])
def test_engines_that_send_no_weights_are_refused(job: Job) -> None:
    with pytest.raises(RankError, match=f"{UnsupportedError.__name__}: /deepspeed_compress/weights.*has no effect"):
        run_forks(2, check_only, job)


def single(rank: int, job: Job) -> tuple[bool, int]:
    engine = begin(job)
    plain = begin(job)
    meter = attached(engine, Setting())[1]
    batches = data(rank, job)
    return run(engine, batches) == run(plain, batches), meter.bytes_weights


@pytest.mark.parametrize("name", ["zero_2", "bf16_optimizer"])
def test_a_single_rank_sends_nothing(name: str) -> None:
    assert run_forks(1, single, JOBS[name]) == [(True, 0)]


def save_and_resume(rank: int, job: Job, directory: str) -> tuple[list[float], Outcome, Outcome]:
    """Return distances from the master weights before and after a save, and the results of continuing and resuming."""
    setting = Setting(Codec(INT4_STOCHASTIC))
    engine = begin(job)
    sync, meter = attached(engine, setting)
    batches = batches_of(engine, rank, job)
    half = len(batches) // 2
    observe(engine, meter, batches[:half])
    distances = [distance(engine)]
    for _ in range(2):
        sync.synchronise()
        engine.save_checkpoint(directory)
        distances.append(distance(engine))
    gone_on = observe(engine, meter, batches[half:])
    resumed_engine = begin(job)
    resumed_sync, resumed_meter = attached(resumed_engine, setting)
    resumed_engine.load_checkpoint(directory)
    resumed_sync.synchronise()
    distances.append(distance(resumed_engine))
    return distances, gone_on, observe(resumed_engine, resumed_meter, batches[half:])


@SAMPLED
@pytest.mark.parametrize("name", ["zero_1", "zero_2", "bf16", "bf16_optimizer", "offload"])
def test_resume_is_going_on_after_the_save(name: str, tmp_path: Any) -> None:
    job = replace(JOBS[name], steps=8)
    results = run_forks(2, save_and_resume, job, str(tmp_path))
    for distances, gone_on, resumed in results:
        # In fp32, the weights then equal the master weights. In bf16, they are the rounded master weights.
        assert distances[0] > distances[1] == distances[2] == distances[3]
        assert ("bf16" in name) == (distances[1] > 0)
        assert resumed.bits == gone_on.bits
        assert resumed.losses == gone_on.losses
    assert results[0][1].bits == results[1][1].bits
