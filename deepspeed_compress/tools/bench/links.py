"""Links of emulated hosts: network namespaces of one Linux machine, and the rate limit of each link."""

import math
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deepspeed_compress.errors import CompressError

DEVICE = "eth0"
PREFIX = "dscompress"
"""Prefix of namespace names: PREFIX + process id + "-" + host number or "bridge"."""
UNLIMITED = "none"
HOSTS_VARIABLE = "DS_COMPRESS_EMULATED"
"""Environment variable of a process on an emulated host that holds the name prefix of its cluster's namespaces."""

TOOLS: Mapping[str, str] = {"ip": "iproute2", "tc": "iproute2", "sysctl": "procps", "taskset": "util-linux"}
_CAPABILITIES: Mapping[str, int] = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}
"""Capabilities with their bits in linux/capability.h."""
_UNITS: Mapping[str, float] = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}


class ClusterError(CompressError):
    """Error raised if hosts cannot be created or a command of iproute2 fails."""


def check_machine() -> None:
    """Raise ClusterError unless hosts can be created on this machine."""
    if sys.platform != "linux":
        raise ClusterError(f"emulated hosts need network namespaces, which only Linux has, not {sys.platform}")
    missing = [f"{tool} (package {package})" for tool, package in TOOLS.items() if shutil.which(tool) is None]
    if missing:
        raise ClusterError(f"not found: {', '.join(missing)}; write: apt-get install iproute2 procps util-linux")
    if lacking := _lacking():
        needed = f"root ({' and '.join(lacking)}), or a kernel that allows user namespaces"
        raise ClusterError(f"network namespaces need {needed}; use sudo, or a container with --privileged")


def enter_user_namespace(program: Sequence[str]) -> None:
    """Restart `program` as root of a user namespace that may create hosts, if this process is not root.

    The namespace has its own /run, so the kernel removes the hosts together with its last process. Returns without a
    restart if this process is root, or if the kernel or a missing tool does not allow it.
    """
    unshare = ("unshare", "--user", "--map-root-user", "--mount", "--net")
    if shutil.which("unshare") is None or not _lacking():
        return
    if subprocess.run([*unshare, "true"], capture_output=True).returncode == 0:
        os.execvp("unshare", [*unshare, "sh", "-c", 'mount -t tmpfs tmpfs /run && exec "$@"', "sh", *program])


def _lacking() -> list[str]:
    """Return the capabilities that creating hosts requires and that this process lacks."""
    status = Path("/proc/self/status").read_text()
    effective = int(re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)[1], 16)  # type: ignore[index]
    return [name for name, bit in _CAPABILITIES.items() if not effective >> bit & 1]


def bits_per_second(rate: str) -> float:
    """Return a rate of `tc` such as "100mbit", "1.5gbit" or "64kbit" in bits per second; "none" is infinity."""
    if rate == UNLIMITED:
        return math.inf
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?)bit", rate)
    if found is None or float(found[1]) == 0:
        raise ClusterError(f'rate {rate!r}: write a number and a unit, such as "100mbit" or "1gbit", or "{UNLIMITED}"')
    return float(found[1]) * _UNITS[found[2]]


def set_rate(namespace: str, device: str, rate: str) -> None:
    """Limit the traffic that `device` sends to `rate`, by a token bucket filter. "none" removes the limit.

    The burst holds the largest packet that the kernel hands over (64 KiB and headers) and 1 ms of the rate. The queue
    holds 50 ms of the rate.
    """
    discipline = ("tc", "-n", namespace, "qdisc")
    if rate == UNLIMITED:
        run_tool(*discipline, "del", "dev", device, "root", check=False)
        return
    bits = bits_per_second(rate)
    burst, queue = max(70_000, int(bits / 8 * 1e-3)), max(1_000_000, int(bits / 8 * 50e-3))
    limits = ("rate", f"{bits:.0f}bit", "burst", str(burst), "limit", str(queue))
    run_tool(*discipline, "replace", "dev", device, "root", "tbf", *limits)


def set_own_rate(rate: str) -> None:
    """Change the rate of this host's link in both directions, from a process that a Cluster has started.

    Only the first process of the host changes it.
    """
    prefix, host = os.environ[HOSTS_VARIABLE], int(os.environ["RANK"]) // int(os.environ["LOCAL_SIZE"])
    if os.environ["LOCAL_RANK"] != "0":
        return
    set_rate(f"{prefix}-{host}", DEVICE, rate)
    set_rate(f"{prefix}-bridge", f"port{host}", rate)


def ip(namespace: str, *arguments: str) -> None:
    run_tool("ip", "-n", namespace, *arguments)


def run_tool(*command: str, check: bool = True) -> None:
    result = subprocess.run(command, capture_output=True, text=True)
    if check and result.returncode:
        raise ClusterError(f"{' '.join(command)}: exit code {result.returncode}: {result.stderr.strip()}")
