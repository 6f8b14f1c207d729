"""The choice of the directory for compiled kernels."""

import os
import warnings
from pathlib import Path

import pytest

from deepspeed_compress.compression.kernels import compiled
from deepspeed_compress.errors import CompressWarning

BUILT = "built for this test"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a separate home directory, a fake compiler and a fake loader."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr(compiled, "_build", lambda path: path.write_text(BUILT))
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: Path(path))
    return home


def load(directory: Path | None, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Return the library that is loaded with `directory` in the environment, and the warnings."""
    if directory is not None:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = compiled.load_library()
    assert isinstance(found, Path)
    return found, [str(one.message) for one in caught if isinstance(one.message, CompressWarning)]


def make(directory: Path, mode: int) -> Path:
    directory.mkdir()
    directory.chmod(mode)
    return directory


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_directory_of_this_user_is_used(mode: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path / "cache", mode)
    library, messages = load(directory, monkeypatch)
    assert (library.parent, messages) == (directory, [])
    library.write_text("as it was")
    again, messages = load(directory, monkeypatch)
    assert (again.read_text(), messages) == ("as it was", [])


@pytest.mark.parametrize("mode", [0o777, 0o775, 0o1777])
def test_a_library_in_a_directory_that_others_can_write_is_not_loaded(
    mode: int, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(tmp_path / "shared", mode)
    (directory / compiled._library_name()).write_text("planted")
    library, messages = load(directory, monkeypatch)
    assert library.parent == home / ".cache" / "deepspeed_compress"
    assert library.read_text() == BUILT
    assert len(messages) == 1
    for part in (f"TORCH_EXTENSIONS_DIR={directory}", f"mode {mode:o}", f"chmod go-w {directory}", str(library.parent)):
        assert part in messages[0]
    assert (directory / compiled._library_name()).read_text() == "planted"


def test_a_library_that_others_can_write_is_rebuilt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = make(tmp_path / "cache", 0o755)
    planted = directory / compiled._library_name()
    planted.write_text("planted")
    planted.chmod(0o777)
    assert load(directory, monkeypatch)[0].read_text() == BUILT


def test_a_default_cache_that_others_can_write_is_replaced_without_a_warning(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some distributions have a umask that makes every new directory writable for the user's group."""
    default = home / ".cache" / "torch_extensions"
    library, messages = load(None, monkeypatch)
    assert (library.parent, messages) == (default, [])
    default.chmod(0o775)
    library, messages = load(None, monkeypatch)
    assert (library.parent, messages) == (home / ".cache" / "deepspeed_compress", [])


def test_a_private_temporary_directory_is_used_if_the_home_is_unwritable(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (home / ".cache").write_text("in the way of a directory")
    monkeypatch.setattr(compiled.tempfile, "tempdir", str(tmp_path))
    library, messages = load(make(tmp_path / "shared", 0o777), monkeypatch)
    assert library.parent == tmp_path / f"deepspeed_compress_kernels_{os.geteuid()}"
    assert len(messages) == 1
    # Another user may have created it first.
    library.parent.chmod(0o777)
    with pytest.raises(OSError, match="only this user can write"):
        load(tmp_path / "shared", monkeypatch)


def test_only_this_user_can_write_a_built_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    former = os.umask(0o002)
    try:
        with monkeypatch.context() as patched:
            from torch.utils import cpp_extension

            patched.setattr(cpp_extension, "load", _fake_build)
            compiled._build(tmp_path / "library.so")
    finally:
        os.umask(former)
    assert (tmp_path / "library.so").stat().st_mode & 0o777 == 0o755


def _fake_build(name: str, sources: list[str], build_directory: str, **options: object) -> None:
    file = Path(build_directory) / f"{name}.so"
    file.write_text(BUILT)
    file.chmod(0o775)
