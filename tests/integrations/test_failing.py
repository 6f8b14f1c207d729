"""What the ranks of an agent say when their program fails."""

import re
from pathlib import Path

import pytest

from deepspeed_compress import ConfigError, UnsupportedError
from deepspeed_compress.backends.deepspeed.restarts import _continuing
from deepspeed_compress.integrations.failing import tell_failures
from deepspeed_compress.launcher.failures import PERMANENT
from deepspeed_compress.launcher.heartbeat import AGENT, Signs


def fail(error: Exception) -> None:
    with tell_failures():
        raise error


@pytest.mark.parametrize("error", [ConfigError("/deepspeed_compress: wrong"), UnsupportedError("no such engine")])
def test_an_error_of_the_configuration_is_one_line(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(SystemExit) as stop:
        fail(error)
    assert stop.value.code == PERMANENT
    assert capsys.readouterr().err == f"ds-compress: error: rank 0: {error}\n"
    monkeypatch.delenv(AGENT)
    with pytest.raises(type(error)):
        fail(error)


LOST = RuntimeError("[../gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31234")


def test_the_traceback_of_a_rank_that_has_lost_another_goes_to_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(SystemExit) as stop:
        fail(LOST)
    assert stop.value.code == 1
    told = capsys.readouterr().err
    found = re.fullmatch(r"ds-compress: rank 3 has lost another rank; its traceback is in (\S+)\n", told)
    assert found is not None
    assert str(LOST) in Path(found[1]).read_text()
    monkeypatch.delenv(AGENT)
    with pytest.raises(RuntimeError):
        fail(LOST)


def test_any_other_error_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    for error in (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), KeyError("connection closed by peer")):
        with pytest.raises(type(error)):
            fail(error)


def test_a_start_says_where_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "signs_1").mkdir()
    (tmp_path / "signs_2").mkdir()
    Signs(tmp_path / "signs_1", 0).stepped(474)
    monkeypatch.setenv(AGENT, str(tmp_path / "signs_2"))
    place = tmp_path / "checkpoints"
    for name in ("global_step460", "epoch/1"):
        tag = place / name
        tag.mkdir(parents=True)
        line = f"ds-compress: continuing from {name} (14 steps repeated)"
        assert _continuing(tag, place, 460) == line
        (tag / "mp_rank_00_model_states.pt").touch()
        assert _continuing(tag / "mp_rank_00_model_states.pt", place, 460) == line
    held = tmp_path / "memory" / "global_step460"
    assert _continuing(held, place, 460) == "ds-compress: continuing from global_step460 (14 steps repeated)"
