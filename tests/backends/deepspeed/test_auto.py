"""`auto`: uncompressed steps of DeepSpeed alone and compressed ones by turns, and then the faster kind."""

import gc
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import deepspeed_compress
from deepspeed_compress.policy.auto import RUN, AutoChoice
from tests.support.forks import run_forks
from tests.support.jobs import Job, Outcome, data, own_data, run, start, train, weights
from tests.support.messages import caught_warnings

PAIRS = 3
"""Measured pairs of steps."""
LENGTH = RUN * (PAIRS + 2)
"""Steps until the choice."""
TURNS = [("blockwise bits=4" if step // RUN % 2 else "none alone") for step in range(LENGTH)]
"""Settings of these steps. The last ones are uncompressed, and residuals of the compressed ones before them remain."""
BOTH = {"auto": {"steps": PAIRS}, "gradients": {"bits": 4, "min_numel": 0}, "weights": {"bits": 4}}
SECTIONS = {0: {key: BOTH[key] for key in ("auto", "gradients")}, 1: BOTH, 2: BOTH, 3: {**BOTH, "weights": {"bits": 8}}}
FASTER, SLOWER = (100.0, 50.0), (100.0, 98.0)
"""Milliseconds of uncompressed and of compressed steps; below the margin of 3 %, compression ends."""


def job_of(stage: int, steps: int = LENGTH + 4) -> Job:
    return Job(stage, SECTIONS[stage], steps=steps)


def steered(job: Job, times: tuple[float, float]) -> Any:
    """Return an engine whose steps seem to take `times`."""
    engine = start(job)
    steer(engine, times)
    return engine


def steer(engine: Any, times: tuple[float, float]) -> None:
    """Let steps of `engine` seem to take `times`."""
    choice = engine.compression.policy.auto
    choice.see = lambda _, shapes: AutoChoice.see(choice, times[not choice.alone], shapes)


def compare(rank: int, job: Job, times: tuple[float, float]) -> tuple[list[str], list[float], Any, list[str]]:
    """Return the settings of every step, the losses, the final weights, and the events."""
    engine, settings, losses = steered(job, times), [], []
    batches = own_data(engine, rank, job)
    for first in range(0, len(batches), job.accumulation):
        settings.append(settings_of(engine))
        losses += run(engine, batches[first : first + job.accumulation])
    found = settings, losses, weights(engine), [str(event) for event in engine.compression.events]
    engine.destroy()
    return found


def settings_of(engine: Any) -> str:
    return f"{engine.compression.settings}{' alone' if engine.compression.alone else ''}"


def compare_all(rank: int, job: Job) -> list[Any]:
    """Return the results of DeepSpeed alone, and those of both outcomes of the comparison."""
    return [train(rank, Job(job.stage, steps=job.steps))[0], *(compare(rank, job, one) for one in (FASTER, SLOWER))]


def copies_of_gradients(rank: int, job: Job) -> tuple[int, int]:
    """Return the number of copies that reductions during backward use, and how many remain after the last one."""
    engine, batches = steered(job, SLOWER), data(rank, job)
    run(engine, batches[: 2 * RUN - 1])
    copies = [weakref.ref(copy) for copy in engine.buffered_allreduce_fallback.__self__._history.copies.values()]
    run(engine, batches[2 * RUN - 1 :])
    gc.collect()
    found = len(copies), sum(copy() is not None for copy in copies)
    engine.destroy()
    return found


def test_no_copy_of_gradients_remains_when_compression_ends() -> None:
    assert run_forks(2, copies_of_gradients, job_of(0)) == [(1, 0)] * 2


@pytest.mark.parametrize("stage", range(4))
def test_uncompressed_steps_are_those_of_deepspeed_and_the_faster_kind_stays(stage: int) -> None:
    first, second = run_forks(2, compare_all, job_of(stage))
    for expected, (settings, losses, parameters, events), other in (first, second):
        assert settings == TURNS + ["blockwise bits=4"] * 4
        # The loss of a step is computed before its gradients are compressed, but, under ZeRO 3, after its weights.
        own = RUN if stage == 3 else RUN + 1
        assert losses[:own] == other[1][:own] == expected.losses[:own]
        assert losses[own:] != expected.losses[own:]
        assert losses[own:LENGTH] == other[1][own:LENGTH]
        assert parameters != expected.parameters
        assert "and was faster in 3 of 3 pairs, so compression stays" in events[0]
        # The residuals are sent by one step of ours before DeepSpeed is left alone.
        assert other[0] == [*TURNS, "none", *["none alone"] * 3]
        assert "so this run continues uncompressed: blockwise bits=4 -> none" in other[3][0]
    for one, same in zip(first[1:], second[1:], strict=True):
        assert one[2] == same[2]


def repeat(rank: int, job: Job) -> list[str]:
    """Return the settings of the steps after a second comparison was asked for."""
    engine, settings = steered(job, FASTER), []
    batches = data(rank, job)
    run(engine, batches[: LENGTH + 2])
    steer(engine, SLOWER)
    assert engine.compression.compare_again() == LENGTH + 1
    for batch in batches[LENGTH + 2 :]:
        settings.append(settings_of(engine))
        run(engine, [batch])
    return settings


@pytest.mark.slow
def test_a_comparison_can_be_repeated() -> None:
    expected = [*TURNS, "none", "none alone"]
    assert run_forks(2, repeat, job_of(1, steps=2 * LENGTH + 4)) == [expected] * 2


def sent(rank: int, job: Job) -> list[tuple[int, int]]:
    """Return the bytes of every step that were sent, and those that DeepSpeed would send."""
    engine, seen = steered(job, SLOWER), []
    engine.compression.subscribe(lambda figures: seen.append((figures.bytes_sent, figures.bytes_uncompressed)))
    run(engine, data(rank, job))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_bytes_of_steps_of_deepspeed_are_counted(stage: int) -> None:
    [found, _] = run_forks(2, sent, job_of(stage))
    own, last = found[:RUN], found[-3:]
    assert {*own, *last} == {own[0]}
    assert own[0][0] == own[0][1] > 0
    for compressed, uncompressed in found[RUN : 2 * RUN]:
        assert compressed < uncompressed == own[0][1]


def resume(rank: int, job: Job, directory: str, saved: int, times: tuple[float, float] = SLOWER) -> tuple[Any, Any]:
    """Return the results of continuing after a save, and of a new engine that loads it."""
    batches, first = data(rank, job), steered(job, times)
    run(first, batches[:saved])
    first.save_checkpoint(directory)
    continued = run(first, batches[saved:]), weights(first)
    first.destroy()
    again = steered(job, times)
    again.load_checkpoint(directory)
    return continued, (run(again, batches[saved:]), weights(again))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("stage", "saved"), [(0, LENGTH + 2), (1, LENGTH), (2, LENGTH + 1), (3, LENGTH + 2), (1, RUN), (2, RUN + 1)]
)
def test_a_resumed_run_continues_with_the_choice(stage: int, saved: int, tmp_path: Path) -> None:
    for continued, resumed in run_forks(2, resume, job_of(stage), str(tmp_path), saved):
        assert resumed == continued


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_a_run_that_is_resumed_in_uncompressed_steps_keeps_its_residuals(stage: int, tmp_path: Path) -> None:
    """A pair of steps is measured again, with as many compressed steps as follow without that."""
    job = job_of(stage, steps=LENGTH + RUN)
    for continued, resumed in run_forks(2, resume, job, str(tmp_path), 2 * RUN + 1, FASTER):
        assert resumed == continued


def choose(rank: int, job: Job, directory: str) -> None:
    """Save after the choice."""
    engine = steered(job, SLOWER)
    run(engine, data(rank, job))
    engine.save_checkpoint(directory)


def has_chosen(rank: int, job: Job, directory: str) -> bool:
    """Return True if a new engine that loads the checkpoint does not measure again."""
    engine = start(job)
    engine.load_checkpoint(directory)
    return not engine.compression.policy.auto.measures


def test_the_choice_is_saved_without_residuals_and_measured_again_with_other_ranks(tmp_path: Path) -> None:
    section = {"auto": {"steps": PAIRS}, "gradients": {"bits": 4, "min_numel": 0, "error_feedback": None}}
    job = Job(0, section, steps=LENGTH)
    run_forks(2, choose, job, str(tmp_path))
    assert run_forks(2, has_chosen, job, str(tmp_path)) == [True] * 2
    assert run_forks(3, has_chosen, job, str(tmp_path)) == [False] * 3


def detach(rank: int, job: Job, steps: int) -> tuple[list[float], Any]:
    engine, batches = steered(job, FASTER), data(rank, job)
    losses = run(engine, batches[:steps])
    deepspeed_compress.detach(engine)
    return losses + run(engine, batches[steps:]), weights(engine)


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_detached_during_uncompressed_steps(stage: int) -> None:
    job = job_of(stage, steps=4)
    for (losses, parameters), [expected] in zip(
        run_forks(2, detach, job, 2), run_forks(2, train, Job(stage, steps=4)), strict=True
    ):
        assert Outcome(losses, parameters) == expected


@pytest.mark.slow
@pytest.mark.parametrize("stage", range(4))
def test_detached_during_compressed_steps(stage: int) -> None:
    [first, second] = run_forks(2, detach, job_of(stage, steps=RUN + 5), RUN + 2)
    assert first[1] == second[1]


def wrap(rank: int, job: Job) -> tuple[set[str], list[str], Any]:
    """Return the settings of all steps, the warnings, and the final weights if other code wraps a method on rank 1."""
    engine, settings = start(job), set()
    ours = engine.allreduce_bucket
    if rank:
        engine.allreduce_bucket = lambda *args, **options: ours(*args, **options)
    with caught_warnings() as texts:
        for batch in data(rank, job):
            settings.add(settings_of(engine))
            run(engine, [batch])
    return settings, texts, weights(engine)


def test_the_comparison_ends_if_other_code_wraps_a_method() -> None:
    first, second = run_forks(2, wrap, job_of(0))
    assert first[0] == second[0] == {"none alone"}
    assert not first[1]
    assert "Engine.allreduce_bucket has since been replaced by other code" in second[1][0]
    assert first[2] == second[2]


@pytest.mark.slow
def test_sharded_within_nodes() -> None:
    """Four ranks in two nodes of two. Only the means between the nodes are compressed."""
    section = {"auto": {"steps": PAIRS}, "gradients": BOTH["gradients"], "parallelism": {"shard_within": 2}}
    job = Job(2, section, steps=LENGTH + 3)
    plain = Job(2, {"gradients": {"method": "none"}, "parallelism": {"shard_within": 2}}, steps=job.steps)
    uncompressed = run_forks(4, train, plain)
    found = run_forks(4, compare, job, SLOWER)
    for [expected], (settings, losses, parameters, _) in zip(uncompressed, found, strict=True):
        assert settings == [*TURNS, "none", "none alone", "none alone"]
        assert losses[: RUN + 1] == expected.losses[: RUN + 1]
        assert losses[RUN + 1 :] != expected.losses[RUN + 1 :]
        assert parameters == found[0][2]


@pytest.mark.slow
def test_a_pipeline() -> None:
    """Two stages of two ranks. Each stage reduces by itself, and all ranks decide alike."""
    section = {key: BOTH[key] for key in ("auto", "gradients")} | {"parallelism": {"pipeline": 2}}
    job = Job(1, section, steps=LENGTH + 3, accumulation=2, stages=2)
    alone = run_forks(4, train, replace(job, section=None))
    for [expected], (settings, losses, *_) in zip(alone, run_forks(4, compare, job, SLOWER), strict=True):
        assert settings == [*TURNS, "none", "none alone", "none alone"]
        assert losses[: RUN + 1] == expected.losses[: RUN + 1]
        assert losses[RUN + 1 :] != expected.losses[RUN + 1 :]
        assert losses[-1] < losses[0]


@pytest.mark.slow
def test_skipped_steps_are_not_measured() -> None:
    """A step that the loss scaler skips is repeated by one of the same kind."""
    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    job = Job(2, SECTIONS[2], extra=fp16, steps=LENGTH + 4, poison=(1, 0))
    for settings, _, parameters, _ in (found := run_forks(2, compare, job, SLOWER)):
        assert settings == ["none alone", *TURNS, "none", "none alone", "none alone"]
        assert parameters == found[0][2]


def slow_data(rank: int, job: Job) -> tuple[str, list[str]]:
    """Return the last settings and the events, if uncompressed steps have late data on rank 1 and an evaluation."""
    engine = start(job)
    for batch in data(rank, job):
        waits = engine.compression.alone
        if waits and rank:
            time.sleep(0.03)
        run(engine, [batch])
        if waits:
            engine.eval()
            engine(batch[0])
            time.sleep(0.03)
            engine.train()
    return engine.compression.settings, [str(event) for event in engine.compression.events]


def test_slow_data_and_evaluations_do_not_make_compression_seem_faster() -> None:
    """On one host, compressed steps of a model as small as this one take longer."""
    job = Job(0, {"auto": {}, "gradients": BOTH["gradients"]}, steps=48)
    first, second = run_forks(2, slow_data, job)
    assert first[0] == "none", first[1]
    assert first == second


def test_a_time_that_one_rank_does_not_know_counts_on_none() -> None:
    """Both ranks measure another pair, whose compressed steps follow."""
    for settings, *_ in run_forks(2, compare_with_gaps, job_of(1, steps=LENGTH + RUN + 2)):
        assert settings == [*TURNS, *["blockwise bits=4"] * (RUN + 2)]


def compare_with_gaps(rank: int, job: Job) -> tuple[list[str]]:
    """Return the settings of all steps if rank 1 does not know the time of the first pair."""
    engine, settings = steered(job, FASTER), []
    choice = engine.compression.policy.auto
    known = choice.see
    for step, batch in enumerate(data(rank, job)):
        if rank and step == 2 * RUN:
            choice.see = lambda _, shapes: AutoChoice.see(choice, float("nan"), shapes)
        if rank and step == 3 * RUN - 1:
            choice.see = known
        settings.append(settings_of(engine))
        run(engine, [batch])
    return (settings,)
