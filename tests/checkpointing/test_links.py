"""Links in a directory of checkpoints are neither counted, nor followed, nor removed."""

import json
import os
import signal
from pathlib import Path

import pytest

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.completeness import find_problems
from deepspeed_compress.checkpointing.deepspeed.engine_files import DirectFile
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_directory import find_host_saves
from deepspeed_compress.cli import main
from deepspeed_compress.compression.state_description import read_description
from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.coordinator.coordinator import StateFile
from deepspeed_compress.safe_files import hold, temporary, write_text
from tests.support.checkpoints import save, write


def written(directory: Path, *steps: int) -> None:
    for step in steps:
        CheckpointDirectory(directory).publish(write(save(directory, step, automatic=True)))


def test_a_link_is_not_a_checkpoint_and_its_target_is_kept(tmp_path: Path) -> None:
    written(tmp_path, 1, 2, 3)
    (tmp_path / "best").symlink_to("global_step1")
    (tmp_path / "newest").symlink_to(tmp_path / "global_step3")
    (tmp_path / "broken").symlink_to("global_step9")
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [
        "global_step1",
        "global_step2",
        "global_step3",
    ]
    assert CheckpointDirectory(tmp_path).prune(1) == ["global_step2"]
    for kept in ("global_step1", "global_step3", "best", "newest"):
        assert list(find_problems(tmp_path / kept)) == []


def test_a_checkpoint_on_another_disk_is_loaded_by_its_link_and_never_removed(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    written(here, 1, 2, 3)
    (here / "global_step1").rename(elsewhere)
    (here / "global_step1").symlink_to(elsewhere)
    assert CheckpointDirectory(here).prune(1) == ["global_step2"]
    assert list(find_problems(here / "global_step1")) == []
    assert CheckpointDirectory(here).tags_to_try() == ["global_step3"]


def test_the_directory_and_latest_may_be_links(tmp_path: Path) -> None:
    written(tmp_path / "real", 1, 2, 3)
    link = tmp_path / "link"
    link.symlink_to("real")
    (tmp_path / "real" / "best").symlink_to("global_step1")
    assert CheckpointDirectory(link).prune(1) == ["global_step2"]
    (link / "latest").rename(tmp_path / "named")
    (link / "latest").symlink_to(tmp_path / "named")
    assert CheckpointDirectory(link).latest_tag() == "global_step3"
    written(link, 4)
    # Another file took the place of the link, and what that led to is as it was.
    assert ((tmp_path / "named").read_text(), CheckpointDirectory(link).latest_tag()) == (
        "global_step3",
        "global_step4",
    )


def test_a_lock_that_is_a_link_empties_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("contents")
    (tmp_path / ".deepspeed_compress.lock").symlink_to("precious")
    with pytest.raises(OSError, match="symbolic links"):
        hold(tmp_path)
    assert (tmp_path / "precious").read_text() == "contents"


def test_an_interrupted_removal_leaves_nothing_that_looks_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, 1, 2)
    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", lambda *_, **__: None)
        assert CheckpointDirectory(tmp_path).prune(1) == ["global_step1"]
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == ["global_step2"]
    CheckpointDirectory(tmp_path).prune(1)
    assert not list(tmp_path.glob(".deepspeed_compress_removed_*"))


def test_all_others_are_removed_where_one_cannot_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, 1, 2, 3)
    rename = os.rename

    def refusing(source: Path, target: Path) -> None:
        if source.name == "global_step1":
            raise PermissionError("busy")
        rename(source, target)

    monkeypatch.setattr(os, "rename", refusing)
    with pytest.raises(StateError, match="global_step1 cannot be removed: busy"):
        CheckpointDirectory(tmp_path).prune(1)
    assert [checkpoint.tag for checkpoint in CheckpointDirectory(tmp_path).checkpoints()] == [
        "global_step1",
        "global_step3",
    ]
    assert list(find_problems(tmp_path / "global_step1")) == []


