"""Elastic islands as processes that may be killed, stopped, slowed down or cut off at any instant."""

import os
import random
import signal
import time
from pathlib import Path

import pytest

from tests.support.elastic_job import (
    PAUSE,
    TIMEOUT,
    Cable,
    ElasticJob,
    job,
    newest,
    reached,
    wait_for,
    wait_for_islands,
)

pytestmark = pytest.mark.slow
VERSIONS = 120
STANDSTILL = 4.0
"""Maximum number of seconds for which one island may delay another."""


def agree(found: ElasticJob) -> None:
    """Check that no version resulted from two rounds, as with a second majority."""
    rounds: dict[int, set[int]] = {}
    for line in found.lines():
        if line["kind"] == "exchange":
            rounds.setdefault(line["version"], set()).add(line["islands"])
    assert all(len(sizes) == 1 for sizes in rounds.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> ElasticJob:
    with job(tmp_path_factory.mktemp("calm"), VERSIONS) as found:
        pass
    return found


def test_islands_killed_at_random_instants_can_join_again(tmp_path: Path, undisturbed: ElasticJob) -> None:
    random_, kills = random.Random(3), 20
    with job(tmp_path, VERSIONS) as found:
        wait_for_islands(found, 3)
        living = list(found.islands)
        for number in range(kills):
            reached(found, 5 + (VERSIONS - 20) * number // kills)
            # The signal may arrive at any point of a step or an exchange.
            time.sleep(0.2 * random_.random())
            victim = living.pop(random_.randrange(len(living)))
            victim.kill()
            living.append(found.start())
    assert sum(line["kind"] == "joined" for line in found.lines()) > kills
    assert found.standstill() < found.longest_allowed(STANDSTILL)
    agree(found)
    print(found.summary(), "loss", found.loss(), "undisturbed", undisturbed.loss())
    assert found.loss() < undisturbed.loss() * 1.005


def test_slow_paused_and_late_islands_reach_the_loss_of_undisturbed_ones(
    tmp_path: Path, undisturbed: ElasticJob
) -> None:
    with job(tmp_path, VERSIONS, islands=2) as found:
        slow = len(found.islands)
        found.start(pause=4 * PAUSE)
        wait_for_islands(found, 3)
        stopped = found.islands[1].pid
        assert stopped is not None
        reached(found, 20)
        os.kill(stopped, signal.SIGSTOP)
        time.sleep(2 * TIMEOUT)
        reached(found, newest(found) + 3)
        os.kill(stopped, signal.SIGCONT)
        reached(found, 60)
        found.start()
    print(found.summary(), "loss", found.loss(), "undisturbed", undisturbed.loss())
    # The others wait for a slow island once, and then leave it out.
    assert found.standstill(besides=1) < found.longest_allowed(TIMEOUT)
    assert [line["kind"] for line in found.lines(1)].count("renewed") >= 1
    # The slow island takes part in every exchange with the steps that it has made.
    assert sum(line["kind"] == "exchange" for line in found.lines(slow)) > VERSIONS // 2
    assert max(line["islands"] for line in found.lines(3) if line["kind"] == "exchange") == 4
    agree(found)
    assert found.loss() < undisturbed.loss() * 1.005


def test_an_island_that_is_cut_off_stops_and_the_others_continue(tmp_path: Path) -> None:
    with job(tmp_path, 40, islands=2) as found:
        with Cable(found.address) as cable:
            found.start(address=cable.address, give_up="3 s")
            wait_for_islands(found, 3)
            reached(found, 10)
        (end,) = wait_for(found, 2, "error")
    assert "/deepspeed_compress/islands/elastic/rendezvous: " in end["text"]
    assert "longer than give_up, 3 s: it cannot be reached" in end["text"]
    assert [line["kind"] for line in found.lines(0)].count("end") == 1
    assert found.standstill(besides=2) < found.longest_allowed(TIMEOUT)
    agree(found)


def test_an_island_that_was_cut_off_for_a_while_returns_to_the_others(tmp_path: Path) -> None:
    """Two islands continue, and the update of the third one contributes once it is back."""
    with job(tmp_path, 60, islands=2) as found, Cable(found.address) as cable:
        found.start(address=cable.address)
        wait_for_islands(found, 3)
        reached(found, 10)
        cable.cut()
        alone = newest(found)
        reached(found, alone + 10)
        cable.mend()
        wait_for(found, 2, "end")
    assert [line["kind"] for line in found.lines(2)].count("renewed") >= 1
    assert found.standstill(besides=2) < found.longest_allowed(TIMEOUT)
    agree(found)
    # All three islands exchange again.
    assert max(line["round"] for line in found.lines(0) if line.get("islands") == 3) > alone + 10


def test_an_island_leaves_and_another_replaces_it(tmp_path: Path) -> None:
    """The coordinator does not wait for an island that left on its own."""
    with job(tmp_path, 50, islands=2) as found:
        found.start(leaves=15)
        wait_for(found, 2, "end")
        reached(found, 25)
        found.start()
    assert {line["islands"] for line in found.lines(0) if line["kind"] == "exchange"} >= {2, 3}
    assert max(line["version"] for line in found.lines(3) if "version" in line) >= 50
    assert found.standstill() < found.longest_allowed(TIMEOUT)
    agree(found)
