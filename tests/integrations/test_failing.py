"""Error reports of ranks that an agent has started."""

import re
from pathlib import Path
from urllib.error import URLError

import pytest

from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.backends.deepspeed.restarts import _continuing
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.integrations import run
from deepspeed_compress.integrations.run import report_failures
from deepspeed_compress.launcher.heartbeat import AGENT, EXIT_PERMANENT, HeartbeatWriter, first_error


def fail(error: Exception) -> None:
    with report_failures():
        raise error


@pytest.mark.parametrize("error", [ConfigError("/deepspeed_compress: wrong"), UnsupportedError("no such engine")])
def test_a_configuration_error_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        fail(error)
    assert stop.value.code == EXIT_PERMANENT
    assert capsys.readouterr().err == f"ds-compress: error: rank 0: {error}\n"
    monkeypatch.delenv(AGENT)
    with pytest.raises(type(error)):
        fail(error)


LOST_PEER = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31234")


def test_the_traceback_of_a_rank_that_lost_a_peer_is_written_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(run, "_AFTER_FIRST", 0.0)
    with pytest.raises(SystemExit) as stop:
        fail(LOST_PEER)
    assert stop.value.code == 1
    report = capsys.readouterr().err
    found = re.fullmatch(r"ds-compress: rank 3 has lost another rank; its traceback is in (\S+)\n", report)
    assert found is not None
    assert str(LOST_PEER) in Path(found[1]).read_text()
    assert first_error(tmp_path) is None
    monkeypatch.delenv(AGENT)
    with pytest.raises(RuntimeError):
        fail(LOST_PEER)


CAUSES = [
    RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    KeyError("connection closed by peer"),
    URLError(ConnectionRefusedError(111, "Connection refused")),
    BrokenPipeError(32, "Broken pipe"),
    RolloutError("http://10.0.0.1:29500 does not answer: connection refused"),
]


@pytest.mark.parametrize("error", CAUSES, ids=repr)
def test_other_errors_keep_their_tracebacks_and_the_agent_is_told(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs have connections of their own, whose ends say nothing of other ranks."""
    monkeypatch.setenv(AGENT, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(type(error)):
        fail(error)
    found = first_error(tmp_path)
    assert found is not None
    assert found.rank == 3
    assert type(error).__name__ in found.lines.splitlines()[-1]
    assert Path(found.file).read_text().endswith(f"{found.lines}\n")
    assert Path(found.file).stat().st_mode & 0o777 == 0o600


def test_an_error_is_shown_even_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "missing"))
    with pytest.raises(RuntimeError, match="closed by peer"):
        fail(LOST_PEER)


def test_a_restart_reports_its_checkpoint_and_repeated_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "heartbeats_1").mkdir()
    (tmp_path / "heartbeats_2").mkdir()
    HeartbeatWriter(tmp_path / "heartbeats_1", 0).stepped(474)
    monkeypatch.setenv(AGENT, str(tmp_path / "heartbeats_2"))
    checkpoints = tmp_path / "checkpoints"
    for name in ("global_step460", "epoch/1"):
        tag = checkpoints / name
        tag.mkdir(parents=True)
        line = f"ds-compress: continuing from {name} (14 steps repeated)"
        assert _continuing(tag, checkpoints, 460) == line
        (tag / "mp_rank_00_model_states.pt").touch()
        assert _continuing(tag / "mp_rank_00_model_states.pt", checkpoints, 460) == line
    in_memory = tmp_path / "memory" / "global_step460"
    assert _continuing(in_memory, checkpoints, 460) == "ds-compress: continuing from global_step460 (14 steps repeated)"
