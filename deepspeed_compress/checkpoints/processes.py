"""Processes that are forked from a rank and outlive it."""

import gc
import os
import signal
from collections.abc import Collection

import torch

__all__ = ["leave_rank"]

_NICE = 19
"""Training goes first."""


def leave_rank(kept: Collection[int]) -> None:
    """In the new process: let go of what belongs to the rank, but for the descriptors `kept`.

    Its terminal's signals, its priority, its sockets and files, so that others notice when the rank dies; and its
    output, whose readers would wait for this process when the rank has long ended.

    A process group of its own is what signals to all of the rank's spare. A session of its own would make the priority
    count for nothing: Linux (sched_autogroup) shares processors out among sessions first.
    """
    os.setpgid(0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.nice(_NICE)
    torch.set_num_threads(1)
    # What is collected here would close descriptors that are others by then.
    gc.disable()
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in {int(name) for name in os.listdir("/proc/self/fd")} - set(kept):
        try:
            os.dup2(nothing, descriptor, inheritable=False)
        except OSError:
            # The one that listed them.
            continue
