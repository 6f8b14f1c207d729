"""Search for GPUs (of a launcher, a hostfile, Slurm, or this machine) and network cards, for ``plan cluster``."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.gpus import Gpu, find_gpu

HOSTFILE = Path("/job/hostfile")
"""Hostfile that the deepspeed launcher reads by default (`deepspeed.launcher.runner.DLTS_HOSTFILE`)."""
CARDS = Path("/sys/class")
"""Directory in which Linux describes network cards."""


@dataclass(frozen=True, slots=True)
class Machine:
    """GPUs at hand: `count` in all, `per_node` in each node."""

    gpu: Gpu
    count: int
    per_node: int


def find_machine(hostfile: Path | None, environment: Mapping[str, str] = os.environ) -> Machine:
    """Return the GPUs of the launcher that started this process, of `hostfile`, of a Slurm job, or of this machine.

    Raises:
        ConfigError: There are none, their type is not known, or nodes have different numbers of them.
    """
    name, local = _local_gpus(environment)
    if "RANK" in environment:
        count = int(environment["WORLD_SIZE"])
        per_node = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or count)
    elif hostfile is not None or HOSTFILE.is_file():
        count, per_node = _slots(hostfile or HOSTFILE)
    else:
        count, per_node = int(environment.get("SLURM_JOB_NUM_NODES", 1)) * local, local
    if name is None:
        raise ConfigError(
            "--gpus: is missing, and there is no GPU here; write 16xA100, for example, or --emulate 2,1gbit"
        )
    return Machine(find_gpu(name), count, per_node)


def _local_gpus(environment: Mapping[str, str]) -> tuple[str | None, int]:
    """Return the type of this machine's GPUs and their number. Ranks on a machine without GPUs compute on its CPU."""
    try:
        import torch
    except ImportError:
        return None, 0
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0), torch.cuda.device_count()
    return ("CPU" if "RANK" in environment else None), 0


def _slots(hostfile: Path) -> tuple[int, int]:
    """Return the number of slots in a hostfile of DeepSpeed, and that of each host."""
    try:
        slots = [int(found) for found in re.findall(r"^\s*[^#\s]+\s+slots=(\d+)", hostfile.read_text("utf-8"), re.M)]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--hostfile {hostfile}: cannot be read: {error}; write the path of a hostfile") from error
    if len(set(slots)) != 1:
        problem = "has no line such as node1 slots=8" if not slots else "gives nodes different numbers of slots"
        raise ConfigError(f"--hostfile {hostfile}: {problem}; correct it, or write --gpus and --gpus-per-node")
    return sum(slots), slots[0]


def find_network(cards: Path = CARDS) -> float:
    """Return the bytes per second of this node: all of its InfiniBand ports, or its fastest Ethernet card without any.

    Raises:
        ConfigError: No card says its rate, as in many virtual machines.
    """
    ports = [_first_number(port) * 1e9 for port in cards.glob("infiniband/*/ports/*/rate")]
    ethernet = [_first_number(speed) * 1e6 for speed in cards.glob("net/*/speed")]
    rate = sum(ports) or max(ethernet, default=0.0)
    if rate <= 0:
        raise ConfigError("--network: is missing, and no card of this machine says its rate; write 25gbit, for example")
    return rate / 8


def _first_number(file: Path) -> float:
    """Return the number at the beginning of a file; 0 if it cannot be read, as that of a card without a cable."""
    try:
        found = re.match(r"[0-9.]+", file.read_text("utf-8"))
    except OSError:
        return 0.0
    return float(found[0]) if found else 0.0
