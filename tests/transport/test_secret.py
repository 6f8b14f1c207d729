"""Sources of the secret, and files that are refused."""

import stat
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.transport.credentials import (
    SECRET,
    SECRET_FILE,
    find_secret,
    pass_on,
)


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


def test_a_file_of_another_user_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET_FILE, str(write(home / "file")))
    monkeypatch.setattr("os.geteuid", lambda: 12345)
    with pytest.raises(ConfigError, match=r"belongs to user \d+, not to this user \(12345\)"):
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
