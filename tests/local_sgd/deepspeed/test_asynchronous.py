"""Asynchronous islands under DeepSpeed. Each is a job of its own with one or two ranks."""

from collections.abc import Mapping
from concurrent.futures import wait
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_compress
from deepspeed_compress.errors import ConfigError
from tests.support.coordinators import become_island, own_ports, parameter_server
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start, weights

SAMPLED = pytest.mark.sampled(4)

STAGES = (0, 1, 2, 3)


def section(port: int, **islands: Any) -> Mapping[str, Any]:
    elastic = {"rendezvous": f"127.0.0.1:{port}", "give_up": "20 s", "parameter_server": {}}
    return {
        "gradients": {"method": "none"},
        "monitor": {"announce": False},
        "islands": {"sync_every": 3, "exchange": {"method": "blockwise", "bits": 4}, **islands, "elastic": elastic},
    }


def anchor_of(engine: Any) -> list[float]:
    return engine.compression.islands.exchange.anchor().tolist()


def apart(rank: int, job: Job, size: int, ports: list[int]) -> tuple[int, list[float], set[str]]:
    """Return the number of the island, its anchor after a last pull, and the kinds of results."""
    place = become_island(rank, size, ports)
    engine = start(job)
    islands = engine.compression.islands
    batches = data(10 * islands.number + place, job)
    # Wait for three answers, because a busy machine may give few during training. Those that arrive are in the history.
    waited = []
    for begin in (0, 4, 8):
        # The ranks agree to pull one step after the third.
        run(engine, batches[begin : begin + 4])
        result = islands.exchange.finish(30)
        waited += [] if result is None else [result]
    run(engine, batches[12:])
    islands.exchange.finish(30)
    found = islands.number, anchor_of(engine), {result.kind for result in (*waited, *islands.history)}
    assert all(torch.isfinite(torch.tensor(values)).all() for values in weights(engine).values())
    engine.destroy()
    return found


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_islands_of_two_ranks_have_the_anchor_of_the_server(stage: int) -> None:
    """Corresponding ranks hold the anchor that was newest when their island last pulled."""
    with parameter_server() as server, own_ports(2) as ports:
        job = Job(stage, section=section(server.port, exchange={"method": "none"}), steps=20)
        islands = run_forks(4, apart, job, 2, ports)
        anchors = [place.anchor.tolist() for place in server.service.store.places]
        records = server.service.store.records
    assert sorted(number for number, *_ in islands) == [0, 0, 1, 1]
    assert all(kinds == {"exchange"} for *_, kinds in islands)
    assert records.pushes >= 6
    newest = [anchor for number, anchor, _ in islands if records.islands[number].version == records.version]
    assert newest == anchors


def push_after_a_save(rank: int, job: Job, ports: list[int]) -> bool:
    """Return True if a push follows in the step after a save, which has taken a reply that had just arrived."""
    become_island(rank, 2, ports)
    engine = start(job)
    exchange, batches = engine.compression.islands.exchange, data(rank, job)
    run(engine, batches[:3])
    wait([exchange._pending.answer], 30)
    # The first rank tells the others in this step, and all would take the reply in the next one.
    run(engine, batches[3:4])
    assert exchange.finish(30) is not None
    run(engine, batches[4:5])
    has_pushed = exchange.finish(30) is not None
    engine.destroy()
    return has_pushed


def test_a_reply_that_a_save_has_taken_starts_no_push() -> None:
    with parameter_server() as server, own_ports(1) as ports:
        job = Job(0, section=section(server.port, exchange={"method": "none"}), steps=8)
        assert run_forks(2, push_after_a_save, job, ports) == [False, False]


def one_island(rank: int, alone: Job, ours: Job, ports: list[int]) -> list[dict[str, list[float]]]:
    found = []
    for job in (alone, ours):
        become_island(rank, 1, ports)
        engine = start(job)
        run(engine, data(0, job))
        if job.section:
            # A busy machine may answer the first push after the last step.
            engine.compression.islands.exchange.finish(30)
        found.append(weights(engine))
        engine.destroy()
    return found


@SAMPLED
@pytest.mark.parametrize("stage", STAGES)
def test_a_single_island_trains_as_deepspeed_does(stage: int) -> None:
    with parameter_server() as server, own_ports(1) as ports:
        alone = Job(stage, steps=8)
        ours = replace(alone, section=section(server.port, exchange={"method": "none"}))
        ((plain, found),) = run_forks(1, one_island, alone, ours, ports)
        assert server.service.store.records.pushes
    for name in plain:
        torch.testing.assert_close(torch.tensor(found[name]), torch.tensor(plain[name]), atol=1e-6, rtol=1e-5)


def saved(rank: int, job: Job, ports: list[int], directory: str) -> tuple[int, list[float], dict[str, list[float]]]:
    place = become_island(rank, 2, ports)
    engine = start(job)
    run(engine, data(place, job)[:7])
    engine.save_checkpoint(directory)
    return engine.compression.islands.number, anchor_of(engine), weights(engine)


def resumed(rank: int, job: Job, ports: list[int], directory: str) -> tuple[int, list[float], dict[str, list[float]]]:
    place = become_island(rank, 2, ports)
    engine = start(job)
    assert engine.load_checkpoint(directory)[0] is not None
    found = engine.compression.islands.number, anchor_of(engine), weights(engine)
    run(engine, data(place, job)[7:])
    assert engine.compression.islands.exchange.finish(30) is None or engine.compression.islands.history
    engine.destroy()
    return found


def test_an_island_that_returns_continues_from_its_checkpoint(tmp_path: Path) -> None:
    """The same holds with a restarted server."""
    state, directory = tmp_path / "state", str(tmp_path / "saved")
    with own_ports(1) as ports:
        with parameter_server(state) as server:
            job = Job(1, section=section(server.port), steps=24)
            before = run_forks(2, saved, job, ports, directory)
            pushed = server.service.store.records.pushes
        with parameter_server(state, server.port) as server:
            after = run_forks(2, resumed, job, ports, directory)
            pushes = server.service.store.records.pushes
    assert after == before
    assert pushes > pushed > 0


def bytes_of(rank: int, job: Job, ports: list[int]) -> int:
    become_island(rank, 1, ports)
    engine = start(job)
    meter, sent = engine.compression.meter, 0
    for batch in data(0, job):
        run(engine, [batch])
        sent += meter.bytes_islands
        assert meter.bytes_sent == 0
    engine.destroy()
    return sent


def test_bytes_are_those_of_islands() -> None:
    with parameter_server() as server, own_ports(1) as ports:
        job = Job(1, section=section(server.port), steps=7)
        (sent,) = run_forks(1, bytes_of, job, ports)
    assert sent > 0


@pytest.mark.parametrize(
    ("elastic", "more", "text"),
    [
        (
            {"minimum": 2, "parameter_server": {}},
            {},
            "/deepspeed_compress/islands/elastic/minimum: 2 has no effect with parameter_server",
        ),
        (
            {"parameter_server": {"max_staleness": 0}},
            {},
            "/deepspeed_compress/islands/elastic/parameter_server/max_staleness",
        ),
        (
            {"parameter_server": {}},
            {"second_moments": {}},
            "/deepspeed_compress/islands/second_moments: need exchanges in rounds",
        ),
    ],
)
def test_invalid_settings_are_refused_by_name(elastic: Mapping[str, Any], more: Mapping[str, Any], text: str) -> None:
    islands = {"elastic": {"rendezvous": "head:1", **elastic}, **more}
    with pytest.raises(ConfigError, match=text):
        deepspeed_compress.config.parse_section({"deepspeed_compress": {"islands": islands}})
