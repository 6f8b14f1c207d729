"""Islands of one rank each as processes that join and leave, and links between them that can be cut."""

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import statistics
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from tests.support import forks
from tests.support.coordinators import coordinator, parameter_server
from tests.support.elastic_island import Plan, live, loss_of
from tests.support.leftovers import own_port
from tests.support.transport import until

TIMEOUT = 2.0
PAUSE = 0.01
LONGEST = 400.0
ENVIRONMENT = {"MASTER_ADDR": "127.0.0.1", "DS_ACCELERATOR": "cpu"}


def section(address: str, **elastic: Any) -> Mapping[str, Any]:
    seconds = {"timeout": f"{TIMEOUT:g} s", "give_up": f"{LONGEST:g} s"}
    settings = {"rendezvous": address, "minimum": 1, **seconds, **elastic}
    exchange = {"method": "blockwise", "bits": 4}
    return {
        "gradients": {"method": "none"},
        "monitor": {"announce": False},
        "islands": {"sync_every": 8, "exchange": exchange, "elastic": settings},
    }


@dataclass
class ElasticJob:
    """Islands of one rank each that join and leave until the anchor has reached `versions` versions."""

    address: str
    directory: Path
    versions: int
    islands: list[BaseProcess] = field(default_factory=list)
    elastic: Mapping[str, Any] = field(default_factory=dict)
    """Keys of the section of all islands."""

    def start(
        self, pause: float = PAUSE, address: str | None = None, leaves: int | None = None, **elastic: Any
    ) -> BaseProcess:
        """Start a new island, which leaves at version `leaves`, or with all others if None."""
        context = multiprocessing.get_context("forkserver")
        with own_port() as port:
            log = str(self.directory / f"{len(self.islands)}.jsonl")
            plan = Plan(
                log,
                port,
                pause,
                leaves or self.versions,
                self.versions,
                section(address or self.address, **self.elastic, **elastic),
            )
        process = context.Process(target=forks.run_rank, args=(0, ENVIRONMENT, live, (plan,), _Silent()), daemon=True)
        process.start()
        self.islands.append(process)
        return process

    def wait(self) -> None:
        """Wait until all islands have ended or were killed."""
        for process in self.islands:
            process.join(LONGEST)
            assert not process.is_alive(), "an island hangs"

    def lines(self, number: int | None = None) -> list[dict[str, Any]]:
        """Return the log lines of process `number` or of all, without lines truncated by a death."""
        files = [
            self.directory / f"{one}.jsonl" for one in ([number] if number is not None else range(len(self.islands)))
        ]
        texts = [
            line for file in files if file.exists() for line in file.read_text().splitlines() if line.endswith("}")
        ]
        return [json.loads(line) for line in texts]

    def standstill(self, besides: int | None = None) -> float:
        """Return the longest exchange in seconds, except those of the process `besides`."""
        others = [one for number in range(len(self.islands)) if number != besides for one in self.lines(number)]
        return max(other["seconds"] for other in others if "seconds" in other)

    def longest_allowed(self, wait: float) -> float:
        """Return `wait` and a second, or more on a busy machine, on which an exchange that waits for nobody is slow."""
        seconds = [line["seconds"] for line in self.lines() if "seconds" in line]
        return wait + max(1.0, 20 * statistics.median(seconds))

    def summary(self) -> str:
        kinds = Counter(line["kind"] for line in self.lines())
        seconds = sorted(line["seconds"] for line in self.lines() if "seconds" in line)
        return f"{dict(kinds)}; seconds of an exchange: median {seconds[len(seconds) // 2]:.3f}, most {seconds[-1]:.3f}"

    def loss(self) -> float:
        """Return the least final loss of the islands, which end near the same anchor."""
        return min(loss_of(line["weights"]) for line in self.lines() if line["kind"] == "end")


class _Silent:
    """Receiver of results that are not used. Errors are written to standard error."""

    def send(self, result: Any) -> None:
        if not result[0]:
            os.write(2, str(result[1]).encode())


@contextmanager
def job(directory: Path, versions: int, islands: int = 3, asynchronous: bool = False) -> Iterator[ElasticJob]:
    """Yield a `ElasticJob` with `islands` islands; all have ended at the end of the block."""
    forks.warm_up()
    directory.mkdir(exist_ok=True)
    with served(directory / "state", asynchronous) as address:
        found = ElasticJob(address, directory, versions, elastic={"parameter_server": {}} if asynchronous else {})
        try:
            for _ in range(islands):
                found.start()
            yield found
            found.wait()
        finally:
            for process in found.islands:
                if process.is_alive() and process.pid is not None:
                    os.kill(process.pid, signal.SIGCONT)
                    process.kill()
                process.join()


@contextmanager
def served(state: Path, asynchronous: bool) -> Iterator[str]:
    """Return the address of the server of the islands."""
    if not asynchronous:
        with coordinator(state) as address:
            yield address
        return
    with parameter_server(state) as server:
        yield f"127.0.0.1:{server.port}"


def wait_for_islands(found: ElasticJob, count: int) -> None:
    """Wait until `count` islands train. The fork server and DeepSpeed start first."""
    until(lambda: sum(line["kind"] == "joined" for line in found.lines()) >= count, LONGEST)


def newest(found: ElasticJob) -> int:
    """Return the newest version of the anchor."""
    return max((line.get("version", 0) for line in found.lines()), default=0)


def reached(found: ElasticJob, version: int) -> None:
    """Wait until the anchor has a version."""
    until(lambda: newest(found) >= version, LONGEST)


def wait_for(found: ElasticJob, island: int, kind: str) -> list[dict[str, Any]]:
    return until(lambda: [line for line in found.lines(island) if line["kind"] == kind], LONGEST)


class Cable:
    """Proxy for `address` that can be cut and mended. While it is cut and after the block, connections are closed."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._there = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._open: list[socket.socket] = []
        self._whole = True
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> "Cable":
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._end(self._listener)

    def cut(self) -> None:
        self._whole = False
        while self._open:
            self._end(self._open.pop())

    def mend(self) -> None:
        self._whole = True

    def _end(self, one: socket.socket) -> None:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                self._join(near) if self._whole else self._end(near)

    def _join(self, near: socket.socket) -> None:
        far = socket.create_connection(self._there)
        self._open += [near, far]
        for ends in ((near, far), (far, near)):
            threading.Thread(target=self._carry, args=ends, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                target.sendall(data)
