"""Heartbeats of ranks, of which each engine writes its own."""

from pathlib import Path
from unittest.mock import MagicMock

import pytest

from deepspeed_compress.backends.deepspeed.restarts import attach_heartbeat
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.launcher.heartbeat import AGENT, Heartbeat, HeartbeatWriter, read_heartbeat
from tests.support.full_disk import full_disk


def test_engines_of_a_rank_do_not_hide_each_other(tmp_path: Path) -> None:
    first, second = HeartbeatWriter(tmp_path, 3), HeartbeatWriter(tmp_path, 3)
    first.saves(True)
    first.stepped(7)
    begun = read_heartbeat(tmp_path, 3)
    second.saves(False)
    assert read_heartbeat(tmp_path, 3) == begun
    second.stepped(2)
    found = read_heartbeat(tmp_path, 3)
    assert begun is not None
    assert found is not None
    assert (found.steps, found.saves) == (7, True)
    assert found.time >= begun.time > 0
    first.close()
    assert read_heartbeat(tmp_path, 3) == Heartbeat(found.time, 7, saves=False)
    second.close()
    assert read_heartbeat(tmp_path, 3) == Heartbeat(0, 7, saves=False)


def test_a_rank_without_heartbeats_has_none(tmp_path: Path) -> None:
    (tmp_path / "rank_00003_damaged").write_bytes(b"short")
    assert read_heartbeat(tmp_path, 3) is None
    assert read_heartbeat(tmp_path / "missing", 3) is None


def test_memory_that_is_full_costs_heartbeats_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(AGENT, str(tmp_path))
    (tmp_path / "full").write_text("rank_00003")
    engine, session = MagicMock(global_rank=3), MagicMock(saving=None)
    with full_disk(tmp_path / "full"), pytest.warns(CompressWarning, match=r"no heartbeat of rank 3.*No space left"):
        attach_heartbeat(engine, session)
    assert read_heartbeat(tmp_path, 3) is None
