"""Emulated hosts: their rates are limited, and nothing of them is left behind."""

import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepspeed_compress.launcher.heartbeat import AGENT, HOSTS, MEMORY, RESUME
from deepspeed_compress.tools.bench.hosts import Cluster, _Reader
from deepspeed_compress.tools.bench.links import PREFIX, ClusterError, bits_per_second, check_machine
from tests.support.hosts import measures_links, needs_hosts

TRANSFER = """
import os, socket, time
address, size = (os.environ["MASTER_ADDR"], 5000), 2_500_000
if os.environ["RANK"] == "0":
    connection, _ = socket.create_server(address).accept()
    begin, left = time.monotonic(), size
    while left:
        left -= len(connection.recv(min(left, 65536)))
    print(time.monotonic() - begin)
else:
    for attempt in range(100):
        try:
            socket.create_connection(address).sendall(bytes(size))
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
"""


NAMESPACES = Path("/run/netns")


def _own_namespaces(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}{process}-*")]


@pytest.mark.parametrize(
    ("rate", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("8bit", 8), ("none", math.inf)]
)
def test_rates_are_parsed_as_tc_does(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["100", "100mb", "0gbit", "-1mbit", ""])
def test_an_invalid_rate_is_refused_with_an_example(rate: str) -> None:
    with pytest.raises(ClusterError, match='such as "100mbit"'):
        bits_per_second(rate)


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"ip \(package iproute2\), .*apt-get install"):
        check_machine()


def test_a_process_can_write_although_nobody_reads_what_this_program_prints() -> None:
    def gone(line: str) -> None:
        raise BrokenPipeError

    command = [sys.executable, "-c", "print('line\\n' * 100_000)"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    reader = _Reader(process, gone)
    assert process.wait(60) == 0
    assert reader.text().count("line") == 100_000


LISTEN = (
    "import socket; server = socket.create_server(('', 5000)); print(flush=True); [server.accept() for _ in range(2)]"
)
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 5000), timeout=3)"


@pytest.mark.slow
@needs_hosts
def test_a_cut_link_carries_nothing_until_it_is_mended() -> None:
    with Cluster(2) as cluster:
        reach = cluster.on(0, [sys.executable, "-c", CONNECT, cluster.address(1)])
        with subprocess.Popen(cluster.on(1, [sys.executable, "-c", LISTEN]), stdout=subprocess.PIPE) as listening:
            assert listening.stdout is not None
            listening.stdout.readline()
            assert subprocess.run(reach).returncode == 0
            cluster.cut(1)
            assert subprocess.run(reach, stderr=subprocess.DEVNULL).returncode == 1
            cluster.mend(1)
            assert subprocess.run(reach).returncode == 0


@needs_hosts
def test_ranks_share_the_address_of_their_host() -> None:
    text = "echo $RANK $LOCAL_RANK $LOCAL_WORLD_SIZE $WORLD_SIZE $(hostname -I)"
    with Cluster(2, per_host=2) as cluster:
        run = cluster.run(["sh", "-c", text], timeout=300)
    first, second = cluster.address(0), cluster.address(1)
    assert [output.split() for output in run.outputs] == [
        ["0", "0", "2", "4", first],
        ["1", "1", "2", "4", first],
        ["2", "0", "2", "4", second],
        ["3", "1", "2", "4", second],
    ]


FORKING = """
import os, sys, time
from deepspeed_compress.tools.bench.hosts import fork_ranks, wait_for_ranks
copies = fork_ranks()
rank = os.environ["RANK"]
os.write(1, f"{rank} {os.environ['LOCAL_RANK']} {len(os.sched_getaffinity(0))}\\n".encode())
if rank == sys.argv[1]:
    os._exit(3)
if rank == "0" and sys.argv[1] != "none":
    time.sleep(600)
wait_for_ranks(copies)
"""


