"""`ds-compress checkpoint`."""

from deepspeed_compress.cli import main
from tests.support.checkpoints import publish, save, write


def test_checkpoints_are_listed_verified_and_pruned(tmp_path, capsys):
    for step in (2, 4, 6):
        publish(write(save(tmp_path, step)))
    write(save(tmp_path, 8), ranks=(1,))
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert shown.count("complete") == 4
    assert shown.count("incomplete") == 1
    assert shown.count("latest") == 1

    assert main(["checkpoint", "verify", str(tmp_path)]) == 1
    shown = capsys.readouterr().out
    assert "global_step6: complete" in shown
    assert "error:" in shown
    assert "global_step8: damaged" in shown
    assert main(["checkpoint", "verify", str(tmp_path), "--tag", "global_step4"]) == 0

    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "2", "--dry-run"]) == 0
    assert (tmp_path / "global_step2").exists()
    assert main(["checkpoint", "prune", str(tmp_path), "--keep", "2"]) == 0
    assert sorted(place.name for place in tmp_path.iterdir()) == [
        "global_step4",
        "global_step6",
        "global_step8",
        "latest",
    ]


def test_a_tag_is_shown_whole_in_a_narrow_window(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    publish(write(save(tmp_path, 123456)))
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    assert "global_step123456 " in capsys.readouterr().out


def test_missing_checkpoints_are_reported(tmp_path, capsys):
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    assert "contains no checkpoints" in capsys.readouterr().err
    write(save(tmp_path, 2))
    assert main(["checkpoint", "verify", str(tmp_path), "--tag", "other"]) == 1
    assert "--tag other: " in capsys.readouterr().err
