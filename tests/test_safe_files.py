"""Files are written whole or not at all, and only regular files are read."""

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from deepspeed_compress.rollout.store import DirectoryStore
from deepspeed_compress.safe_files import open_regular, read_text, write_text
from tests.support.full_disk import full_disk

WRITERS: dict[str, Callable[[Path, str], object]] = {
    "text": write_text,
    "blob": lambda file, text: DirectoryStore(file.parent).put(file.name, text.encode()),
}


@pytest.mark.parametrize("write", WRITERS)
def test_a_full_disk_leaves_the_old_file_and_nothing_else(write: str, tmp_path: Path) -> None:
    place, flag = tmp_path / "place", tmp_path / "full"
    place.mkdir()
    WRITERS[write](place / "file", "old")
    flag.write_text(re.escape(str(place)))
    with full_disk(flag), pytest.raises(OSError, match="No space left") as raised:
        WRITERS[write](place / "file", "new")
    assert raised.value.filename == str(place / "file")
    assert [(one.name, one.read_text()) for one in place.iterdir()] == [("file", "old")]


def test_a_private_file_is_private(tmp_path: Path) -> None:
    write_text(tmp_path / "file", "secret", private=True)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600


def test_only_regular_files_are_read_and_only_so_much(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for file in (tmp_path / "pipe", Path("/dev/zero"), tmp_path):
        with pytest.raises(OSError, match="not a regular file"):
            open_regular(file)
    (tmp_path / "text").write_text("a long text")
    (tmp_path / "link").symlink_to("text")
    assert read_text(tmp_path / "link") == "a long text"
    with pytest.raises(ValueError, match="more than 5 bytes"):
        read_text(tmp_path / "link", 5)