@needs_hosts
@pytest.mark.parametrize(("failing", "failure"), [("none", None), ("3", "rank 2 ended with 3")])
def test_a_program_makes_the_other_ranks_of_its_host(failing: str, failure: str | None) -> None:
    with Cluster(2, per_host=2) as cluster:
        run = cluster.run([sys.executable, "-c", FORKING, failing], timeout=300, forks=True)
    assert run.failure == failure
    first, second = (sorted(output.splitlines()) for output in run.outputs)
    assert second == ["2 0 1", "3 1 1"]
    # If a rank fails, those of the other host may be ended before they write.
    assert failure or first == ["0 0 1", "1 1 1"]


@measures_links
def test_a_link_carries_its_rate() -> None:
    """Other work on the machine may disturb a measurement, but hardly three."""
    # 2.5 MB are 20 Mbit. Headers and the initial burst change the time by a few percent.
    assert any(seconds_of_transfer() == pytest.approx(1.0, rel=0.25) for _ in range(3))


def seconds_of_transfer() -> float:
    with Cluster(2, "20mbit") as cluster:
        run = cluster.run([sys.executable, "-c", TRANSFER], timeout=300)
    assert run.failure is None, run.outputs
    return float(run.outputs[0])


@needs_hosts
def test_a_failing_host_ends_the_others_and_leaves_nothing() -> None:
    with Cluster(2) as cluster:
        run = cluster.run(["sh", "-c", "if [ $RANK = 0 ]; then sleep 600; else echo so; exit 3; fi"], timeout=400)
    assert run.failure == "rank 1 ended with 3"
    assert run.outputs == ("", "so\n")
    assert run.seconds < 300
    assert not _own_namespaces(os.getpid())


@needs_hosts
def test_an_error_during_setup_leaves_nothing() -> None:
    with pytest.raises(ClusterError, match="rate '5 monkeys'"), Cluster(1, "5 monkeys"):
        pass
    assert not _own_namespaces(os.getpid())


ORDINARY = ("unshare", "--user", "--map-user=1000", "--map-group=1000")
"""Prefix of a command that runs it as a user without root, with the same files readable."""


def _as_program(before: Sequence[str], *command: str) -> tuple[subprocess.CompletedProcess[str], list[str]]:
    """Run the program; return its result, and the namespaces that it has left behind."""
    program = [*before, sys.executable, "-m", "deepspeed_compress.tools.bench.hosts", "--rate", "20mbit", "--"]
    with subprocess.Popen([*program, *command], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        output, errors = process.communicate(timeout=300)
    done = subprocess.CompletedProcess(program, process.returncode, output, errors)
    return done, _own_namespaces(process.pid)


@measures_links
def test_an_ordinary_user_gets_hosts_in_a_user_namespace() -> None:
    if subprocess.run([*ORDINARY, *ORDINARY, "true"], capture_output=True).returncode:
        pytest.skip("users may not have user namespaces here")
    seconds = []
    for _ in range(3):
        run, left = _as_program(ORDINARY, sys.executable, "-c", TRANSFER)
        assert run.returncode == 0, run.stderr
        assert not left
        seconds.append(float(run.stdout))
        if seconds[-1] == pytest.approx(1.0, rel=0.25):
            return
    pytest.fail(f"2.5 MB took {seconds} s at 20 Mbit/s")


@needs_hosts
def test_missing_permissions_are_reported() -> None:
    closed = ["unshare", "--user", "--map-root-user", "sh", "-c"]
    closed += ['echo 0 >/proc/sys/user/max_user_namespaces && exec setpriv --bounding-set=-all "$@"', "sh"]
    run, left = _as_program(closed, "true")
    assert (run.returncode, left) == (1, [])
    assert "need root (CAP_NET_ADMIN and CAP_SYS_ADMIN), or a kernel that allows" in run.stderr


def test_hosts_do_not_set_variables_of_agents() -> None:
    """Checkpoints in memory use these variables to place copies."""
    assert {AGENT, HOSTS, MEMORY, RESUME}.isdisjoint(Cluster(2).environment(0))
