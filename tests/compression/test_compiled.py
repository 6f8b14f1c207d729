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
