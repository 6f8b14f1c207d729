"""Credentials of one side: the shared secret, and TLS if it is configured."""

import secrets
from dataclasses import dataclass

from deepspeed_compress.transport.secret import Secret, find_secret
from deepspeed_compress.transport.tls import Tls, find_tls


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
