"""Emulated hosts of a slow network on one Linux machine: network namespaces on a bridge, with rate-limited links.

Each host has an interface eth0. A token-bucket filter limits each direction to the same rate, so a link is full duplex.
One process or more run on each host, with the environment that the deepspeed launcher sets. Everything is removed at
the end, also after errors and signals. This needs Linux, iproute2, procps and util-linux, and either root or a kernel
that allows user namespaces.

From Python:

    with Cluster(4, "1gbit") as cluster:
        run = cluster.run([sys.executable, "program.py"])

examples:
  python -m deepspeed_compress.tools.bench.hosts --hosts 2 --rate 100mbit -- python program.py --option
"""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

from deepspeed_compress.tools.bench import links

NETWORK = "10.77.0."
MTU = 1500


@dataclass(frozen=True)
class Run:
    """Outcome of all started processes, in order of rank. `failure` is None if all exit codes are 0."""

    outputs: tuple[str, ...]
    seconds: float
    failure: str | None
    ranks: tuple[int, ...]

    def print_ends(self) -> None:
        """Print the last lines of every process to stderr."""
        for rank, output in zip(self.ranks, self.outputs, strict=True):
            print(f"--- rank {rank}, last lines\n{output[-2000:]}", file=sys.stderr)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn SIGTERM and SIGHUP into SystemExit, so that the program cleans up as after Ctrl-C."""

    def stop(number: int, frame: object) -> None:
        sys.exit(128 + number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Cluster:
    """Context of `hosts` emulated hosts with `per_host` ranks each, whose links have the rate `rate`.

    Ranks of one host talk over its loopback interface, which has no limit.

    Raises:
        ClusterError: The hosts cannot be created.
    """

    def __init__(self, hosts: int, rate: str = links.UNLIMITED, per_host: int = 1) -> None:
        self.hosts = hosts
        self.per_host = per_host
        self.rate = rate
        self.prefix = f"{links.PREFIX}{os.getpid()}"
        self.namespaces = tuple(f"{self.prefix}-{host}" for host in range(hosts))
        self._bridge = f"{self.prefix}-bridge"
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        links.check_machine()
        with contextlib.ExitStack() as undo:
            for namespace in (self._bridge, *self.namespaces):
                links.run_tool("ip", "netns", "add", namespace)
                undo.callback(links.run_tool, "ip", "netns", "del", namespace, check=False)
                # Neighbor discovery would be counted as traffic.
                silent = ("sysctl", "-qw", "net.ipv6.conf.all.disable_ipv6=1")
                links.run_tool("ip", "netns", "exec", namespace, *silent, check=False)
                links.ip(namespace, "link", "set", "lo", "up")
            links.ip(self._bridge, "link", "add", "br0", "type", "bridge", "stp_state", "0", "forward_delay", "0")
            links.ip(self._bridge, "link", "set", "br0", "mtu", str(MTU), "up")
            for host in range(self.hosts):
                self._add_host(host)
            self.set_rate(self.rate)
            self._undo = undo.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._undo.close()

    def _add_host(self, host: int) -> None:
        namespace, port = self.namespaces[host], f"port{host}"
        link = ("link", "add", links.DEVICE, "mtu", str(MTU), "type", "veth")
        links.ip(namespace, *link, "peer", "name", port, "netns", self._bridge, "mtu", str(MTU))
        links.ip(self._bridge, "link", "set", port, "master", "br0", "up")
        links.ip(namespace, "addr", "add", f"{self.address(host)}/24", "dev", links.DEVICE)
        links.ip(namespace, "link", "set", links.DEVICE, "up")
        # Reno shares a bridge fairly between flows and behaves the same on every machine.
        links.run_tool("ip", "netns", "exec", namespace, "sysctl", "-qw", "net.ipv4.tcp_congestion_control=reno")

    def set_rate(self, rate: str) -> None:
        """Limit every link to `rate` in both directions."""
        for host, namespace in enumerate(self.namespaces):
            links.set_rate(namespace, links.DEVICE, rate)
            links.set_rate(self._bridge, f"port{host}", rate)

    def run(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] = MappingProxyType({}),
        timeout: float | None = None,
        on_line: Callable[[str], None] | None = None,
        forks: bool = False,
    ) -> Run:
        """Run `command` as every rank, each process pinned to one core, until all have ended.

        If a process fails, or after `timeout` seconds, all are ended. `on_line` receives each line that rank 0 prints.
        If the program `forks`, only the first rank of each host is started, and makes the others (`fork_ranks`).
        """
        begin = time.monotonic()
        processes: dict[int, subprocess.Popen[str]] = {}
        try:
            for rank in range(0, self.hosts * self.per_host, self.per_host if forks else 1):
                processes[rank] = self._start(rank, command, environment)
            readers = {rank: _Reader(process, None if rank else on_line) for rank, process in processes.items()}
            failure = _wait(processes, timeout)
        finally:
            end_groups([*processes.values()])
        outputs = tuple(reader.text() for reader in readers.values())
        return Run(outputs, time.monotonic() - begin, failure, tuple(processes))

    def cut(self, host: int) -> None:
        """Take the link of `host` down, as if its cable were unplugged. Its processes continue to run."""
        links.ip(self._bridge, "link", "set", f"port{host}", "down")

    def mend(self, host: int) -> None:
        """Bring the link of `host` up again, with its previous rate."""
        links.ip(self._bridge, "link", "set", f"port{host}", "up")

    def on(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` as `rank` on its host, pinned to one core.

        For callers that start different programs on different hosts. The process needs the variables of
        `environment(rank)`.
        """
        cores = sorted(os.sched_getaffinity(0))
        pinned = ["taskset", "-c", str(cores[rank % len(cores)]), *command]
        return ["ip", "netns", "exec", self.namespaces[rank // self.per_host], *pinned]

    def address(self, host: int) -> str:
        """Return the address at which other hosts reach `host`."""
        return f"{NETWORK}{host + 1}"

    def _start(self, rank: int, command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            self.on(rank, command),
            env=os.environ | self.environment(rank) | dict(environment),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of the process `rank`.

        It has the launcher's variables, and those that make libraries use the host's link.
        """
        size = str(self.per_host)
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(self.hosts * self.per_host)}
        ranks |= {"MASTER_ADDR": self.address(0), "MASTER_PORT": "29500"}
        local = {"LOCAL_RANK": str(rank % self.per_host), "LOCAL_SIZE": size, "LOCAL_WORLD_SIZE": size}
        local["GLOO_SOCKET_IFNAME"] = links.DEVICE
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PYTHONUNBUFFERED": "1"}
        offline = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", links.HOSTS_VARIABLE: self.prefix}
        return ranks | local | threads | offline


def fork_ranks() -> list[int]:
    """Make the other ranks of this host, as copies of this process that share what it has imported.

    Returns:
        The processes that `wait_for_ranks` waits for; none in a copy.
    """
    first, cores = int(os.environ["RANK"]), sorted(os.sched_getaffinity(os.getppid()))
    copies = []
    for local in range(1, int(os.environ["LOCAL_SIZE"])):
        copies.append(os.fork())
        if not copies[-1]:
            os.environ |= {"RANK": str(first + local), "LOCAL_RANK": str(local)}
            os.sched_setaffinity(0, {cores[(first + local) % len(cores)]})
            return []
    return copies


def wait_for_ranks(copies: Sequence[int]) -> None:
    """Wait until the copies of this process have ended, and end with their exit code if one failed."""
    codes = [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in copies]
    if any(codes):
        sys.exit(next(filter(None, codes)))


class _Reader:
    """Reader that collects the output of a process on a thread, so that its pipe never fills up."""

    def __init__(self, process: subprocess.Popen[str], on_line: Callable[[str], None] | None) -> None:
        self._lines: list[str] = []
        self._thread = threading.Thread(target=self._read, args=(process, on_line), daemon=True)
        self._thread.start()

    def _read(self, process: subprocess.Popen[str], on_line: Callable[[str], None] | None) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                self._lines.append(line)
                if on_line is not None:
                    # The reader of this program's output may have gone, but the process must be able to write.
                    with contextlib.suppress(OSError):
                        on_line(line)

    def text(self) -> str:
        self._thread.join(5)
        return "".join(self._lines)


def _wait(processes: Mapping[int, subprocess.Popen[str]], timeout: float | None) -> str | None:
    """Wait until the processes of all ranks have ended with 0, one has failed or time is up.

    Returns:
        What went wrong, or None.
    """
    deadline = time.monotonic() + (timeout or float("inf"))
    while any(process.poll() is None for process in processes.values()):
        if failed := [rank for rank, process in processes.items() if process.poll()]:
            time.sleep(2)  # the others may still print related errors
            return f"rank {failed[0]} ended with {processes[failed[0]].returncode}"
        if time.monotonic() > deadline:
            return f"not finished after {timeout:.0f} s"
        time.sleep(0.1)
    codes = [process.returncode for process in processes.values()]
    return f"exit codes {codes}" if any(codes) else None


def end_groups(processes: Sequence[subprocess.Popen[Any]], patience: float = 5) -> None:
    """End processes, each of which leads its own session, and kill what is left of their groups.

    Processes have `patience` seconds to end, and as many again once they are killed.
    """
    living = [process for process in processes if process.poll() is None]
    for number, receivers in ((signal.SIGTERM, living), (signal.SIGKILL, processes)):
        for process in receivers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
        deadline = time.monotonic() + patience
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument(
        "--rate", default=links.UNLIMITED, help="rate of every link, such as 100mbit (default: no limit)"
    )
    parser.add_argument("--timeout", type=float, metavar="SECONDS")
    parser.add_argument("command", nargs="+", help="program and arguments, after --")
    options = parser.parse_args()
    links.enter_user_namespace([sys.executable, "-m", __spec__.name, *sys.argv[1:]])
    try:
        with signals_as_exceptions(), Cluster(options.hosts, options.rate) as cluster:
            run = cluster.run(options.command, timeout=options.timeout, on_line=partial(print, end=""))
    except links.ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if run.failure is not None:
        run.print_ends()
        print(f"error: {run.failure}", file=sys.stderr)
    return int(run.failure is not None)


if __name__ == "__main__":
    sys.exit(main())
