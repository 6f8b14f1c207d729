"""Directories that compiled kernels are loaded from, and those that are left alone."""

import os
import warnings
from pathlib import Path

import pytest

from deepspeed_compress.compression.kernels import compiled
from deepspeed_compress.errors import CompressWarning

BUILT = "built for this test"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home directory of the test's own, a compiler that takes no time, and a loader that only reads."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(compiled, "_build", lambda path: path.write_text(BUILT))
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: Path(path))
    return home


def load(directory: Path | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """The library that is loaded with `directory` in the environment, and what the user is told."""
    if directory is not None:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compiled.load_library()
    assert isinstance(found, Path)
    return found, [str(one.message) for one in caught if isinstance(one.message, CompressWarning)]


def made(directory: Path, mode: int) -> Path:
    directory.mkdir()
    directory.chmod(mode)
    return directory


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_this_user_is_used(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path / "cache", mode)
    library, told = load(directory, monkeypatch)
    assert (library.parent, told) == (directory, [])
    library.write_text("as it was")
    again, told = load(directory, monkeypatch)
    assert (again.read_text(), told) == ("as it was", [])


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_library_that_others_may_have_put_there_is_not_loaded(
    mode: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = made(tmp_path / "shared", mode)
    (directory / compiled._library_name()).write_text("planted")
    library, told = load(directory, monkeypatch)
    assert library.parent == home / ".cache" / "deepspeed_compress"
    assert library.read_text() == BUILT
    assert len(told) == 1
    for part in (f"TORCH_EXTENSIONS_DIR={directory}", f"mode {mode:o}", f"chmod go-w {directory}", str(library.parent)):
        assert part in told[0]
    assert (directory / compiled._library_name()).read_text() == "planted"


def test_one_rank_of_a_host_tells(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path / "shared", 0o777)
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert load(directory, monkeypatch)[1] == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert len(load(directory, monkeypatch)[1]) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_directory_of_another_user_is_not_used(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path / "theirs", 0o755)
    os.chown(directory, 12345, 12345)
    library, told = load(directory, monkeypatch)
    assert library.parent == home / ".cache" / "deepspeed_compress"
    assert "owner 12345" in told[0]


def test_a_library_that_others_may_write_is_built_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = made(tmp_path / "cache", 0o755)
    planted = directory / compiled._library_name()
    planted.write_text("planted")
    planted.chmod(0o777)
    assert load(directory, monkeypatch)[0].read_text() == BUILT


def test_a_default_cache_that_a_umask_opened_is_left_without_a_word(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Distributions that give each user a group make every directory writable for it; nobody asked for that one."""
    default = home / ".cache" / "torch_extensions"
    library, told = load(None, monkeypatch)
    assert (library.parent, told) == (default, [])
    default.chmod(0o775)
    library, told = load(None, monkeypatch)
    assert (library.parent, told) == (home / ".cache" / "deepspeed_compress", [])


def test_without_a_home_that_can_be_written_a_private_directory_is_made(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".cache").write_text("in the way of a directory")
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    library, told = load(made(tmp_path / "shared", 0o777), monkeypatch)
    assert library.parent == tmp_path / f"deepspeed_compress_kernels_{os.geteuid()}"
    assert len(told) == 1
    # Somebody else was there first.
    library.parent.chmod(0o777)
    with pytest.raises(OSError, match="this user's alone"):
        load(tmp_path / "shared", monkeypatch)


def test_what_is_built_is_writable_for_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    former = os.umask(0o002)
    try:
        with monkeypatch.context() as patched:
            from torch.utils import cpp_extension

            patched.setattr(cpp_extension, "load", _pretend_to_build)
            compiled._build(tmp_path / "library.so")
    finally:
        os.umask(former)
    assert (tmp_path / "library.so").stat().st_mode & 0o777 == 0o755


def _pretend_to_build(name: str, sources: list[str], build_directory: str, **options: object) -> None:
    file = Path(build_directory) / f"{name}.so"
    file.write_text(BUILT)
    file.chmod(0o775)
