"""The cache of the compiled kernels."""

from pathlib import Path

import pytest

from deepspeed_compress.compression.kernels import compiled

BUILT = "built for this test"


@pytest.mark.parametrize("named", [True, False])
def test_a_library_is_built_once_among_the_extensions_of_torch(
    named: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = tmp_path / "extensions" if named else tmp_path / ".cache" / "torch_extensions"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
    if named:
        monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(directory))
    monkeypatch.setattr(compiled, "_build", lambda path: path.write_text(BUILT))
    monkeypatch.setattr(compiled.ctypes, "CDLL", lambda path: Path(path))
    for content in (BUILT, "as it was"):
        library = compiled.load_library()
        assert (library.parent, library.read_text()) == (directory, content)
        library.write_text("as it was")


def build_with_group_rights(name: str, sources: list[str], build_directory: str, **options: object) -> None:
    """Leave a library as a compiler with the umask 002 does."""
    file = Path(build_directory) / f"{name}.so"
    file.write_text(BUILT)
    file.chmod(0o775)


def test_only_this_user_can_write_a_built_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils.cpp_extension.load", build_with_group_rights)
    compiled._build(tmp_path / "library.so")
    assert (tmp_path / "library.so").stat().st_mode & 0o777 == 0o755
