"""Sources of the secret, and files that are refused."""

import ast
import os
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.transport.credentials import (
    SECRET,
    SECRET_FILE,
    TLS_AUTHORITY,
    TLS_CERTIFICATE,
    find_secret,
    pass_on,
)
from tests.support.transport import make_certificates


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv(SECRET_FILE, raising=False)
    return tmp_path


def write(file: Path, text: str = "0123456789abcdef", mode: int = 0o600) -> Path:
    file.write_text(text)
    file.chmod(mode)
    return file


def test_the_first_process_creates_the_file_and_all_others_find_it(home: Path) -> None:
    found = find_secret()
    file = home / ".deepspeed_compress" / "secret"
    assert len(found.key) == 64
    assert found.source == str(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert find_secret() == found
    assert [one.name for one in file.parent.iterdir()] == ["secret"]


def test_the_variable_has_priority_over_the_file(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(write(home / "other", "fedcba9876543210\n")))
    assert find_secret().key == b"fedcba9876543210"
    monkeypatch.setenv(SECRET, " 00112233445566778899 ")
    assert find_secret().key == b"00112233445566778899"
    assert not (home / ".deepspeed_compress").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o610])
def test_a_file_that_other_users_can_access_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch, mode: int) -> None:
    monkeypatch.setenv(SECRET_FILE, str(write(home / "file", mode=mode)))
    with pytest.raises(ConfigError, match=rf"other users can access the secret \(mode 0{mode:o}\); run `chmod 600"):
        find_secret()


@pytest.mark.parametrize("text", ["", "\n", "short"])
def test_a_short_secret_is_refused_in_a_file_and_a_variable(
    home: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv(SECRET_FILE, str(write(home / "file", text)))
    with pytest.raises(ConfigError, match=r"allowed: at least 16"):
        find_secret()
    monkeypatch.setenv(SECRET, text)
    with pytest.raises(ConfigError, match=f"{SECRET}: the secret has"):
        find_secret()


def test_a_named_file_that_is_missing_is_not_created(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(home / "missing"))
    with pytest.raises(ConfigError, match="cannot be read"):
        find_secret()
    assert list(home.iterdir()) == []


def test_an_unwritable_home_directory_is_an_error(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/proc/self")
    with pytest.raises(ConfigError, match=f"cannot be created .* set {SECRET}"):
        find_secret()
    environment: dict[str, str] = {}
    pass_on(environment)
    assert environment == {}, "only a program that needs the secret fails"


def test_child_processes_get_the_path_instead_of_the_secret(home: Path) -> None:
    environment = {"HOME": str(home)}
    pass_on(environment)
    assert environment[SECRET_FILE] == str(home / ".deepspeed_compress" / "secret")
    assert find_secret().key.decode() not in environment.values()
    chosen = {SECRET: "0011223344556677"}
    pass_on(chosen)
    assert chosen == {SECRET: "0011223344556677"}


def test_concurrent_threads_create_one_secret(home: Path) -> None:
    found: list[bytes] = []
    threads = [threading.Thread(target=lambda: found.append(find_secret().key)) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 16
    assert len(set(found)) == 1


def test_the_repr_hides_the_secret(home: Path) -> None:
    assert find_secret().key.decode() not in repr(find_secret())


PROGRAM = """
import os
print({name: os.environ.get(name) for name in sorted(os.environ) if name.startswith("DS_COMPRESS_")})
"""


def test_run_passes_the_path_and_certificates_to_its_program(home: Path) -> None:
    program, files = home / "program.py", make_certificates(home)
    program.write_text(PROGRAM)
    options = ["--launcher", "none", "--tls-certificate", files["member"], "--tls-authority", files["authority"]]
    done = subprocess.run(
        [sys.executable, "-m", "deepspeed_compress.cli", "run", *options, str(program)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    shown = ast.literal_eval(done.stdout.splitlines()[-1])
    assert shown[SECRET_FILE] == str(home / ".deepspeed_compress" / "secret")
    assert SECRET not in shown
    assert (shown[TLS_CERTIFICATE], shown[TLS_AUTHORITY]) == (files["member"], files["authority"])
