"""The line at the start: its predictions equal the bytes that the run sends."""

import contextlib
import io
import os
import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, make_engine, network, run, start
from tests.support.methods import METHODS, NO_MOMENTUM, WITHOUT_MOMENTUM, by_stage

SAMPLED = pytest.mark.sampled(4)

WHOLE = {"reduce_bucket_size": 10**6}
FIGURES = re.compile(r"rank 0 sends about ([\d,]+) bytes of gradients a step, uncompressed ([\d,]+) bytes")
Seen = tuple[str, dict[str, float]]


def begin(job: Job, make: Callable[[Job], Any] = start) -> tuple[Any, str]:
    """Return an engine, and the lines of this package on standard error from its creation."""
    written = io.StringIO()
    with contextlib.redirect_stderr(written):
        engine = make(job)
    return engine, "\n".join(line for line in written.getvalue().splitlines() if line.startswith("deepspeed_compress"))


def measure(rank: int, *jobs: Job, make: Callable[[Job], Any] = start) -> list[Seen]:
    """Return the line, and means over the steps of the bytes sent."""
    found = []
    for job in jobs:
        engine, line = begin(job, make)
        seen: list[Any] = []
        engine.compression.subscribe(seen.append)
        run(engine, data(rank, job))
        means = {
            name: sum(getattr(one, name) for one in seen) / max(1, len(seen))
            for name in ("bytes_sent", "bytes_uncompressed", "bytes_weights")
        }
        found.append((line, means))
        engine.destroy()
    return found


SETTINGS = {
    **METHODS,
    **{name: {**one, "density_warmup_steps": 0} for name, one in WITHOUT_MOMENTUM.items()},
    "clipped": {"method": "dgc", "density": 0.1, "clip_norm": 1.0},
}


def job(stage: int, gradients: Any, **more: Any) -> Job:
    momentum = NO_MOMENTUM if gradients.get("method") in ("dgc", "demo") else {}
    return Job(stage=stage, section={"gradients": gradients}, zero=WHOLE, extra=momentum, **{"steps": 6, **more})


def compare(line: str, seen: dict[str, float], messages: int = 1) -> None:
    figures = FIGURES.search(line)
    assert figures is not None, line
    sent, alone = (float(figure.replace(",", "")) for figure in figures.groups())
    # Each message ends with a full block of its own.
    assert sent == pytest.approx(seen["bytes_sent"], rel=0.05, abs=64 * messages)
    assert alone == pytest.approx(seen["bytes_uncompressed"], rel=0.01)


@SAMPLED
@pytest.mark.parametrize(("stage", "names"), by_stage(list(SETTINGS)))
def test_the_announced_bytes_match_measurements(stage: int, names: list[str]) -> None:
    first, second = run_forks(2, measure, *(job(stage, SETTINGS[name]) for name in names))
    for name, (line, seen) in zip(names, first, strict=True):
        assert f"ZeRO {stage}, 2 data-parallel ranks" in line, name
        compare(line, seen)
    assert {line for line, _ in second} == {""}


def test_micro_steps_and_nodes_count() -> None:
    jobs = [job(2, {"bits": 8, "block_size": 32}, accumulation=2), job(0, {"hierarchy": {"ranks_per_node": 2}})]
    inside = {"bits": 4, "hierarchy": {"ranks_per_node": 2, "inside": {"bits": 8}}}
    first, *_ = run_forks(4, measure, *jobs, job(2, inside))
    for line, seen in first:
        compare(line, seen, messages=4)


def test_announced_bytes_of_weights_and_excluded_parameters() -> None:
    section = {
        "gradients": {"bits": 4, "min_numel": 100},
        "weights": {"bits": 4, "block_size": 32},
        "schedule": {"warmup_steps": 1},
    }
    [(line, seen)], _ = run_forks(2, measure, Job(stage=1, section=section, zero=WHOLE, steps=6))
    assert line.startswith("deepspeed_compress: gradients blockwise bits=4, weights blockwise bits=4; ZeRO 1, ")
    assert "2 of 7 parameters are compressed (89.5% of the elements), 5 are excluded" in line
    assert "the first 1 steps are uncompressed" in line
    figures = re.search(r"about ([\d,]+) bytes of weights a step, uncompressed ([\d,]+) bytes", line)
    assert figures is not None
    sent, alone = (float(figure.replace(",", "")) for figure in figures.groups())
    # One of six steps was uncompressed.
    assert (5 * sent + alone) / 6 == pytest.approx(seen["bytes_weights"], rel=0.05)


@pytest.mark.parametrize(
    ("section", "ranks", "text"),
    [
        ({"gradients": {"method": "none"}}, 2, "gradients none, weights none; ZeRO 1, 2 data-parallel ranks; nothing"),
        ({"monitor": {"announce": False}}, 2, ""),
    ],
)
def test_nothing_to_say(section: Any, ranks: int, text: str) -> None:
    first, *_ = run_forks(ranks, measure, Job(stage=1, section=section, zero=WHOLE, steps=1))
    assert text in first[0][0]
    assert bool(first[0][0]) is bool(text)


