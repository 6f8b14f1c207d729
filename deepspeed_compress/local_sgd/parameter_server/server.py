"""Parameter server at a port. A body is read only after its head was checked, and only as long as that allows.

An island sends `enter` (a new island), `resume` (from a checkpoint), and `leave`. Each of its ranks sends its part of
`fresh` (request the whole anchor), `seed` (weights that have not been trained yet) and `push`. The server answers
`welcome`, `left`, `resumed`, `newest`, `untrained`, `found` (there is no anchor), `exact`, `taken`, `dropped`,
`again` (it has lost calls in a crash) and `refused`. Calls are numbered by their island, so they may be sent twice.
"""

from collections.abc import Callable

from deepspeed_compress.local_sgd.parameter_server.client import PARAMETER_SERVER
from deepspeed_compress.local_sgd.parameter_server.service import DEFAULT_ROOM, Room, Service
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.transport.connection import Connection
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.limits import LARGE_HEAD, Limits
from deepspeed_compress.transport.rate_limited_log import ignore
from deepspeed_compress.transport.server import Server as TransportServer

LIMITS = Limits(head=LARGE_HEAD)
"""Heads hold the names and shapes of all parameters; bodies are bounded by what the service expects."""


class Server:
    """Server of a `Service` at `host`:`port`; port 0 selects a free one.

    Args:
        file: file of the state; None keeps it in memory only.
        host: address to listen at.
        port: port to listen at.
        report: receives log lines.
        room: limit on the number of islands.

    Raises:
        ConfigError: if there are no credentials.
        OSError: if the address is not available.
        StateError: if `file` is damaged.
    """

    def __init__(
        self,
        file: Snapshot | None,
        host: str,
        port: int,
        report: Callable[[str], None] = ignore,
        room: Room = DEFAULT_ROOM,
    ) -> None:
        credentials = Credentials.find()
        self._server = TransportServer(PARAMETER_SERVER, self._serve, host, port, credentials, LIMITS, log=report)
        self.port = self._server.port
        try:
            self.service = Service(file, report, room)
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
        """End `run`. It may be called from any thread or signal handler, and does not block."""
        self._server.stop()

    def _serve(self, connection: Connection) -> None:
        """Answer one rank until its connection ends."""
        try:
            while (head := connection.receive(body=self.service.largest_body)) is not None:
                refused = self.service.refusal(head, connection.left)
                connection.send(*(refused or self.service.handle(head, connection.read_body(), connection)))
        finally:
            self.service.disconnect(connection)
