"""Rate-limited hosts: what is limited, that nothing stays behind, and that the interface agrees with our statistics."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from launch.testbed.cluster import NAMESPACES, PREFIX, Cluster, ClusterError, bits_per_second, check_machine

ROOT = Path(__file__).parents[1]
BENCH = [sys.executable, str(ROOT / "launch/testbed/bench.py")]
MODEL = ["--model", "configs/models/gpt_2m.json"]
SHORT = [*MODEL, "--stages", "2", "--rates", "200mbit", "--steps", "2", "--micro-batch", "1", "--seq-len", "32"]
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


def _obstacle() -> str | None:
    """Why there can be no hosts here."""
    try:
        check_machine()
    except ClusterError as error:
        return str(error)
    return None


OBSTACLE = _obstacle()
needs_hosts = pytest.mark.skipif(OBSTACLE is not None, reason=str(OBSTACLE))


def _own_namespaces(process: int) -> list[str]:
    return [path.name for path in NAMESPACES.glob(f"{PREFIX}{process}-*")]


@pytest.mark.parametrize(("rate", "bits"), [("100mbit", 1e8), ("1.5gbit", 1.5e9), ("64kbit", 64e3), ("8bit", 8)])
def test_rates_are_read_as_tc_reads_them(rate: str, bits: float) -> None:
    assert bits_per_second(rate) == bits


@pytest.mark.parametrize("rate", ["100", "100mb", "0gbit", "-1mbit", ""])
def test_a_wrong_rate_says_what_to_write(rate: str) -> None:
    with pytest.raises(ClusterError, match='such as "100mbit"'):
        bits_per_second(rate)


def test_a_missing_tool_is_named_with_its_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ClusterError, match=r"ip \(package iproute2\), .*apt-get install"):
        check_machine()


@needs_hosts
def test_a_link_carries_its_rate() -> None:
    with Cluster(2, "20mbit") as cluster:
        run = cluster.run([sys.executable, "-c", TRANSFER], timeout=60)
    assert run.failure is None, run.outputs
    # 2.5 MB are 20 Mbit; headers, and the burst that passes at once, take a few per cent.
    assert float(run.outputs[0]) == pytest.approx(1.0, rel=0.25)


@needs_hosts
def test_a_host_that_fails_ends_the_others_and_nothing_stays() -> None:
    with Cluster(2) as cluster:
        run = cluster.run(["sh", "-c", "if [ $RANK = 0 ]; then sleep 60; else echo so; exit 3; fi"], timeout=30)
    assert run.failure == "host 1 ended with 3"
    assert run.outputs == ("", "so\n")
    assert run.seconds < 20
    assert not _own_namespaces(os.getpid())


@needs_hosts
def test_an_error_while_hosts_are_made_leaves_nothing() -> None:
    with pytest.raises(ClusterError, match="rate '5 monkeys'"), Cluster(1, "5 monkeys"):
        pass
    assert not _own_namespaces(os.getpid())


@needs_hosts
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_interface_counts_what_the_statistics_say(tmp_path: Path) -> None:
    output = tmp_path / "bench.json"
    command = [*BENCH, *SHORT, "--methods", "deepspeed", "int4", "--output", str(output)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    first = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert first.returncode == 0, first.stdout + first.stderr
    rows = {row["method"]: row for row in json.loads(output.read_text())["rows"]}
    assert set(rows) == {"deepspeed", "int4"}
    for row in rows.values():
        assert abs(row["bytes"]["difference_percent"]) < 3
    assert rows["int4"]["bytes"]["interface"] < 0.5 * rows["deepspeed"]["bytes"]["interface"]
    again = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert f"in {output} already" in again.stdout.replace("\n", "")