@pytest.mark.parametrize("tag", ["a\x1b[31mred", "[bold]x", "two\nlines", "\u202eltr"])
def test_tags_change_no_terminal(tag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(save(tmp_path, 3)).place.rename(tmp_path / tag)
    (tmp_path / "latest").write_text(tag if tag.isprintable() else "other")
    for command in ("list", "verify"):
        assert main(["checkpoint", command, str(tmp_path)]) == 0
        shown = capsys.readouterr().out
        assert "\x1b" not in shown
        assert "\u202e" not in shown
        assert repr(tag)[1:-1] in shown


ENDLESS = {
    "a device": lambda file: file.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "itself": lambda file: file.symlink_to(file.name),
}


@pytest.mark.parametrize("name", [f"{files.STEM}00001.json", "deepspeed_compress_rank_00000.json", "x_states.pt"])
@pytest.mark.parametrize("what", ENDLESS)
def test_nothing_is_read_without_end(what: str, name: str, tmp_path: Path) -> None:
    written(tmp_path, 1, 2)
    file = tmp_path / "global_step1" / name
    file.unlink(missing_ok=True)
    ENDLESS[what](file)
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail("it reads without end"))
    signal.alarm(20)
    try:
        assert main(["checkpoint", "list", str(tmp_path)]) == 0
        assert main(["checkpoint", "verify", str(tmp_path)]) == int(name.startswith(files.STEM))
        assert CheckpointDirectory(tmp_path).tags_to_try()[0] == "global_step2"
        assert main(["checkpoint", "prune", str(tmp_path), "--keep", "1"]) == 0
        if name.startswith("deepspeed_compress_rank"):
            with pytest.raises(StateError):
                read_description(file)
    finally:
        signal.alarm(0)


def test_temporary_names_that_are_links_overwrite_no_other_file(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("contents")
    for file in (tmp_path / "text", tmp_path / "states"):
        temporary(file).symlink_to(tmp_path / "precious")
    write_text(tmp_path / "text", "new")
    with DirectFile(temporary(tmp_path / "states")) as stream:
        stream.finish()
    (tmp_path / "state.json.lock").symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="symbolic links"):
        StateFile(tmp_path / "state.json")
    assert (tmp_path / "precious").read_text() == "contents"


def test_links_in_the_memory_of_a_host_are_kept(tmp_path: Path) -> None:
    memory, other = tmp_path / "memory", tmp_path / "other"
    written(memory, 1)
    written(other, 7)
    (memory / "linked").symlink_to(other / "global_step7")
    assert [one.tag for one in find_host_saves(memory)[0]] == ["global_step1"]
    CheckpointDirectory(memory).keep_only(save(memory, 8), ["global_step1"])
    assert list(find_problems(other / "global_step7")) == []


DAMAGE = {"no JSON": "{", "deep": "[" * 100_000, "large numbers": "1" * 10_000}


FIELDS = {"step": "\x1b[2J", "files": {"../../x": [1, "0"]}}


@pytest.mark.parametrize("text", [*DAMAGE.values(), *FIELDS], ids=[*DAMAGE, *FIELDS])
def test_a_damaged_list_is_one_plain_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write(save(tmp_path, 3))
    file = files.list_file(one.place, 1)
    if text in FIELDS:
        found = {**json.loads(file.read_text()), text: FIELDS[text]}
        del found["sha256"]
        text = json.dumps({**found, "sha256": files._sha256_of(found)})
    file.write_text(text)
    assert main(["checkpoint", "list", str(tmp_path)]) == 0
    shown = capsys.readouterr()
    errors = [line for line in shown.out.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert str(file) in errors[0]
    assert "\x1b" not in shown.out + shown.err
    assert main(["checkpoint", "verify", str(tmp_path)]) == 1


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\x1b[2J", b"", b"x" * 100_000, b"a\x00b"])
def test_a_damaged_latest_is_refused_by_name(
    content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, 1, 2)
    (tmp_path / "latest").write_bytes(content)
    with pytest.raises(StateError, match="latest is damaged"):
        CheckpointDirectory(tmp_path).tags_to_try()
    assert main(["checkpoint", "list", str(tmp_path)]) == 1
    shown = capsys.readouterr()
    assert "latest is damaged" in shown.err
    assert "\x1b" not in shown.out + shown.err
