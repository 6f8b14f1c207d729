"""Ranks of a host, as seen by their agent."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deepspeed_compress.launcher.fork_server_messages import Lines

__all__ = ["Ended", "Workers", "how_ended"]

NURSERY = "deepspeed_compress.launcher.fork_server"
_PATIENCE = 5.0


@dataclass(frozen=True)
class Ended:
    """Rank that has ended. `status` is its exit code, or the negative number of a signal."""

    rank: int
    status: int


def how_ended(status: int) -> str:
    """Describe how a process has ended."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with exit code {status}"


class Workers:
    """Processes that run one command, with environments that give them their ranks.

    Args:
        arguments: arguments of `integrations.run`: a program and its own arguments.
        script: the file of the program, whose imports are made once for all ranks; "" for a module.
        warm: fork ranks from a process that has made the imports; otherwise, each rank imports them itself.
    """

    def __init__(self, arguments: Sequence[str], script: str, warm: bool) -> None:
        self.living: set[int] = set()
        self._arguments, self._script, self._warm = list(arguments), script, warm
        self._nursery, self._process = self._begin()

    def _begin(self) -> tuple[Lines, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair()
        # torch then asks the driver instead of the CUDA runtime, which a fork could not use any more.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
        how = "warm" if self._warm else "cold"
        command = [sys.executable, "-m", NURSERY, str(theirs.fileno()), how, self._script]
        with theirs:
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        return Lines(ours), process

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> None:
        """Start ranks, each with its own environment in addition to that of the agent."""
        for rank, environment in ranks.items():
            self.living.add(rank)
            told = {"rank": rank, "arguments": self._arguments, "environment": dict(environment)}
            self._say({"kind": "start", **told})

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send signal `number` to `ranks`, or to all if None."""
        self._say({"kind": "signal", "number": int(number), "ranks": None if ranks is None else list(ranks)})

    def ended(self) -> list[Ended]:
        """Return the ranks that have ended since the last call."""
        try:
            messages = self._nursery.hear(0)
        except EOFError:
            return self._begin_anew()
        found = [Ended(one["rank"], one["status"]) for one in messages if one["kind"] == "ended"]
        self.living -= {one.rank for one in found}
        return found

    def close(self) -> None:
        """Kill all ranks that still run."""
        self._nursery.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._process.kill()
        self._process.wait()

    def _begin_anew(self) -> list[Ended]:
        """Start a new fork server after the old one has died, and return its ranks, which died with it."""
        self.close()
        lost, self.living = self.living, set()
        self._nursery, self._process = self._begin()
        return [Ended(rank, -signal.SIGKILL) for rank in sorted(lost)]

    def _say(self, message: Mapping[str, object]) -> None:
        # If the fork server is gone, the next read reports it.
        with suppress(OSError):
            self._nursery.say(message)
