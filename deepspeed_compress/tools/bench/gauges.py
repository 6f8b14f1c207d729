"""Gauges of a rank: seconds per step, bytes sent by its network interface, and peak memory."""

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
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

from deepspeed_compress.tools.bench.links import DEVICE
from deepspeed_compress.tools.bench.mirror import MIRROR, join_mirror
from deepspeed_compress.training.ranks import Ranks, start_ranks


def quiet_counters() -> dict[str, int]:
    """Return counters of the traffic that eth0 of this host has sent, when no traffic is in flight.

    They are the bytes of the interface, the packets of up to 64 KiB that the kernel handed to it, the TCP segments of
    up to the MTU, and those that were retransmitted. Waits first, because gloo returns from a send before the bytes
    have left the host.
    """
    dist.barrier()
    time.sleep(0.1)
    interface = Path("/proc/net/dev").read_text().partition(f"{DEVICE}:")[2].split()
    names, values = [line.split() for line in Path("/proc/net/snmp").read_text().splitlines() if "Tcp:" in line]
    tcp = dict(zip(names, values, strict=True))
    sent = {"interface": interface[8], "packets": interface[9]}
    sent |= {"segments": tcp["OutSegs"], "retransmitted": tcp["RetransSegs"]}
    return {name: int(value) for name, value in sent.items()}


def join() -> Ranks:
    """Join the processes that were started together with this one."""
    _silence()
    return start_ranks(int(os.environ.get("LOCAL_RANK", "0")))


def join_images(ranks: int, per_host: int) -> Ranks:
    """Join `ranks` - 1 mirror images of this process, as rank 0."""
    _silence()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "LOCAL_SIZE": str(per_host)}
    # No extension is built: its shared memory connects processes, and there may be no compiler.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    get_accelerator().set_device(0)
    join_mirror(ranks)
    deepspeed.init_distributed(MIRROR, auto_mpi_discovery=False)
    return Ranks(0, ranks, 0)


def _silence() -> None:
    # DeepSpeed calls functions that torch has renamed.
    warnings.filterwarnings("ignore", ".*is deprecated. Please use `torch.distributed", FutureWarning)
    deepspeed.utils.logger.setLevel(logging.ERROR)


def ranks_of_host() -> int:
    """Return the number of ranks on this host, from the variables of torchrun or the deepspeed launcher."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ["LOCAL_SIZE"])


def device() -> torch.device:
    """Return the device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def times(step: Callable[[], object], count: int) -> list[float]:
    """Return the seconds of each of `count` steps."""
    get_accelerator().synchronize()
    marks = [time.perf_counter()]
    for _ in range(count):
        step()
        get_accelerator().synchronize()
        marks.append(time.perf_counter())
    return [end - begin for begin, end in itertools.pairwise(marks)]


def over_ranks(seconds: Sequence[float]) -> dict[str, float]:
    """Return the median, minimum and maximum over steps, each step being the mean over all ranks."""
    steps = [statistics.mean(ranks) for ranks in zip(*gather(list(seconds)), strict=True)]
    return {"median": statistics.median(steps), "min": min(steps), "max": max(steps)}


def gather(mine: object) -> list[Any]:
    """Return `mine` of every rank, in rank order."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    return everyone


class Peak:
    """Peak memory since `begin`, relative to the memory in use when this object was created.

    Measures PyTorch's allocator on a GPU and the whole process otherwise. Memory that an earlier engine has not
    released is not counted.
    """

    def __init__(self) -> None:
        self._baseline = self.begin()

    def begin(self) -> int:
        """Release unused memory, start a new peak at the memory now in use, and return the latter in bytes."""
        gc.collect()
        if device().type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            return torch.cuda.memory_allocated()
        with contextlib.suppress(AttributeError, OSError):  # only glibc has malloc_trim
            ctypes.CDLL(None).malloc_trim(0)
        if sys.platform == "linux":
            Path("/proc/self/clear_refs").write_text("5")
        return _resident("VmRSS")

    def bytes(self) -> int | None:
        """Return the peak in bytes, or None if it is not available here."""
        peak = torch.cuda.max_memory_allocated() if device().type == "cuda" else _resident("VmHWM")
        return peak - self._baseline if peak else None


def _resident(name: str) -> int:
    """Return a memory size of this process in bytes by its name in /proc/self/status, or 0 outside Linux."""
    status = Path("/proc/self/status").read_text() if sys.platform == "linux" else ""
    found = re.search(rf"{name}:\s*(\d+) kB", status)
    return 1024 * int(found[1]) if found else 0
