"""The parameter server at a port. A body is read only after its head was checked, and is as long as that allows.

An island sends `enter` (a new one), `resume` (from a checkpoint), `leave`; and, each rank its part, `fresh` (the anchor
as it is), `seed` (weights that nobody has trained yet) and `push`. The server answers `welcome`, `left`, `resumed`,
`newest`, `untrained`, `found` (there is no anchor), `exact`, `taken`, `dropped` and `refused`. A call is numbered by
its island, so it may be sent twice.
"""

from collections.abc import Callable

from deepspeed_compress.services.parameter_server.client import PARAMETER_SERVER
from deepspeed_compress.services.parameter_server.membership import DEFAULT_ROOM, Room
from deepspeed_compress.services.parameter_server.push_log import PushLog
from deepspeed_compress.services.parameter_server.service import Service
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.frames import Limits
from deepspeed_compress.transport.notices import ignore
from deepspeed_compress.transport.server import DEFAULT_BOUNDS, Bounds
from deepspeed_compress.transport.server import Server as TransportServer

__all__ = ["LIMITS", "Server"]

LIMITS = Limits(head=1 << 24)
"""Heads have the names and shapes of all parameters; bodies are bounded by what the service expects."""


class Server:
    """Serves a `Service` at `host`:`port`, 0 for a free one.

    Args:
        log: by which it outlives this process; None keeps it in memory alone.
        told: gets lines for people now and then.
        room: for islands.
        credentials: of this side; None: those that the environment and the user's files name.
        bounds: on the number of connections.

    Raises:
        ConfigError: if there are no credentials.
        OSError: if the address cannot be had.
        StateError: if the files of `log` are damaged.
    """

    def __init__(
        self,
        log: PushLog | None,
        host: str,
        port: int,
        told: Callable[[str], None] = ignore,
        room: Room = DEFAULT_ROOM,
        credentials: Credentials | None = None,
        bounds: Bounds = DEFAULT_BOUNDS,
    ) -> None:
        own = credentials or Credentials.find()
        self._server = TransportServer(PARAMETER_SERVER, self._serve, host, port, own, LIMITS, bounds, told)
        self.port = self._server.port
        try:
            self.service = Service(log, told, room)
        except BaseException:
            self._server.close()
            raise

    def run(self, ready: Callable[[], None] = lambda: None) -> None:
        """Serve until `stop`. `ready` is called when islands can connect."""
        try:
            self._server.run(ready)
        finally:
            self.service.close()

    def stop(self) -> None:
        """End `run`. From any thread, and from a signal handler; waits for nobody."""
        self._server.stop()

    def _serve(self, connection: Connection) -> None:
        """Answer one rank, until its connection ends."""
        try:
            while (head := connection.receive(body=self.service.largest_body)) is not None:
                refused = self.service.refusal(head, connection.left)
                connection.send(*(refused or self.service.hear(head, connection.read_body(), connection)))
        finally:
            self.service.gone(connection)
