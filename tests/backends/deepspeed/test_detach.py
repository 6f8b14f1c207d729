"""After `detach`, an engine trains as DeepSpeed alone does."""

import gc
import os
from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest

import deepspeed_compress
from deepspeed_compress.backends.deepspeed.norms import _kind
from deepspeed_compress.errors import ConfigError, SeamError, UnsupportedError
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, network, run, start, weights
from tests.support.messages import refusal
from tests.support.methods import RAW, UNCLIPPED

pytestmark = pytest.mark.sampled(4)

GRADIENTS = {"bits": 4, "block_size": 32}
EVERYTHING = {"guard": {}, "adaptive": {}, "monitor": {"every": 1}}
WEIGHTS = ({"gradients": GRADIENTS}, *[{"gradients": GRADIENTS, "weights": {"bits": bits}} for bits in (4, 4, 8)])
"""Sections by ZeRO stage."""


def half_with_us(rank: int, *jobs: Job) -> list[tuple[list[float], dict[str, list[float]]]]:
    return [halved(rank, job) for job in jobs]


def halved(rank: int, job: Job) -> tuple[list[float], dict[str, list[float]]]:
    """Train two steps with an attached session if the job has a section, and two more after `detach`."""
    engine, batches = start(job), data(rank, job)
    losses = run(engine, batches[:2])
    if job.section is not None:
        assert deepspeed_compress.detach(engine) is engine
    losses += run(engine, batches[2:])
    outcome = losses, weights(engine)
    engine.destroy()
    return outcome


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_training_continues_bit_for_bit_after_detach(stage: int) -> None:
    for plain, ours in run_forks(2, half_with_us, Job(stage, zero=ZERO), Job(stage, RAW, ZERO)):
        assert ours == plain


ZERO = {"overlap_comm": False}
"""Setting that the section would change in this configuration, and that stays after `detach`."""


def attach_and_detach(rank: int, stage: int) -> tuple[set[str], set[str], bool]:
    """Return the attributes that lead into the package before and after `detach`, and whether settings are restored."""
    job, model = Job(stage, {**WEIGHTS[stage], **EVERYTHING}, steps=2), network()
    config = job.config()
    config["zero_optimization"].pop("reduce_bucket_size")
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    owners = [engine, engine.optimizer, *engine.module.parameters()]
    settings = [getattr(engine.optimizer, name, None) for name in ("reduce_scatter", "reduce_bucket_size")]
    deepspeed_compress.attach(engine)
    run(engine, data(rank, job))
    attached = {name for owner in owners for name in ours(owner)}
    deepspeed_compress.detach(engine)
    left = {name for owner in owners for name in ours(owner)}
    same = settings == [getattr(engine.optimizer, name, None) for name in ("reduce_scatter", "reduce_bucket_size")]
    engine.destroy()
    return attached, left, same


def ours(owner: Any) -> Iterator[str]:
    """Yield the names of the instance's own attributes that are, or call, objects of this package."""
    for name, value in vars(owner).items():
        called = value.func if isinstance(value, partial) else value
        if (getattr(called, "__module__", None) or "").startswith("deepspeed_compress"):
            yield name


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_nothing_of_ours_is_left(stage: int) -> None:
    for attached, left, same in run_forks(2, attach_and_detach, stage):
        assert attached >= {"compression", "save_checkpoint", "load_checkpoint", "_take_model_step", "backward"}
        assert left == set()
        assert same


def refuse(rank: int) -> tuple[str, str]:
    model = network()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=Job(1).config())[0]
    nothing = refusal(ConfigError, deepspeed_compress.detach, engine)
    engine.destroy()
    engine = start(Job(1, {"gradients": GRADIENTS}))
    ours = engine.save_checkpoint
    engine.save_checkpoint = lambda *args, **options: ours(*args, **options)
    covered = refusal(SeamError, deepspeed_compress.detach, engine)
    assert engine.compression is not None
    assert "got NoneType" in refusal(UnsupportedError, deepspeed_compress.detach, None)
    return nothing, covered


def test_detach_refuses_unknown_engines_and_replaced_methods() -> None:
    for nothing, covered in run_forks(2, refuse):
        assert "nothing is attached" in nothing
        assert "save_checkpoint has since been replaced by other code" in covered


def open_files(rank: int, job: Job, detaches: bool = True) -> list[int]:
    """Return the number of open files after each of several engines, of which every other one is detached from."""
    found = []
    for number in range(4):
        engine = start(job)
        run(engine, data(rank, job))
        if detaches and number % 2:
            deepspeed_compress.detach(engine)
        engine.destroy()
        del engine
        gc.collect()
        found.append(len(os.listdir("/proc/self/fd")))
    return found


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_engines_leave_no_sockets_open(stage: int) -> None:
    """DeepSpeed itself never releases engines of ZeRO 3."""
    for first, *others in run_forks(2, open_files, Job(stage, WEIGHTS[stage], steps=2)):
        assert others == [first] * 3


@pytest.mark.parametrize("division", [{"parallelism": {"shard_within": 2}}, {"islands": {"size": 2}}], ids=str)
def test_engines_that_divide_the_job_leave_no_sockets_open(division: dict[str, Any]) -> None:
    for first, *others in run_forks(4, open_files, Job(1, {"gradients": GRADIENTS, **division}, steps=2), False):
        assert others == [first] * 3


def test_engines_that_save_in_the_background_leave_no_sockets_open() -> None:
    for first, *others in run_forks(2, open_files, Job(1, {"checkpointing": {}}, steps=2)):
        assert others == [first] * 3


def guard_again(rank: int) -> tuple[str, str, bool]:
    """Return the norm watchers before and after attaching again, and whether the optimizer still has `overflow`."""
    engine = start(Job(0, {"gradients": GRADIENTS, "guard": {}}, extra=UNCLIPPED, steps=2))
    before = _kind(engine)
    run(engine, data(rank, Job(steps=2)))
    deepspeed_compress.detach(engine)
    deepspeed_compress.attach(engine)
    return before, _kind(engine), hasattr(engine.optimizer, "overflow")


def test_a_guard_watches_again() -> None:
    assert run_forks(2, guard_again) == [("plain", "plain", False)] * 2
