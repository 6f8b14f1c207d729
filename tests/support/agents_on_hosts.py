"""Jobs whose agents are each on an emulated host, with a memory of its own: links are cut, what follows is timed."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.tools.bench.hosts import Cluster
from tests.support.agents import Job, begun, command, steps, told, until

PORT = 29400
STARTING = 400.0
"""Seconds for the agents of all hosts to import on the cores of one machine, which does other things too."""
OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""Has a command find nothing of others in /dev/shm, nor they anything of it."""


@dataclass(frozen=True)
class Cut:
    """At `time` links were cut, when rank 0 had made step `made`; at `ended` all ranks behind them were gone."""

    time: float
    made: int
    ended: float


@dataclass(frozen=True)
class Standstill:
    """Seconds since links were cut, until: `ended`, all ranks behind them are gone; `begun`, the next start has begun;
    `ready`, its engines have loaded; `step`, it has made one that had not been made."""

    ended: float
    begun: float
    ready: float
    step: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in vars(self).items())


class HostsJob:
    """A job in `directory`, of one rank on each of `hosts` hosts and with spare ones. Host 0 has the supervisor. Use as
    a context: nothing of it is left at the end."""

    def __init__(self, directory: Path, hosts: int, spares: int, *options: str, last: int, hold: int = 0) -> None:
        self.directory = directory
        self.cluster = Cluster(hosts + spares, "100mbit")
        self.agents: list[Job] = []
        meeting = ("--hosts", str(hosts), "--spares", str(spares), "--rendezvous", f"{self.cluster.address(0)}:{PORT}")
        self._command = [*OWN_MEMORY, *command(directory, *meeting, *options, steps=last, ranks=1)]
        self._pace = {"PAUSE": "0.1", "HOLD": str(hold)}
        self._undo = ExitStack()

    def __enter__(self) -> "HostsJob":
        with ExitStack() as undo:
            undo.enter_context(self.cluster)
            self.agents = [undo.enter_context(self._agent(host)) for host in range(self.cluster.hosts)]
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def _agent(self, host: int) -> Job:
        environment = {**self.cluster.environment(host), **self._pace}
        return Job(self.cluster.on(host, self._command), self.directory / f"log_{host}", **environment)

    @property
    def log(self) -> str:
        """What all agents have said."""
        return "".join(f"--- host {host}\n{agent.log}" for host, agent in enumerate(self.agents))

    def hosts(self) -> list[int]:
        """On which host each rank of the newest start is."""
        addresses = json.loads(begun(self.directory, 0)[-1]["env"]["DS_COMPRESS_HOSTS"])
        every = [self.cluster.address(host) for host in range(self.cluster.hosts)]
        return [every.index(address) for address in addresses]

    def others(self) -> list[int]:
        """Hosts that have ranks and not the supervisor. Each is followed by the one that has copies of its files."""
        hosts = self.hosts()
        first = hosts.index(0) if 0 in hosts else 0
        return [host for host in hosts[first:] + hosts[:first] if host]

    def end(self) -> list[int]:
        """The exit codes of the agents whose hosts have ranks, once the job has ended."""
        return [self.agents[host].wait() for host in sorted({0, *self.hosts()})]

    def until_saved(self, step: int) -> None:
        """There is a whole checkpoint of `step` or a later one on disk."""
        latest = self.directory / "checkpoints" / "latest"
        until(lambda: latest.is_file() and _number(latest.read_text()) >= step, self.agents[0], STARTING)

    def until_joined(self, host: int) -> None:
        """Its agent has a connection to the supervisor."""
        table, connected = Path(f"/proc/{self.agents[host].process.pid}/net/tcp"), f":{PORT:04X} 01 "
        until(lambda: connected in table.read_text(), self.agents[0])

    def cut(self, hosts: Sequence[int]) -> Cut:
        """Cut `hosts` off, and wait until their ranks have ended."""
        pids = [begun(self.directory, self.hosts().index(host))[-1]["pid"] for host in hosts]
        cut, made = time.time(), steps(self.directory, 0)[-1]["step"]
        for host in hosts:
            self.cluster.cut(host)
        until(lambda: not any(map(_lives, pids)), self.agents[0])
        return Cut(cut, made, time.time())

    def resumed(self, cut: Cut) -> Standstill:
        """Once rank 0 has made a step that had not been made. One may have ended while links were being cut."""
        until(lambda: self._since(cut, "pid"), self.agents[0])
        until(lambda: steps(self.directory, 0)[-1]["step"] > cut.made + 1, self.agents[0])
        step = next(one["time"] for one in self._since(cut, "loss") if one["step"] > cut.made + 1)
        instants = cut.ended, self._since(cut, "pid")[0]["time"], self._since(cut, "first")[0]["time"], step
        return Standstill(*(instant - cut.time for instant in instants))

    def _since(self, cut: Cut, key: str) -> list[dict]:
        """What rank 0 has told of `key`."""
        return [one for one in told(self.directory) if one["rank"] == 0 and key in one and one["time"] > cut.time]


def _number(tag: str) -> int:
    return int(tag.strip().removeprefix("global_step"))


def _lives(pid: int) -> bool:
    """One that nobody has waited for yet does nothing any more."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
