"""Islands with tensor parallelism (AutoTP), compared with DeepSpeed and data parallelism, saved and resumed."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils import groups

import deepspeed_compress
from deepspeed_compress.config import parse_section
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.tools.plan import plans
from tests.support.forks import run_forks
from tests.support.island_jobs import SGD, section
from tests.support.jobs import BATCH, Job, largest_difference, make_engine, network, weights
from tests.support.messages import refusal
from tests.support.resuming import resume, save_and_continue
from tests.support.tensor_islands import AUTO_TP, TENSOR, llama, start_tensor, take_steps

SAMPLED = pytest.mark.sampled(12)

PLAIN: Mapping[str, Any] = {"sync_every": 1, "exchange": {"method": "none"}}
SAVED = 4
"""Number of steps before a checkpoint."""


@dataclass
class Run:
    """Records of a run after every step.

    `replicated` names the parameters that are equal on tensor-parallel ranks. `reported` holds the reported bytes of
    split layers.
    """

    weights: list[dict[str, list[float]]] = field(default_factory=list)
    sent: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    replicated: list[str] = field(default_factory=list)
    reported: list[int] = field(default_factory=list)


def train(rank: int, *jobs: Job) -> list[Run]:
    """Run the jobs one after the other in one process."""
    found = []
    for job in jobs:
        engine, run = start_tensor(job), Run()
        named = engine.module.named_parameters()
        run.replicated = [name for name, one in named if not is_model_parallel_parameter(one)]
        if job.section:
            engine.compression.subscribe(lambda figures, run=run: run.reported.append(figures.bytes_tensor))
        for number in range(job.steps):
            run.losses += take_steps(engine, rank, job, number, number + 1)
            run.weights.append(weights(engine))
            run.sent.append(engine.compression.meter.bytes_islands if job.section else 0)
        found.append(run)
        engine.destroy()
    return found


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_uncompressed_exchange_every_step_equals_data_parallelism(stage: int) -> None:
    """A run with islands equals one without.

    One island of four ranks equals DeepSpeed alone bit for bit. Two islands of two ranks with SGD equal data
    parallelism, because the mean of the steps is the step along the mean gradient.
    """
    alone = Job(stage, extra=AUTO_TP, steps=2)
    one = replace(alone, section=section(size=2, **PLAIN))
    whole = Job(stage, extra={**AUTO_TP, **SGD}, steps=3)
    two = replace(whole, section=section(size=1, **PLAIN))
    for plain, same, together, divided in run_forks(4, train, alone, one, whole, two, timeout=400):
        assert (same.weights, same.losses) == (plain.weights, plain.losses)
        assert largest_difference(together.weights[-1], divided.weights[-1]) < 1e-6
        assert largest_difference(together.weights[-1], together.weights[0]) > 1e-3


def in_turns(rank: int, plain: Job, divided: Job) -> tuple[dict[str, list[float]], int]:
    """Train an engine with islands and one without in turns.

    Returns:
        The weights of the engine without islands, and the number of data-parallel ranks of one that shares no layers.
    """
    engines = [start_tensor(divided), start_tensor(plain)]
    for number in range(plain.steps):
        for engine in engines:
            take_steps(engine, rank, plain, number, number + 1)
    groups.mpu = None
    alone = make_engine(network(), Job(1).config())
    return weights(engines[1]), alone.seq_data_parallel_group.size()


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2])
def test_engines_next_to_islands_average_over_all_ranks(stage: int) -> None:
    """DeepSpeed's module `groups` stays the `mpu` after an engine with AutoTP, so the test resets it."""
    plain = Job(stage, extra=AUTO_TP, steps=3)
    expected = run_forks(4, train, plain, timeout=400)
    divided = replace(plain, section=section(size=1, **PLAIN))
    for [alone], found in zip(expected, run_forks(4, in_turns, plain, divided, timeout=400), strict=True):
        assert found == (alone.weights[-1], 4)


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2])
def test_replicated_weights_stay_equal_and_are_sent_once(stage: int) -> None:
    """With four bits, the rounding of an element depends on the elements around it."""
    exchange = {"method": "blockwise", "bits": 4, "block_size": 32}
    job = Job(stage, extra=AUTO_TP, section=section(size=1, sync_every=2, exchange=exchange), steps=4)
    ranks = [run for [run] in run_forks(4, train, job, timeout=400)]
    replicated = ranks[0].replicated
    assert {name.rpartition(".")[0].rpartition(".")[2] for name in replicated} >= {"norm", "input_layernorm"}
    for number in range(job.steps):
        first, second, third, fourth = (run.weights[number] for run in ranks)
        meets = number % 2 == 1
        assert (first == third, second == fourth) == (meets, meets)
        for name in replicated:
            assert first[name] == second[name], name
            assert third[name] == fourth[name], name
    settings = parse_section(job.config()).islands
    assert settings is not None
    size = sum(parameter.numel() for parameter in llama().parameters())
    [planned] = [plan.bytes_a_step * 2 for plan in plans(settings, 2, size, 1e8, 1.0) if plan.sync_every == 2]
    for place in ((0, 1), (2, 3)):
        sent = [sum(ranks[rank].sent[number] for rank in place) for number in range(job.steps)]
        assert sent == pytest.approx([0, planned] * 2, rel=0.1)
    # Two ranks sum activations [3, 8, 36] seven times a layer and once for the head, gather logits [3, 8, 62], of which
    # each has half, and sum a norm, all in fp32.
    assert [run.reported for run in ranks] == [[4 * (24 * (15 * 36 + 31) + 1)] * job.steps, [], [], []]


