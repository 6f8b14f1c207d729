"""Jobs whose agents run on emulated hosts with their own shared memory, and whose links can be cut."""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.tools.bench.hosts import Cluster
from tests.support.agents import Job, command, records, saved_step, starts, steps, until
from tests.support.processes import alive

PORT = 29400
STARTING = 400.0
"""Time limit in seconds for the agents of all hosts to import on the cores of one busy machine."""
OWN_MEMORY = ("sh", "-c", 'mount -t tmpfs tmpfs /dev/shm && exec "$@"', "sh")
"""Prefix of a command that gives it its own empty /dev/shm."""


@dataclass(frozen=True)
class Cut:
    """Cut of links at `time`, when rank 0 had made step `made`. At `ended`, all ranks behind them had ended."""

    time: float
    made: int
    ended: float


@dataclass(frozen=True)
class Standstill:
    """Seconds from the cut until events of the recovery.

    Attributes:
        ended: all ranks behind the cut links have ended.
        begun: the next start has begun.
        ready: its engines have loaded.
        step: it has made a new step.
    """

    ended: float
    begun: float
    ready: float
    step: float

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in vars(self).items())


class HostsJob:
    """Job in `directory` with one rank on each of `hosts` hosts, and with spare hosts. Host 0 has the supervisor.

    At the end of the context, all agents are killed.
    """

    def __init__(self, directory: Path, hosts: int, spares: int, *options: str, last: int) -> None:
        self.directory = directory
        self.cluster = Cluster(hosts + spares, "100mbit")
        self.agents: list[Job] = []
        meeting = ("--hosts", str(hosts), "--spares", str(spares), "--rendezvous", f"{self.cluster.address(0)}:{PORT}")
        self._command = [*OWN_MEMORY, *command(directory, *meeting, *options, steps=last, ranks=1)]
        self._pace = {"PAUSE": "0.1"}
        self._begun = 0.0
        self._undo = ExitStack()

    def __enter__(self) -> "HostsJob":
        with ExitStack() as undo:
            undo.enter_context(self.cluster)
            self._begun = time.time()
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
        """Return the output of all agents."""
        return "".join(f"--- host {host}\n{agent.log}" for host, agent in enumerate(self.agents))

    def seconds_to_start(self) -> float:
        """Return the seconds from the start of the agents to the first step."""
        return float(steps(self.directory, 0)[0]["time"]) - self._begun

    def hosts(self) -> list[int]:
        """Return the host of each rank of the newest start."""
        addresses = json.loads(starts(self.directory, 0)[-1]["env"]["DS_COMPRESS_HOSTS"])
        every = [self.cluster.address(host) for host in range(self.cluster.hosts)]
        return [every.index(address) for address in addresses]

    def others(self) -> list[int]:
        """Return the hosts with ranks but without the supervisor, each followed by the host that has its copies."""
        hosts = self.hosts()
        first = hosts.index(0) if 0 in hosts else 0
        return [host for host in hosts[first:] + hosts[:first] if host]

    def end(self) -> list[int]:
        """Wait for the end of the job, and return the exit codes of the agents whose hosts have ranks."""
        return [self.agents[host].wait() for host in sorted({0, *self.hosts()})]

    def until_saved(self, step: int) -> None:
        """Wait until a complete checkpoint of `step` or a later step is on disk."""
        until(lambda: saved_step(self.directory) >= step, self.agents[0], STARTING)

    def until_joined(self, host: int) -> None:
        """Wait until the agent of `host` is connected to the supervisor."""
        table, connected = Path(f"/proc/{self.agents[host].process.pid}/net/tcp"), f":{PORT:04X} 01 "
        until(lambda: connected in table.read_text(), self.agents[0])

    def cut(self, hosts: Sequence[int]) -> Cut:
        """Cut `hosts` off, and wait until their ranks have ended."""
        pids = [starts(self.directory, self.hosts().index(host))[-1]["pid"] for host in hosts]
        cut, made = time.time(), steps(self.directory, 0)[-1]["step"]
        for host in hosts:
            self.cluster.cut(host)
        until(lambda: not any(map(alive, pids)), self.agents[0])
        return Cut(cut, made, time.time())

    def resumed(self, cut: Cut) -> Standstill:
        """Wait until rank 0 has made a new step, and return the times. One step may end while links are being cut."""
        until(lambda: self._since(cut, "pid"), self.agents[0])
        until(lambda: steps(self.directory, 0)[-1]["step"] > cut.made + 1, self.agents[0])
        step = next(one["time"] for one in self._since(cut, "loss") if one["step"] > cut.made + 1)
        instants = cut.ended, self._since(cut, "pid")[0]["time"], self._since(cut, "first")[0]["time"], step
        return Standstill(*(instant - cut.time for instant in instants))

    def _since(self, cut: Cut, key: str) -> list[dict]:
        """Return the records of rank 0 with `key` after the cut."""
        return [
            record
            for record in records(self.directory)
            if record["rank"] == 0 and key in record and record["time"] > cut.time
        ]
