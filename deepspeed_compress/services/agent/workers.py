"""The ranks of a host, from the side of their agent."""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from deepspeed_compress.services.agent.lines import Lines

__all__ = ["Ended", "Workers", "how_ended"]

NURSERY = "deepspeed_compress.services.agent.nursery"
_PATIENCE = 5.0


@dataclass(frozen=True)
class Ended:
    """A rank has ended. `status`: its exit code, or the number of a signal with a minus."""

    rank: int
    status: int


def how_ended(status: int) -> str:
    """How a process has ended, for people."""
    return f"was ended by {signal.Signals(-status).name}" if status < 0 else f"has ended with exit code {status}"


class Workers:
    """Processes that run one command, in environments that tell them which rank they are.

    Args:
        arguments: of `integrations.run`: a program, and its own.
        script: the file of the program, whose imports are made once for all; "" for a module.
        warm: whether they are forked from a process that has imported; else each imports by itself.
    """

    def __init__(self, arguments: Sequence[str], script: str, warm: bool) -> None:
        self.living: set[int] = set()
        self._arguments, self._script, self._warm = list(arguments), script, warm
        self._nursery, self._process = self._begin()

    def _begin(self) -> tuple[Lines, "subprocess.Popen[bytes]"]:
        ours, theirs = socket.socketpair()
        # torch asks the driver then, not the runtime, which a fork could not use any more.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ}
        how = "warm" if self._warm else "cold"
        command = [sys.executable, "-m", NURSERY, str(theirs.fileno()), how, self._script]
        with theirs:
            process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()])
        return Lines(ours), process

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> None:
        """Start ranks, each with an environment of its own beside that of the agent."""
        for rank, environment in ranks.items():
            self.living.add(rank)
            told = {"rank": rank, "arguments": self._arguments, "environment": dict(environment)}
            self._say({"kind": "start", **told})

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send it to `ranks`, or to all."""
        self._say({"kind": "signal", "number": int(number), "ranks": None if ranks is None else list(ranks)})

    def ended(self) -> list[Ended]:
        """Those that have ended since the last call."""
        try:
            messages = self._nursery.hear(0)
        except EOFError:
            return self._begin_anew()
        found = [Ended(one["rank"], one["status"]) for one in messages if one["kind"] == "ended"]
        self.living -= {one.rank for one in found}
        return found

    def close(self) -> None:
        """Whatever still runs is killed."""
        self._nursery.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_PATIENCE)
        self._process.kill()
        self._process.wait()

    def _begin_anew(self) -> list[Ended]:
        """The process that they were forked from has died, and they with it."""
        self.close()
        lost, self.living = self.living, set()
        self._nursery, self._process = self._begin()
        return [Ended(rank, -signal.SIGKILL) for rank in sorted(lost)]

    def _say(self, message: Mapping[str, object]) -> None:
        # One that is gone shows when it is listened to.
        with suppress(OSError):
            self._nursery.say(message)