@SAMPLED
@pytest.mark.parametrize(("size", "where"), [(1, "1 data-parallel ranks"), (2, "2 data-parallel ranks")])
def test_the_exchange_of_islands_is_announced(size: int, where: str) -> None:
    islands = {"size": size, "sync_every": 5, "exchange": {"bits": 4}}
    section = {"gradients": {"method": "none"}, "islands": islands}
    first, *_ = run_forks(2 * size, measure, Job(stage=1, section=section, zero=WHOLE, steps=1))
    assert f"{where}; islands exchange blockwise bits=4 every 5 steps (" in first[0][0]


def test_uncompressed_weights_are_announced_with_their_size() -> None:
    """Only ZeRO 1 and 2 send weights in every step, and only runs that compress gradients get the advice."""
    gradients = {"bits": 4, "block_size": 32}
    jobs = [job(stage, gradients) for stage in range(4)]
    jobs += [job(1, {"method": "none"}), Job(stage=1, section={"gradients": gradients, "weights": {"bits": 8}})]
    lines, sent = zip(*run_forks(2, measure, *jobs)[0], strict=True)
    advice = re.compile(r'weights travel uncompressed: ([\d,]+) bytes a step; add "weights": \{"bits": 4\}')
    matches = [advice.search(line) for line in lines]
    assert [match is not None for match in matches] == [False, True, True, False, False, False]
    for found, seen in zip(matches, sent, strict=True):
        if found is not None:
            assert float(found[1].replace(",", "")) == pytest.approx(seen["bytes_weights"], rel=0.05)


def partly_frozen(job: Job) -> Any:
    """Return an engine that trains 57 of 1,004 weights."""
    model = network()
    model[:4].requires_grad_(False)
    return make_engine(model, job.config())


def measure_frozen(rank: int, *jobs: Job) -> list[Seen]:
    return measure(rank, *jobs, make=partly_frozen)


def test_frozen_parameters_have_no_gradients() -> None:
    gradients = {"bits": 4, "block_size": 32}
    for stage, (line, seen) in enumerate(
        run_forks(2, measure_frozen, *(job(stage, gradients) for stage in range(4)))[0]
    ):
        assert "3 of 3 parameters are compressed (100.0% of the elements), 0 are excluded, 4 are frozen" in line, stage
        compare(line, seen)


def test_frozen_weights_of_zero_3_are_announced() -> None:
    """A frozen parameter travels in every gather, exactly unless it is named."""
    gradients, rounded = {"bits": 4, "block_size": 32}, {"bits": 8, "block_size": 32}
    jobs = [
        Job(3, {"gradients": gradients, "weights": weights}, zero=WHOLE)
        for weights in ({"method": "none"}, rounded, {**rounded, "frozen": True})
    ]
    (plain, exact), (some, trained), (named, every) = run_forks(2, measure_frozen, *jobs)[0]
    assert (
        "weights travel uncompressed: 2,008 bytes each time that forward or backward gathers them, 1,894 bytes of them "
        'frozen ("weights": {"bits": 8, "frozen": true} sends numbers rounded)'
    ) in plain
    assert '1,894 bytes of them are frozen and travel exactly (in weights, "frozen": true' in some
    assert "exactly" not in named
    for line, seen in ((some, trained), (named, every)):
        found = re.search(r"about ([\d,]+) bytes of weights each time they are gathered, uncompressed ([\d,]+)", line)
        sent, alone = (float(figure.replace(",", "")) for figure in found.groups())
        # Some weights are gathered twice in a step, in forward and in backward.
        assert sent / alone == pytest.approx(seen["bytes_weights"] / exact["bytes_weights"], rel=0.1)


def measure_on_hosts(rank: int, per_host: int, *jobs: Job) -> list[Seen]:
    os.environ["LOCAL_WORLD_SIZE"] = str(per_host)
    return measure(rank, *jobs, make=partly_frozen)


def test_frozen_weights_that_hosts_exchange_are_announced() -> None:
    """Only ZeRO 3 gathers weights in every pass, and only between the ranks that share them."""
    gradients = {"bits": 4, "block_size": 32}
    jobs = [job(stage, gradients) for stage in (2, 3)]
    jobs.append(Job(stage=3, section={"gradients": gradients, "parallelism": {"shard_within": 2}}, zero=WHOLE))
    said = "94.3% of the elements are frozen, and every host sends"
    for per_host, expected in ((2, [False, True, False]), (4, [False] * 3)):
        first, *_ = run_forks(4, measure_on_hosts, per_host, *jobs)
        assert [said in line for line, _ in first] == expected, per_host
        # Three of four shares of 947 frozen elements in fp32 leave each rank.
        assert ("sends 2,841 bytes of them" in first[1][0]) is expected[1]
        assert ('"parallelism": {"shard_within": "node"}' in first[1][0]) is expected[1]
