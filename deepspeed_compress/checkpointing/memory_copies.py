"""Copies of checkpoint files in the memory of another host: the sending side, and the process that receives them.

Connections use `transport`, with a secret that only the ranks of the job know. A message consists of the list of a rank
(`FileList`), which has the digests of its files, and the files themselves. Every file must match its digest. The rank's
list is written last, so its presence means that the files are complete.

When a rank ends, it waits for copies in progress, but not for long.
"""

import hashlib
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from deepspeed_compress.checkpointing.completeness import FileList, unfinished, write_list
from deepspeed_compress.checkpointing.processes import fork_from_rank, wait_for
from deepspeed_compress.errors import StateError
from deepspeed_compress.safe_files import open_regular, replacing, temporary
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import LARGE_HEAD, Connection, Limits
from deepspeed_compress.transport.credentials import Credentials, Secret, find_tls
from deepspeed_compress.transport.errors import AuthenticationError
from deepspeed_compress.transport.messages import Fields, Messages
from deepspeed_compress.transport.server import Bounds, Server

COPIES = "copies"
"""Name of the service."""
_PATIENCE = 60.0
"""Maximum number of seconds for which a connection may be silent."""
_GRACE = 5.0
"""Seconds for which the process keeps receiving after its rank has died, for copies that are already in progress."""
_CHUNK = 1 << 18
_MOST = 1 << 50
"""Maximum number of bytes of the files of a rank."""
_CONNECTIONS = 256
"""Maximum number of connections: enough for all ranks of the sending host."""
DRAIN = 10.0
"""Maximum number of seconds for which shutdown waits for copies."""


class _Copy(Fields):
    tag: Annotated[str, Field(min_length=1, max_length=1000)]
    list: dict[str, Any]


_MESSAGES = Messages({"copy": _Copy})


@dataclass(frozen=True)
class Destination:
    """The process that receives copies on the next host.

    Attributes:
        address: host.
        port: port.
        key: secret of the job.
        max_rate: bytes per second; None for no limit.
    """

    address: str
    port: int
    key: bytes
    max_rate: float | None = None


def send_copies(place: Path, listed: FileList, destination: Destination) -> None:
    """Send the files of `listed` in the tag directory `place` to `destination`.

    Raises:
        OSError: the connection fails.
        StateError: the other host refuses the files, or one of them has changed.
    """
    host = f"[{destination.address}]" if ":" in destination.address else destination.address
    try:
        credentials, limits = _credentials(destination.key), Limits(patience=_PATIENCE)
        with connect(f"{host}:{destination.port}", COPIES, credentials, limits=limits) as connection:
            answer = _sent(connection, place, listed, _paced(place, listed, destination.max_rate))
    except AuthenticationError as error:
        raise StateError(f"host {destination.address} receives the copies of another job") from error
    if answer.get("kind") != "taken":
        raise StateError(f"host {destination.address} did not accept a copy: {answer.get('why')}")


def _sent(connection: Connection, place: Path, listed: FileList, pieces: Iterator[bytes]) -> Mapping[str, Any]:
    size = sum(size for size, _ in listed.files.values())
    try:
        connection.send_pieces({"kind": "copy", "tag": place.name, "list": listed.fields}, size, pieces)
    except ValueError as error:
        raise StateError(f"the files of {place} have changed since they were listed") from error
    answer = connection.receive(_PATIENCE)
    if answer is None:
        raise TimeoutError(f"{connection.peer} has not answered for {_PATIENCE:g} s")
    return answer


def _paced(place: Path, listed: FileList, rate: float | None) -> Iterator[bytes]:
    """Yield the content of the files at `rate` bytes per second."""
    begun, sent, chunk = time.monotonic(), 0, _CHUNK if rate is None else max(1, min(_CHUNK, int(rate)))
    for name in sorted(listed.files):
        with open_regular(place / name) as stream:
            while piece := stream.read(chunk):
                yield piece
                sent += len(piece)
                if rate is not None:
                    time.sleep(max(0.0, begun + sent / rate - time.monotonic()))


