"""Engines next to one that divides the ranks: each of them keeps its own data-parallel ranks."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch.distributed as dist
from deepspeed.utils import groups

import deepspeed_compress
from deepspeed_compress.errors import UnsupportedError
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, network, run, start, train, weights
from tests.support.methods import NONE

SAMPLED = pytest.mark.sampled(4)
ISLANDS: Mapping[str, Any] = {**NONE, "islands": {"size": 2, "sync_every": 2}}
NODES: Mapping[str, Any] = {**NONE, "parallelism": {"shard_within": 2}}
RANKS = 4
CASES = [*((stage, ISLANDS) for stage in (0, 1, 2, 3)), *((stage, NODES) for stage in (1, 2, 3))]


def beside(rank: int, plain: Job, divided: Job) -> list[Any]:
    """Train plain engines in turns with an engine that divides the ranks.

    Returns:
        The weights of the plain engines: one made before the other engine, one next to it, and one after it has ended.
    """
    batches = data(rank, plain)
    first, other = start(plain), start(divided)
    second = start(plain)
    for batch in batches:
        for engine in (other, first, second):
            run(engine, [batch])
    other.destroy()
    third = start(plain)
    run(third, batches)
    return [weights(engine) for engine in (first, second, third)]


@SAMPLED
@pytest.mark.parametrize(("stage", "section"), CASES)
def test_engines_without_the_section_average_over_all_ranks(stage: int, section: Mapping[str, Any]) -> None:
    plain = Job(stage)
    expected = [outcome.parameters for outcome in run_forks(RANKS, train, plain)[0]]
    for found in run_forks(RANKS, beside, plain, Job(stage, section)):
        assert found == expected * 3


class Unanswering:
    """Division of ranks that answers no question, since no engine may ask for that of another one."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"an engine asked for {name} of another division")


@contextmanager
def unanswered() -> Iterator[None]:
    groups.mpu = Unanswering()
    try:
        yield
    finally:
        groups.mpu = None


def asks_its_own(rank: int, jobs: Sequence[Job], directory: Path) -> None:
    deepspeed.init_distributed("gloo")
    for number, job in enumerate(jobs):
        engine = start(job)
        with unanswered():
            run(engine, data(rank, job))
            engine.save_checkpoint(str(directory / str(number)))
            engine.load_checkpoint(str(directory / str(number)))
            engine.save_16bit_model(str(directory / f"{number}-model"))
            engine.eval()
            engine(data(rank, job)[0][0])
        engine.destroy()
        dist.barrier()


def test_an_engine_that_divides_the_ranks_asks_for_its_own_division(tmp_path: Path) -> None:
    """Whatever it does, it does not depend on what other engines have left in DeepSpeed's module `groups`."""
    zero = {"stage3_gather_16bit_weights_on_model_save": True}
    jobs = [Job(stage, section, zero=zero if stage == 3 else {}) for stage, section in CASES]
    run_forks(RANKS, asks_its_own, jobs, tmp_path)


def together(rank: int, jobs: Sequence[Job]) -> list[Any]:
    engines = [start(job) for job in jobs]
    for batch in data(rank, jobs[0]):
        for engine in engines:
            run(engine, [batch])
    return [weights(engine) for engine in engines]


@SAMPLED
@pytest.mark.parametrize("stage", [1, 3])
def test_engines_with_unlike_divisions_train_as_they_do_alone(stage: int) -> None:
    sections = (ISLANDS, NODES, {**NONE, "islands": {"size": 1, "sync_every": 2}}, NONE)
    jobs = [Job(stage, section) for section in sections]
    alone = run_forks(RANKS, train, *jobs)
    for found, expected in zip(run_forks(RANKS, together, jobs), alone, strict=True):
        assert found == [outcome.parameters for outcome in expected]


def shards_of_init(rank: int) -> list[int]:
    """Return over how many ranks `deepspeed.zero.Init` shards, without a section and with one, next to an engine."""
    engine = start(Job(3, NODES))
    uninstall = deepspeed_compress.install()
    sizes = []
    for config in (None, Job(3).config(), Job(3, NODES).config()):
        with deepspeed.zero.Init(config_dict_or_path=config):
            model = network()
        sizes.append(dist.get_world_size(next(model.parameters()).ds_process_group))
    uninstall()
    engine.destroy()
    return sizes


