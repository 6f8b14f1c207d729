"""What a rank reads: seconds of steps, bytes that its interface sent, its peak of memory."""

import contextlib
import ctypes
import gc
import itertools
import logging
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_compress.tools.bench.links import DEVICE
from deepspeed_compress.training.ranks import Ranks, start_ranks

__all__ = ["Counters", "Peak", "device", "gather", "join", "over_ranks", "quiet_counters", "times"]


@dataclass(frozen=True)
class Counters:
    """What eth0 of this host sent since it was made. `packets` are those that the kernel handed to the interface, up
    to 64 KiB each; `segments` are TCP's, up to the MTU, without the `retransmitted` ones."""

    interface: int
    packets: int
    segments: int
    retransmitted: int

    def since(self, begin: "Counters", steps: int) -> dict[str, float]:
        """Per step."""
        return {name: (value - getattr(begin, name)) / steps for name, value in asdict(self).items()}


def quiet_counters() -> Counters:
    """Counters when nothing is under way: gloo returns from a send before the bytes have left the host."""
    dist.barrier()
    time.sleep(0.1)
    interface = Path("/proc/net/dev").read_text().partition(f"{DEVICE}:")[2].split()
    names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line]
    tcp = dict(zip(names, values, strict=True))
    return Counters(int(interface[8]), int(interface[9]), int(tcp["OutSegs"]), int(tcp["RetransSegs"]))


def join() -> Ranks:
    """Join the processes that were started with this one."""
    # What DeepSpeed calls has new names in torch.
    warnings.filterwarnings("ignore", ".*is deprecated. Please use `torch.distributed", FutureWarning)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    return start_ranks(int(os.environ.get("LOCAL_RANK", "0")))


def device() -> torch.device:
    """Of this rank."""
    return torch.device(get_accelerator().current_device_name())


def times(step: Callable[[], object], count: int) -> list[float]:
    """Seconds of each of `count` steps."""
    get_accelerator().synchronize()
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        get_accelerator().synchronize()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def over_ranks(seconds: Sequence[float]) -> dict[str, float]:
    """Of the steps, each taken as the mean over the ranks: median, least, greatest."""
    steps = [statistics.mean(ranks) for ranks in zip(*gather(list(seconds)), strict=True)]
    return {"median": statistics.median(steps), "min": min(steps), "max": max(steps)}


def gather(mine: object) -> list[Any]:
    """`mine` of every rank, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Peak:
    """The peak of memory since `begin`, above what was held when this was made.

    Of PyTorch's allocator on GPU, else of the whole process. What an engine before does not give back is left out.
    """

    def __init__(self) -> None:
        self._held = self.begin()

    def begin(self) -> int:
        """Begin a new peak at what is held now, after everything that is no longer used was given back; the bytes."""
        gc.collect()
        if device().type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        with contextlib.suppress(AttributeError, OSError):  # only glibc has it
            ctypes.CDLL(None).malloc_trim(0)
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")

    def bytes(self) -> int | None:
        """None where nobody counts it."""
        peak = torch.cuda.max_memory_allocated() if device().type == "cuda" else _resident("VmHWM")
        return peak - self._held if peak else None


def _resident(name: str) -> int:
    """Memory of this process by its name in /proc/self/status; 0 outside Linux."""
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    found = re.search(rf"{name}:\s*(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0
