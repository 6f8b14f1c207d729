"""`ds-compress islands`: a coordinator as a process."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.transport.credentials import SECRET, TLS_AUTHORITY, TLS_CERTIFICATE
from tests.support.transport import make_certificates

SERVE = [sys.executable, "-m", "deepspeed_compress.cli", "islands", "serve", "--host", "127.0.0.1", "--port", "0"]


@contextmanager
def serving(state: Path, *more: str) -> Iterator[str]:
    """Yield the address of the command."""
    process = subprocess.Popen([*SERVE, "--state", str(state), *more], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = re.search(r"port (\d+)", process.stdout.readline())
    assert port is not None
    try:
        yield f"127.0.0.1:{port[1]}"
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        process.stdout.close()


def test_the_command_serves_until_stopped_and_resumes_from_its_state_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state, runs = tmp_path / "state.json", []
    for number in range(2):
        with serving(state) as address:
            client = CoordinatorClient(address, 60.0, {"timeout": 2.0, "minimum": 1}, "host:1", ["host:2"], "")
            assert client.number == number
            assert main(["islands", "status", address, "--json"]) == 0
            runs.append(json.loads(capsys.readouterr().out))
            client.leave()
    assert runs[0]["run"] == runs[1]["run"]
    assert [one["number"] for one in runs[1]["islands"]] == [1]


def test_status_prints_a_readable_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "state.json") as address:
        assert main(["islands", "status", address]) == 0
        assert capsys.readouterr().out.endswith("no island is connected\n")
        client = CoordinatorClient(address, 60.0, {"timeout": 2.0, "minimum": 1}, "10.0.0.7:1", ["10.0.0.7:2"], "")
        assert main(["islands", "status", address]) == 0
        client.leave()
    about, titles, _, row = (line.strip() for line in capsys.readouterr().out.splitlines() if line.strip())
    assert about.startswith(f"run {client.run}, version 0, round none")
    assert re.split(r"\s{2,}", titles) == ["island", "host", "version", "waiting"]
    assert re.fullmatch(r"0\s+10\.0\.0\.7\s+0\s+False", row)


def test_the_command_listens_only_locally_by_default(tmp_path: Path) -> None:
    command = [one for one in SERVE if one not in ("--host", "127.0.0.1")]
    for more, text in (([], "for islands on other hosts, pass --host 0.0.0.0"), (["--host", "0.0.0.0"], "of 0.0.0.0")):
        arguments = [*command, "--state", str(tmp_path / "state"), *more]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line = process.stdout.readline()
            process.kill()
        assert text in line
        assert ("Only this host" in line) == (not more)


@pytest.mark.parametrize("more", [[], ["--parameter-server"]])
def test_the_command_continues_if_its_output_is_closed_and_its_files_are_private(
    tmp_path: Path, more: list[str]
) -> None:
    place = tmp_path / "made"
    command = [*SERVE, "--state", str(place / "state"), *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            port = re.search(r"port (\d+)", process.stdout.readline())
            assert port is not None
            process.stdout.close()
            assert numbers_given(f"127.0.0.1:{port[1]}", bool(more)) == [0, 1]
        finally:
            process.kill()
    kept = [place, *place.iterdir()]
    assert len(kept) > 2
    assert [path for path in kept if path.stat().st_mode & 0o077] == []


def numbers_given(address: str, asynchronous: bool) -> list[int]:
    """Rounds of two islands are logged."""
    if not asynchronous:
        return [CoordinatorClient(address, 60.0, {"timeout": 2.0}, "host:1", ["host:2"], "").number for _ in range(2)]
    terms = {"exchange": {"method": "none"}, "outer": {}, "ranks": 1, "max_staleness": 1}
    client = PushClient(address, 1.0, 60.0)
    found = [client.ask({"kind": "enter", "terms": terms})[0]["number"] for _ in range(2)]
    client.close()
    return found


def test_two_coordinators_cannot_use_one_state_file(tmp_path: Path) -> None:
    with serving(tmp_path / "state.json"):
        again = subprocess.run([*SERVE, "--state", str(tmp_path / "state.json")], capture_output=True, text=True)
    assert again.returncode == 1
    assert "another coordinator uses this file" in again.stderr


def test_a_file_that_is_not_a_state_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "state.json").write_text("{")
    assert main(["islands", "serve", "--port", "0", "--state", str(tmp_path / "state.json")]) == 1
    assert "damaged, or was not written by a coordinator" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("address", "text"),
    [
        ("here", "is not an address"),
        ("127.0.0.1:70000", "is not an address"),
        ("127.0.0.1:1", "no coordinator answers at 127.0.0.1:1"),
        ("127.0.0.1:1", "refused"),
    ],
)
def test_status_reports_an_unreachable_address(address: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["islands", "status", address]) == 1
    assert text in capsys.readouterr().err


def test_forget_removes_dead_islands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(tmp_path / "state.json") as address:
        lost, there = (
            CoordinatorClient(address, 60.0, {"timeout": 2.0}, f"host{n}:1", ["host:2"], "") for n in range(2)
        )
        for one in (lost, there):
            assert one.sources().version == 1
            one.ready(1)
        lost._closed = True
        assert lost._connection is not None
        lost._connection.end()
        missing: list[dict[str, object]] = []
        while not missing:
            assert main(["islands", "status", address, "--json"]) == 0
            missing = json.loads(capsys.readouterr().out)["missing"]
        assert missing == [{"number": 0, "host": "host0", "version": 1}]
        for numbers, text in ((["1"], "island 1 is connected (allowed: 0)"), (["7"], "island 7 is unknown")):
            assert main(["islands", "forget", address, *numbers]) == 1
            assert text in capsys.readouterr().err
        assert main(["islands", "status", address]) == 0
        assert re.search("0 +host0 +1 +missing", capsys.readouterr().out)
        assert main(["islands", "forget", address, "0", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["missing"] == []
        there.leave()


def test_status_names_the_secret_to_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with serving(tmp_path / "state.json") as address:
        monkeypatch.setenv(SECRET, "another secret than the server")
        assert main(["islands", "status", address]) == 1
    error = capsys.readouterr().err
    assert f"has a different secret. The secret here is from {SECRET}: give both hosts the same one" in error


def test_both_sides_require_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    files = make_certificates(tmp_path)
    options = ["--tls-certificate", files["member"], "--tls-authority", files["authority"]]
    for name in (TLS_CERTIFICATE, TLS_AUTHORITY):
        # What the command sets for its process is undone.
        monkeypatch.setenv(name, "")
    with serving(tmp_path / "state.json", *options) as address:
        assert main(["islands", "status", address]) == 1
        assert main(["islands", "status", address, *options]) == 0
    monkeypatch.setenv(TLS_AUTHORITY, "")
    assert main(["islands", "status", address, *options[:2]]) == 1
    assert f"{TLS_AUTHORITY}: is not set (allowed: both" in capsys.readouterr().err
