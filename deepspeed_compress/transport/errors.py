"""Errors of one connection. All are OSErrors, so code that handles a lost connection handles these too."""


class ConnectionClosedError(ConnectionError):
    """Close of the connection between two frames, by either side."""


class ProtocolError(ConnectionError):
    """Violation of the protocol by the other side. The connection cannot be used any more."""


class AuthenticationError(ConnectionError):
    """Failed authentication: one side does not accept the other's proof. Trying again does not help."""


class OtherServiceError(ProtocolError):
    """Authenticated server that runs another service than the client asked for.

    Args:
        service: name of the service that the server runs.
        wanted: name of the service that the client asked for.
    """

    def __init__(self, service: str, wanted: str) -> None:
        super().__init__(f"the server is a {service}, not a {wanted}")
        self.service = service


class ServerBusyError(ConnectionError):
    """Server that has reached its maximum number of connections. Try again later."""


class MessageError(ProtocolError, ValueError):
    """Message that the other side may not send."""
