"""Credentials of one side: the secret that all processes of a user share, and TLS if it is configured.

Like Erlang's cookie, the secret is a file in the home directory that the first process creates. If hosts share home
directories, nothing needs to be done; otherwise, users copy the file or set a variable.

TLS is mutual: both sides show a certificate of one authority. Names in certificates are not compared with the address,
since islands and agents are reached by addresses that change, and an authority that signs for nothing else is proof
enough. So use your own authority, not a public one.
"""

import contextlib
import os
import secrets
import ssl
import stat
from collections.abc import MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

from deepspeed_compress.errors import ConfigError

SECRET = "DS_COMPRESS_SECRET"
"""Environment variable that holds the secret itself."""
SECRET_FILE = "DS_COMPRESS_SECRET_FILE"
"""Environment variable with the path of the file that holds the secret."""
SHORTEST = 16
"""Minimum number of characters of a secret."""
_LONGEST = 4096
_OTHER_USERS = stat.S_IRWXG | stat.S_IRWXO
TLS_CERTIFICATE = "DS_COMPRESS_TLS_CERTIFICATE"
"""Environment variable with the path of a PEM file: the certificate of this side, and its key without a password."""
TLS_AUTHORITY = "DS_COMPRESS_TLS_AUTHORITY"
"""Environment variable with the path of a PEM file: the authority that has signed the certificates of both sides."""


@dataclass(frozen=True)
class Secret:
    """Shared secret. `source` names the variable or file from which it was read, for messages."""

    key: bytes = field(repr=False)
    source: str


def default_file() -> Path:
    """Return the path of this user's secret file, which need not exist."""
    try:
        return Path.home() / ".deepspeed_compress" / "secret"
    except RuntimeError as error:
        raise ConfigError(f"{SECRET_FILE}: this user has no home directory ({error}); set it or {SECRET}") from error


def find_secret(given: Path | None = None) -> Secret:
    """Return the secret: `DS_COMPRESS_SECRET`, else the file `DS_COMPRESS_SECRET_FILE`, else the user's own file.

    The user's own file is created if it does not exist.

    Args:
        given: file that is read instead, if it is not None.

    Raises:
        ConfigError: if the secret is too short, or its file cannot be read, or other users can read it.
    """
    text = os.environ.get(SECRET)
    if text is not None and given is None:
        return Secret(_checked(text, SECRET), SECRET)
    named = given or os.environ.get(SECRET_FILE)
    file = Path(named) if named else default_file()
    if not named:
        _create(file)
    return Secret(_checked(_read(file), str(file)), str(file))


def pass_on(environment: MutableMapping[str, str]) -> None:
    """Name the file of the secret in `environment`, for child processes, and create it if it does not exist.

    Do nothing if there is no usable file: a child that needs the secret raises the ConfigError that says why.
    """
    if SECRET in environment or SECRET_FILE in environment:
        return
    with contextlib.suppress(ConfigError):
        environment[SECRET_FILE] = find_secret().source


def _checked(text: str, source: str) -> bytes:
    text = text.strip()
    if len(text) < SHORTEST:
        raise ConfigError(
            f"{source}: the secret has {len(text)} characters (allowed: at least {SHORTEST}); "
            "create one with `openssl rand -hex 32`"
        )
    return text.encode("utf-8", "surrogateescape")


def _read(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="surrogateescape") as stream:
            mode = stat.S_IMODE(os.fstat(stream.fileno()).st_mode)
            if mode & _OTHER_USERS:
                raise ConfigError(
                    f"{file}: other users can access the secret (mode {mode:04o}); run `chmod 600 {file}`"
                )
            return stream.read(_LONGEST)
    except OSError as error:
        raise ConfigError(
            f"{file}: the secret cannot be read ({error.strerror}); copy the file from the host that has it, or set "
            f"{SECRET} or {SECRET_FILE}"
        ) from error


def _create(file: Path) -> None:
    """Create `file` with a random secret unless it exists. Others see the whole secret or no file."""
    if file.exists():
        return
    temporary = file.with_name(f"{file.name}.{secrets.token_hex(8)}")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            with os.fdopen(descriptor, "w") as stream:
                stream.write(secrets.token_hex(32) + "\n")
            # A link, unlike a rename, fails if another process was first.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, file)
        finally:
            temporary.unlink()
    except OSError as error:
        raise ConfigError(
            f"{file}: the secret cannot be created ({error.strerror}); set {SECRET}, or set {SECRET_FILE} to the path "
            "of a file with mode 0600"
        ) from error


class Tls:
    """TLS contexts of both sides, for two PEM files. Raises ConfigError if one of them cannot be used."""

    def __init__(self, certificate: str, authority: str) -> None:
        self.client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, authority)
        self.server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, authority)


def find_tls() -> Tls | None:
    """Return the contexts of the files that the environment names; None if it names neither.

    Raises:
        ConfigError: if only one is named, or one cannot be used.
    """
    files = {name: os.environ.get(name, "") for name in (TLS_CERTIFICATE, TLS_AUTHORITY)}
    missing = [name for name, file in files.items() if not file]
    if len(missing) == 2:
        return None
    if missing:
        raise ConfigError(
            f"{missing[0]}: is not set (allowed: both {TLS_CERTIFICATE} and {TLS_AUTHORITY}, or neither); pass "
            "--tls-certificate and --tls-authority"
        )
    return Tls(files[TLS_CERTIFICATE], files[TLS_AUTHORITY])


def set_tls(environment: MutableMapping[str, str], certificate: str | None, authority: str | None) -> None:
    """Write two options of a command to `environment`, from which this process and its children read them."""
    for name, file in ((TLS_CERTIFICATE, certificate), (TLS_AUTHORITY, authority)):
        if file is not None:
            environment[name] = os.path.abspath(file)


def _context(protocol: int, certificate: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, password=_no_password)
        context.load_verify_locations(authority)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{TLS_CERTIFICATE}={certificate}, {TLS_AUTHORITY}={authority}: {error} (allowed: two PEM files: a "
            "certificate and its key without a password, and the certificate of the authority)"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


@dataclass(frozen=True)
class Credentials:
    """Secret of this user, and TLS contexts of this side (None without TLS)."""

    secret: Secret
    tls: Tls | None = None

    @classmethod
    def find(cls) -> "Credentials":
        """Return the credentials that the environment and the user's files name.

        Raises ConfigError if they are unusable.
        """
        return cls(find_secret(), find_tls())

    @classmethod
    def of_this_process(cls) -> "Credentials":
        """Return credentials that no other process has, for a server whose clients are in the same process."""
        return cls(Secret(secrets.token_hex(32).encode(), "this process"))
