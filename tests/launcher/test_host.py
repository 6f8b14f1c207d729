"""The agent of a host, without processes: what it reports to the supervisor when its ranks have ended."""

from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.launcher.host import Agent
from deepspeed_compress.transport.credentials import Credentials


class Ranks:
    """Stands for the processes of the ranks, which end when the test says so."""

    def __init__(self) -> None:
        self.living: set[int] = set()
        self._ended: dict[int, int] = {}

    def start(self, ranks: dict[int, Any]) -> None:
        self.living = set(ranks)

    def end(self, status: int) -> None:
        """Have all ranks end with `status`."""
        self._ended = dict.fromkeys(sorted(self.living), status)
        self.living = set()

    def ended(self) -> dict[int, int]:
        found, self._ended = self._ended, {}
        return found

    def signal(self, number: int, ranks: object = None) -> None:
        """Do nothing: these ranks receive no signals."""


class Link:
    """Stands for the connection to the supervisor. It delivers one message at a time, and keeps the answers."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self._arriving: list[dict[str, Any]] = []

    def deliver(self, agent: Agent, kind: str, **fields: Any) -> None:
        self._arriving = [{"kind": kind, "start": 1, **fields}]
        agent._run_once()

    def arrived(self, patience: float) -> list[dict[str, Any]]:
        found, self._arriving = self._arriving, []
        return found

    def send(self, message: dict[str, Any]) -> None:
        self.sent.append(message["kind"])


@pytest.mark.parametrize("first", ["these", "others"])
def test_a_host_whose_ranks_have_succeeded_stops_when_a_rank_of_another_host_fails(first: str, tmp_path: Path) -> None:
    ranks: Any = Ranks()
    link: Any = Link()
    address, credentials = ("127.0.0.1", 1), Credentials.of_this_process()
    agent = Agent(address, "job", 2, 1.0, ranks, tmp_path, print, credentials)
    agent._link = link
    rest = {"restart": 0, "world": 4, "hosts": ["127.0.0.1"], "port": 1, "resume": False, "node": 1}
    link.deliver(agent, "start", **rest)
    if first == "these":
        ranks.end(0)
        agent._run_once()
        assert link.sent == ["done"]
    link.deliver(agent, "stop")
    ranks.end(0)
    agent._run_once()
    # The supervisor restarts the job once all hosts have said so.
    assert [kind for kind in link.sent if kind != "beat"][-1:] == ["stopped"]
    agent._port.release()
