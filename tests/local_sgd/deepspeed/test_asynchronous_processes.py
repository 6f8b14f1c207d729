"""Asynchronous islands and their server as processes that are killed, slowed down, cut off and restarted."""

import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed_compress.local_sgd.coordinator.client import status
from tests.support.elastic_job import PAUSE, Cable, ElasticJob, job, newest, reached, wait_for, wait_for_islands
from tests.support.leftovers import own_port

pytestmark = pytest.mark.slow
VERSIONS = 80


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ElasticJob:
    with job(tmp_path_factory.mktemp("calm"), VERSIONS, asynchronous=True) as found:
        pass
    return found


def pushes(found: ElasticJob, island: int) -> int:
    return sum(line["kind"] == "exchange" for line in found.lines(island))


def test_islands_killed_at_random_instants_can_join_again(tmp_path: Path, undisturbed: ElasticJob) -> None:
    random_, kills = random.Random(3), 6
    with job(tmp_path, VERSIONS, asynchronous=True) as found:
        wait_for_islands(found, 3)
        living = list(found.islands)
        for number in range(kills):
            reached(found, 5 + (VERSIONS - 20) * number // kills)
            time.sleep(0.1 * random_.random())
            living.pop(random_.randrange(len(living))).kill()
            living.append(found.start())
    assert sum(line["kind"] == "joined" for line in found.lines()) > kills
    print(found.summary(), "loss", found.loss(), "undisturbed", undisturbed.loss())
    assert found.loss() < undisturbed.loss() * 1.05


def test_nobody_waits_for_one_that_is_slow_or_cut_off(tmp_path: Path, undisturbed: ElasticJob) -> None:
    with job(tmp_path, VERSIONS, islands=1, asynchronous=True) as found, Cable(found.address) as cable:
        # Several times as long as a step takes on a busy machine.
        found.start(pause=15 * PAUSE)
        found.start(address=cable.address)
        wait_for_islands(found, 3)
        reached(found, 20)
        cable.cut()
        before = newest(found)
        reached(found, before + 20)
        cable.mend()
        wait_for(found, 2, "end")
    assert pushes(found, 0) > 1.5 * pushes(found, 1) > 0
    # The island is back, and the updates that it made meanwhile contribute.
    back = [line for line in found.lines(2) if line.get("version", 0) > before + 20]
    assert any(one["kind"] == "exchange" for one in back)
    assert found.loss() < undisturbed.loss() * 1.05


@contextmanager
def serving(state: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """Yield the process of the command once it listens."""
    program = [sys.executable, "-m", "deepspeed_compress.cli", "islands", "serve", "--parameter-server"]
    options = ["--host", "127.0.0.1", "--port", str(port), "--state", str(state)]
    server = subprocess.Popen([*program, *options], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        assert "islands may connect to port" in server.stdout.readline()
        yield server
    finally:
        server.kill()
        server.communicate(timeout=120)


def test_a_killed_server_continues_with_all_pushes(tmp_path: Path) -> None:
    """It continues from its last snapshot, and islands send again what it had answered since."""
    with own_port() as port:
        address = f"127.0.0.1:{port}"
        found = ElasticJob(address, tmp_path, 60, elastic={"parameter_server": {}})
        with serving(tmp_path / "state", port):
            for _ in range(2):
                found.start()
            wait_for_islands(found, 2)
            reached(found, 20)
        killed = newest(found)
        time.sleep(1)
        with serving(tmp_path / "state", port) as server:
            assert 0 < status(address)["version"] <= killed
            found.wait()
            # The first island has brought version 1.
            assert status(address)["version"] == 1 + pushes(found, 0) + pushes(found, 1)
            server.send_signal(signal.SIGTERM)
            assert server.wait(120) == 0
    assert all(pushes(found, island) > 5 for island in range(2))
    assert {line["number"] for line in found.lines() if line["kind"] == "end"} == {0, 1}
