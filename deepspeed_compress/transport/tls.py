"""Mutual TLS, in which both sides show a certificate of one authority. Optional, and always with the shared secret.

Names in certificates are not compared with the address: islands and agents are reached by addresses that change, and an
authority that signs for nothing else is proof enough. So use your own authority, not a public one.
"""

import os
import ssl
from collections.abc import MutableMapping
from dataclasses import dataclass

from deepspeed_compress.errors import ConfigError

TLS_CERTIFICATE = "DS_COMPRESS_TLS_CERTIFICATE"
"""Environment variable with the path of a PEM file: the certificate of this side, and its key without a password."""
TLS_AUTHORITY = "DS_COMPRESS_TLS_AUTHORITY"
"""Environment variable with the path of a PEM file: the authority that has signed the certificates of both sides."""


@dataclass(frozen=True)
class Tls:
    """TLS contexts of both sides. Build one with `Tls.load`."""

    client: ssl.SSLContext
    server: ssl.SSLContext

    @classmethod
    def load(cls, certificate: str, authority: str) -> "Tls":
        """Return the contexts for two PEM files. Raises ConfigError if one of them cannot be used."""
        return cls(
            _context(ssl.PROTOCOL_TLS_CLIENT, certificate, authority),
            _context(ssl.PROTOCOL_TLS_SERVER, certificate, authority),
        )


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
        raise ConfigError(f"{missing[0]}: is not set (allowed: both {TLS_CERTIFICATE} and {TLS_AUTHORITY}, or neither)")
    return Tls.load(files[TLS_CERTIFICATE], files[TLS_AUTHORITY])


def set_tls(environment: MutableMapping[str, str], certificate: str | None, authority: str | None) -> None:
    """Write the two options of a command to `environment`, from which this process and its children read them.

    Raises:
        ConfigError: if only one is given.
    """
    if (certificate is None) != (authority is None):
        missing = "--tls-certificate" if certificate is None else "--tls-authority"
        raise ConfigError(f"{missing}: is missing (allowed: both --tls-certificate and --tls-authority, or neither)")
    if certificate is not None and authority is not None:
        environment[TLS_CERTIFICATE] = os.path.abspath(certificate)
        environment[TLS_AUTHORITY] = os.path.abspath(authority)


def _context(protocol: int, certificate: str, authority: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(certificate, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{TLS_CERTIFICATE}={certificate}: {error} (allowed: a PEM file with a certificate and its key, without a "
            "password)"
        ) from error
    try:
        context.load_verify_locations(authority)
    except OSError as error:
        raise ConfigError(
            f"{TLS_AUTHORITY}={authority}: {error} (allowed: a PEM file with the certificate of the authority)"
        ) from error
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")