def _credentials(key: bytes) -> Credentials:
    return Credentials(Secret(key, "the key of this job"), find_tls())


class Receiver:
    """Handle of this host's process that receives copies into `directory`, used by the rank that starts it.

    The process ends after that rank has ended and copies in progress have arrived, or have taken too long.
    """

    def __init__(self, directory: Path, key: bytes) -> None:
        taker = _Taker(directory, key)
        self.port = taker.server.port
        theirs, self._connection = Pipe(duplex=False)
        kept = {theirs.fileno(), *taker.server.descriptors}
        self.process = fork_from_rank(partial(taker.run, theirs), kept)
        taker.server.close()
        theirs.close()

    def close(self) -> None:
        """End the process, after copies in progress have arrived."""
        # It may have been killed.
        with suppress(OSError):
            self._connection.send(None)
        self._connection.close()
        wait_for(self.process)


class _Taker:
    """The receiving process: serves connections until its rank ends."""

    def __init__(self, directory: Path, key: bytes) -> None:
        self._directory = directory
        limits, bounds = Limits(head=LARGE_HEAD, patience=_PATIENCE), Bounds(_CONNECTIONS)
        self.server = Server(COPIES, self._serve, "", 0, _credentials(key), limits, bounds)

    def run(self, rank: Any) -> None:
        """Serve until the rank at the other end of a pipe ends. This is all that the receiving process does."""
        threading.Thread(target=self._end_with, args=(rank,), daemon=True).start()
        self.server.run()

    def _end_with(self, rank: Any) -> None:
        """End the server when the rank at the other end of a pipe ends or sends a message."""
        try:
            rank.recv()
        except EOFError:
            # The rank was killed.
            time.sleep(_GRACE)
        self.server.stop(DRAIN)

    def _serve(self, connection: Connection) -> None:
        head, answer = connection.receive(_PATIENCE, _MOST), {"kind": "taken"}
        if head is None:
            return
        try:
            self._take(head, connection)
        except (OSError, StateError, ValueError, KeyError, TypeError, AttributeError) as error:
            # The sender reads the answer only after it has sent everything.
            for _ in connection.pieces():
                pass
            answer = {"kind": "refused", "why": f"{type(error).__name__}: {error}"[:1000]}
        connection.send(answer)

    def _take(self, head: Mapping[str, Any], connection: Connection) -> None:
        """Write the files of one message. Their list says first that they are unfinished, as on the rank's own host."""
        place, listed = self._read_head(head, connection.left)
        place.mkdir(exist_ok=True)
        write_list(place, unfinished(listed))
        for name, (size, sha256) in sorted(listed.files.items()):
            # A list has only names below its directory.
            write_checked(_chunks(connection, size), place / name, sha256)
        write_list(place, listed)

    def _read_head(self, head: Mapping[str, Any], left: int) -> tuple[Path, FileList]:
        _MESSAGES.read(head)
        listed = FileList(**{key: value for key, value in head["list"].items() if key != "sha256"})
        if sum(size for size, _ in listed.files.values()) != left:
            raise StateError(f"the files have {left} bytes, but the list says otherwise")
        if head["tag"] == ".." or Path(head["tag"]).name != head["tag"]:
            raise StateError(f"{head['tag']} is outside of {self._directory}")
        return self._directory / head["tag"], listed


def _chunks(connection: Connection, size: int) -> Iterator[memoryview]:
    """Yield the next `size` bytes of the body. The memory of a chunk is reused."""
    memory = memoryview(bytearray(min(size, _CHUNK)))
    while size:
        chunk = memory[:size]
        connection.read_into(chunk)
        size -= len(chunk)
        yield chunk


def write_checked(chunks: Iterable[bytes | memoryview], file: Path, sha256: str) -> None:
    """Write `chunks` to `file`.

    Raises:
        StateError: `sha256` is not their digest. Nothing is left of them.
    """
    file.parent.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    with replacing(file, temporary(file), private=True) as target:
        for chunk in chunks:
            digest.update(chunk)
            target.write(chunk)
        if digest.hexdigest() != sha256:
            raise StateError(f"{file.name} was damaged in transit")