def test_zero_init_shards_as_its_own_configuration_says() -> None:
    assert run_forks(RANKS, shards_of_init) == [[4, 4, 2]] * RANKS


SECTIONS: Sequence[Mapping[str, Any]] = (
    ISLANDS,
    NODES,
    {"gradients": {"bits": 4}, "weights": {"bits": 8}},
    {"gradients": {"bits": 4}, "ownership": "balanced"},
    {"gradients": {"bits": 4}, "parallelism": {"zero_stage": 2}},
    {"preset": "auto"},
)
"""Sections that cannot be combined with stage 0, or that change how an engine is made."""


def without_optimizer(rank: int, copied: Mapping[str, Any], sections: Sequence[Mapping[str, Any]]) -> list[int]:
    """Make engines without an optimizer, whose configurations are those of policies with `copied` keys.

    Returns:
        The number of data-parallel ranks of each.
    """
    uninstall, sizes = deepspeed_compress.install(), []
    for section in sections:
        config = {**Job(1, section).config(), **copied}
        del config["optimizer"]
        engine = deepspeed.initialize(model=network(), config=config)[0]
        engine(data(rank, Job())[0][0].to(next(engine.module.parameters()).dtype))
        assert "compression" not in vars(engine)
        sizes.append(engine.seq_data_parallel_group.size())
        engine.destroy()
    uninstall()
    return sizes


@pytest.mark.parametrize("copied", [{}, {"bf16": {"enabled": True}}])
def test_engines_without_an_optimizer_are_left_alone(copied: Mapping[str, Any]) -> None:
    """DeepSpeed makes its optimizer for bf16 without an optimizer, too."""
    found = run_forks(RANKS, without_optimizer, {**copied, "zero_optimization": {"stage": 0}}, SECTIONS)
    assert found == [[RANKS] * len(SECTIONS)] * RANKS


def test_shards_of_engines_without_an_optimizer_are_divided() -> None:
    """The optimizer of the file is gone, so nothing shows that Adam has second moments, or no momentum."""
    sections = (
        {**ISLANDS, "islands": {"size": 2, "second_moments": {}}},
        {"gradients": {"method": "dgc"}, "parallelism": {"shard_within": 2}},
        {"gradients": {"bits": 4}, "weights": {"bits": 8}},
    )
    found = run_forks(RANKS, without_optimizer, {"zero_optimization": {"stage": 3}}, sections)
    assert found == [[2, 2, RANKS]] * RANKS


def refusals_of_divided(rank: int, section: Mapping[str, Any]) -> list[str]:
    """Return the errors of engines over all ranks for models that `section` has divided. Train others after each."""
    uninstall = deepspeed_compress.install()
    once = make_engine(network(), Job(3, section).config())
    once.destroy()
    with deepspeed.zero.Init(config_dict_or_path=Job(3, section).config()):
        made = network()
    texts = []
    for model in (once.module, made):
        for job in (Job(3), Job(3, NONE), Job(3, {**NONE, "parallelism": {"shard_within": 4}})):
            with pytest.raises(UnsupportedError) as caught:
                make_engine(model, job.config())
            texts.append(str(caught.value))
        evaluation = {key: value for key, value in Job(3).config().items() if key != "optimizer"}
        make_engine(model, evaluation, parameters=()).destroy()
        run(make_engine(model, Job(3, section).config()), data(rank, Job(3)))
    uninstall()
    return texts


@pytest.mark.parametrize("section", [ISLANDS, NODES])
def test_an_engine_over_all_ranks_refuses_a_model_that_zero_3_has_divided(section: Mapping[str, Any]) -> None:
    for texts in run_forks(RANKS, refusals_of_divided, section):
        assert len(texts) == 6
        assert all("has divided the parameters of this model over 2 ranks" in text for text in texts)