def with_moments(rank: int, job: Job) -> str:
    return refusal(UnsupportedError, start_tensor, job)


def test_second_moments_are_refused() -> None:
    """Blocks of replicated weights could be cut at different places."""
    for text in run_forks(4, with_moments, Job(0, extra=AUTO_TP, section=section(size=1, second_moments={}))):
        assert "/deepspeed_compress/islands/second_moments: cannot be exchanged with tensor parallelism" in text


DILOCO = section(size=1, preset="diloco", sync_every=4, fragments=2, delay=1, own=["lm_head"])
TOPK = {**section(size=2, preset="diloco", sync_every=2), "gradients": {"method": "topk", "density": 0.1}}
"""Settings of one island that applies momentum, and whose ranks keep gradient residuals."""


@SAMPLED
@pytest.mark.parametrize(("stage", "methods"), [(1, DILOCO), (2, TOPK)])
def test_a_resumed_run_continues_bit_for_bit(stage: int, methods: Mapping[str, Any], tmp_path: Path) -> None:
    job = Job(stage, extra=AUTO_TP, section=methods, steps=7)
    how = (str(tmp_path), SAVED, None, start_tensor, take_steps)
    straight = run_forks(4, save_and_continue, job, *how, timeout=400)
    assert run_forks(4, resume, job, *how, timeout=400) == straight


def sampled(rank: int, job: Job) -> tuple[list[int], int]:
    model = llama()
    engine, _, loader, _ = deepspeed_compress.initialize(
        model=model, model_parameters=list(model.parameters()), training_data=list(range(24)), config=job.config()
    )
    return list(loader.data_sampler), engine.train_micro_batch_size_per_gpu()


def test_ranks_that_share_layers_read_the_same_data_and_islands_do_not() -> None:
    """DeepSpeed divides a batch by all ranks, including those that share layers."""
    extra = {**AUTO_TP, "train_batch_size": 4 * BATCH}
    ranks = run_forks(4, sampled, Job(1, extra=extra, section=section(size=1)), timeout=400)
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert sorted(ranks[0][0] + ranks[2][0]) == list(range(24))
    assert [micro for _, micro in ranks] == [BATCH] * 4


def refused(rank: int, job: Job, initialized: bool) -> str:
    model = llama()
    if initialized:
        deepspeed.tp_model_init(model, tp_size=TENSOR, dtype=torch.float32)
    return refusal((ConfigError, UnsupportedError), make_engine, model, job.config())


SERVED = section(elastic={"rendezvous": "localhost:1", "parameter_server": {}})


@pytest.mark.parametrize(
    ("ranks", "job", "initialized", "text"),
    [
        (3, Job(1, extra=AUTO_TP, section=section(by_host=True)), False, "islands/by_host: 2 ranks"),
        (2, Job(1, extra=AUTO_TP, section=section(size=2)), False, "islands/size: islands of 4 do not divide"),
        (2, Job(1, section=section(size=1)), True, "tp_model_init was called for 2 ranks"),
        (2, Job(1, section=SERVED), True, "parameter_server knows one shape of each parameter"),
    ],
)
def test_invalid_divisions_are_refused(ranks: int, job: Job, initialized: bool, text: str) -> None:
    for message in run_forks(ranks, refused, job, initialized, timeout=400):
        assert text in message


@pytest.mark.parametrize(
    ("extra", "methods", "place", "text"),
    [
        (AUTO_TP, SERVED, "/tensor_parallel/autotp_size", "2 is not available with a parameter server"),
        ({}, {**SERVED, "parallelism": {"tensor": 2}}, "/deepspeed_compress/parallelism/tensor", "2 is not available"),
        (
            {},
            {**section(size=1), "parallelism": {"pipeline": 2}},
            "/deepspeed_compress/parallelism/pipeline",
            "2 is not available inside islands of one job, because DeepSpeed distributes stages over all ranks",
        ),
        (
            AUTO_TP,
            section(size=3),
            "/deepspeed_compress/islands/size",
            "3 x 2 ranks that share each layer do not divide",
        ),
    ],
)
def test_an_invalid_configuration_is_refused(extra: Any, methods: Any, place: str, text: str) -> None:
    [found] = find_problems(Job(1, extra=extra, section=methods).config(), world_size=8)
    assert found.pointer == place
    assert text in str(found)


ELASTIC = section(elastic={"rendezvous": "localhost:1"})


@pytest.mark.parametrize("islands", [section(size=4), ELASTIC])
@pytest.mark.parametrize(("extra", "parallelism"), [(AUTO_TP, {}), ({}, {"parallelism": {"tensor": 2}})])
def test_a_valid_configuration_is_accepted(extra: Any, parallelism: Any, islands: Any) -> None:
    assert find_problems(Job(1, extra=extra, section={**islands, **parallelism}).config(), world_size=8) == []
