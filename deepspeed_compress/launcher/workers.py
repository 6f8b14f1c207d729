"""Rank processes of a host, started and watched by its agent."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection

FORK_SERVER = "deepspeed_compress.launcher.fork_server"
_CLOSE_TIMEOUT = 5.0


@dataclass(frozen=True)
class Ended:
    """Rank that has ended. `status` is its exit code, or the negative number of a signal."""

    rank: int
    status: int


def describe_end(status: int) -> str:
    """Describe how a process ended."""
    return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with code {status}"


class Workers:
    """Processes that run one command, with environments that give them their ranks.

    Args:
        arguments: arguments of `integrations.run`: a program and its own arguments.
        script: file of the program, whose leading imports are made once for all ranks; "" for a module.
        warm: fork ranks from a process that has made the imports. Otherwise, each rank makes them itself.
    """

    def __init__(self, arguments: Sequence[str], script: str, warm: bool) -> None:
        self.living: set[int] = set()
        self._arguments, self._script, self._warm = list(arguments), script, warm
        self._server, self._process = self._start_server()

    def _start_server(self) -> tuple[Connection, "subprocess.Popen[bytes]"]:
        ours, theirs = Pipe()
        # With this variable, torch asks the driver instead of the CUDA runtime, which a fork could no longer use.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
        mode = "warm" if self._warm else "cold"
        command = [sys.executable, "-m", FORK_SERVER, str(theirs.fileno()), mode, self._script]
        with theirs:
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        return ours, process

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> None:
        """Start ranks, each with its own environment in addition to that of the agent."""
        for rank, environment in ranks.items():
            self.living.add(rank)
            self._send({"rank": rank, "arguments": self._arguments, "environment": dict(environment)})

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send signal `number` to `ranks`, or to all if None."""
        self._send({"number": int(number), "ranks": None if ranks is None else list(ranks)})

    def ended(self) -> list[Ended]:
        """Return the ranks that have ended since the last call."""
        found: list[Ended] = []
        try:
            while self._server.poll():
                found.append(Ended(*self._server.recv()))
        except (EOFError, OSError):
            if not found:
                return self._restart_server()
        self.living -= {one.rank for one in found}
        return found

    def close(self) -> None:
        """Kill all ranks that are still running."""
        self._server.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_CLOSE_TIMEOUT)
        self._process.kill()
        self._process.wait()

    def _restart_server(self) -> list[Ended]:
        """Start a new fork server after the old one has died, and return its ranks, which died with it."""
        self.close()
        lost, self.living = self.living, set()
        self._server, self._process = self._start_server()
        return [Ended(rank, -signal.SIGKILL) for rank in sorted(lost)]

    def _send(self, message: Mapping[str, object]) -> None:
        # If the fork server is gone, the next `ended` notices it.
        with suppress(OSError):
            self._server.send(message)
