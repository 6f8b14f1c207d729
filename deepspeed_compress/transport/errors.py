"""Errors of one connection. All are OSErrors: whoever handles a lost connection handles these too."""

__all__ = ["AuthenticationError", "ConnectionClosedError", "OtherServiceError", "ProtocolError", "ServerBusyError"]


class ConnectionClosedError(ConnectionError):
    """The connection was closed between two frames, by either side."""


class ProtocolError(ConnectionError):
    """The other side sent something that is not allowed. The connection cannot be used any more."""


class AuthenticationError(ConnectionError):
    """The other side does not know the secret, or does not accept ours. Trying again does not help."""


class OtherServiceError(ProtocolError):
    """An authenticated server runs another service than the client asked for.

    Args:
        service: name of the service that the server runs.
    """

    def __init__(self, service: str, wanted: str) -> None:
        super().__init__(f"the server is a {service}, not a {wanted}")
        self.service = service


class ServerBusyError(ConnectionError):
    """The server has as many connections as it allows. Try again later."""
