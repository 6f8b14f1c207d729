"""Rank processes of a host, started and watched by its agent."""

import ctypes
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress

_PARENT = "DS_COMPRESS_PARENT"
"""Environment variable of a rank that is starting: the process id of its agent."""
_CLOSE_TIMEOUT = 5.0
_PR_SET_PDEATHSIG = 1
"""Operation of prctl(2) that sends a signal to a process when its parent dies."""


class Workers:
    """Processes that run `command`, with environments that give them their ranks."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = list(command)
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def living(self) -> frozenset[int]:
        """Return the ranks that run, or whose end `ended` has not returned yet."""
        return frozenset(self._processes)

    def start(self, ranks: Mapping[int, Mapping[str, str]]) -> None:
        """Start ranks, each with its own environment in addition to that of the agent.

        Each gets its own session, so that a signal of the terminal reaches the agent only, which passes it on.
        """
        for rank, environment in ranks.items():
            self._processes[rank] = subprocess.Popen(
                self._command,
                env={**os.environ, **environment, _PARENT: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def signal(self, number: int, ranks: Sequence[int] | None = None) -> None:
        """Send signal `number` to `ranks`, or to all if None.

        SIGKILL also goes to the processes that a rank has started. Other signals go only to the rank, which may still
        need these processes to end properly.
        """
        send = os.killpg if number == signal.SIGKILL else os.kill
        for rank, process in self._processes.items():
            if ranks is None or rank in ranks:
                with suppress(OSError):
                    send(process.pid, number)

    def ended(self) -> dict[int, int]:
        """Return the ranks that have ended since the last call, and kill the processes that they have left behind.

        Each has its exit code, or the negative number of a signal.
        """
        ended = {rank: status for rank, one in self._processes.items() if (status := one.poll()) is not None}
        for rank in ended:
            with suppress(OSError):
                os.killpg(self._processes.pop(rank).pid, signal.SIGKILL)
        return ended

    def close(self) -> None:
        """Kill all ranks that are still running."""
        self.signal(signal.SIGKILL)
        for process in self._processes.values():
            with suppress(subprocess.TimeoutExpired):
                process.wait(_CLOSE_TIMEOUT)


def die_with_agent() -> None:
    """Die when the agent dies that has started this process as a rank. Otherwise, do nothing.

    Processes that this one starts do not inherit the agent's process id.
    """
    parent = os.environ.pop(_PARENT, None)
    if parent is not None:
        die_with(int(parent))


def die_with(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, whose process id is `parent`."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
