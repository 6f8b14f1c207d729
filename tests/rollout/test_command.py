"""`ds-compress rollout`: a store that clients with the secret use, and an export of its versions."""

import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepspeed_compress.cli import main
from deepspeed_compress.rollout import DirectoryStore, Publisher
from deepspeed_compress.rollout.served_store import ServedStore
from deepspeed_compress.transport.credentials import SECRET
from tests.support.leftovers import own_port
from tests.support.transport import CREDENTIALS


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.touch(0o600)
    file.write_bytes(CREDENTIALS.secret.key)
    return file


@pytest.fixture
def _handlers() -> Iterator[None]:
    """Restore the signal handlers that the command replaces. Until then, SIGTERM does not end this process."""
    before = {number: signal.signal(number, lambda *_: None) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def serve(directory: Path, *options: str) -> int:
    return main(["rollout", "serve", "--directory", str(directory), *options])


@pytest.mark.usefixtures("_handlers")
@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", socket.gethostname())])
def test_the_command_serves_until_stopped(
    host: str,
    shown: str,
    tmp_path: Path,
    secret_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv(SECRET, "a secret that the option replaces")
    answers: list[bytes] = []

    def use(port: int) -> None:
        try:
            with closing(ServedStore(f"tcp://127.0.0.1:{port}", CREDENTIALS)) as store:
                store.put("a", b"1")
                answers.append(store.get("a"))
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    directory = tmp_path / "weights"
    with own_port() as port:
        thread = threading.Thread(target=use, args=(port,))
        thread.start()
        assert serve(directory, "--port", str(port), "--host", host, "--secret-file", str(secret_file)) == 0
        thread.join()
    assert answers == [(directory / "a").read_bytes()] == [b"1"]
    expected = f"{directory} is served at tcp://{shown}:{port}; the secret is from {secret_file}\n"
    assert capsys.readouterr().out == expected


@pytest.mark.parametrize(
    ("text", "mode", "problem"),
    [
        (None, 0o600, "the secret cannot be read"),
        ("short", 0o600, "the secret has 5 characters"),
        ("a" * 20, 0o644, "other users can access the secret"),
    ],
)
def test_the_command_needs_a_secret(
    text: str | None, mode: int, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "secret"
    if text is not None:
        file.write_text(text)
        file.chmod(mode)
    assert serve(tmp_path / "weights", "--port", "0", "--secret-file", str(file)) == 1
    assert capsys.readouterr().err.startswith(f"ds-compress: error: {file}: {problem}")


def export_until(file: Path, *options: str) -> int:
    """Run the command until a file is there, and return its exit code."""

    def stop() -> None:
        until = time.monotonic() + 100
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=stop)
    thread.start()
    code = main(["rollout", "export", *options])
    thread.join()
    return code


@pytest.mark.usefixtures("_handlers")
def test_the_command_exports_until_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, versions = torch.nn.Linear(2, 2, dtype=torch.bfloat16), tmp_path / "versions"
    Publisher(model, DirectoryStore(tmp_path)).publish()
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    options = ["--store", str(tmp_path), "--directory", str(versions), "--model", str(tmp_path)]
    assert export_until(versions / "weight_v000001", *options) == 0
    assert capsys.readouterr().out == f"version 1 is in {versions}\n"
    assert load_file(versions / "weight_v000001" / "model.safetensors")["weight"].equal(model.weight)


@pytest.mark.usefixtures("_handlers")
def test_the_command_exports_adapters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    peft = pytest.importorskip("peft")
    model, store, versions = torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "store", tmp_path / "versions"
    model = peft.get_peft_model(model, peft.LoraConfig(r=1, target_modules=["0"]))
    Publisher(model, DirectoryStore(store), dtype="fp32", adapters="alone").publish()
    place = versions / "adapter_v000001"
    assert export_until(place, "--store", str(store), "--directory", str(versions)) == 0
    assert capsys.readouterr().out == f"version 1 is in {versions}\n"
    found = load_file(place / "adapter_model.safetensors")
    assert found["base_model.model.0.lora_A.weight"].equal(model.base_model.model[0].lora_A["default"].weight)
