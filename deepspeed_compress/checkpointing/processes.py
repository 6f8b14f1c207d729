"""Processes that are forked from a rank and outlive it."""

import gc
import os
import signal
from collections.abc import Callable, Collection
from contextlib import suppress

import torch

_NICE = 19
"""Lowest priority, in favor of training."""


def fork_from_rank(run: Callable[[], object], kept: Collection[int]) -> int:
    """Start a process that calls `run` and ends, and return its id. Only the descriptors `kept` stay open."""
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        _leave_rank(kept)
        run()
        code = 0
    finally:
        os._exit(code)


def wait_for(process: int) -> None:
    """Wait until a forked process has ended. The program may have reaped it, or have the system do so (SIGCHLD)."""
    with suppress(ChildProcessError):
        os.waitpid(process, 0)


def _leave_rank(kept: Collection[int]) -> None:
    """Detach a forked process from its rank. Only the descriptors `kept` stay open.

    The process ignores terminal signals, lowers its priority, and closes the rank's sockets and files, so that others
    notice when the rank dies. It also closes the rank's output, whose readers would otherwise wait for this process.

    It gets its own process group, which signals to the rank's group do not reach. It does not get its own session,
    because Linux (sched_autogroup) distributes processors among sessions first, which would make the priority
    ineffective.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    torch.set_num_threads(1)
    # Garbage collection would close descriptor numbers that have been reused by then.
    gc.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - set(kept):
        try:
            os.dup2(nothing, descriptor, inheritable=False)
        except OSError:
            # The descriptor of the directory listing, which is closed already.
            continue
