"""Files of a checkpoint that go into the memory of another host: who sends them, and the process that takes them.

A message is the list of a rank (`files.FileList`), which has the digests of its files, and then the files. The list is
signed by a key that the ranks of the job alone have, so that nobody else is believed, and every file must fit its
digest. The rank's list is written last: what is listed is whole.
"""

import hashlib
import hmac
import json
import os
import socket
import socketserver
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedIOBase
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

from deepspeed_compress.checkpoints.files import FileList, list_file, temporary, write_list
from deepspeed_compress.checkpoints.processes import leave_rank
from deepspeed_compress.errors import StateError

__all__ = ["Destination", "Receiver", "own_address", "send_copies", "write_checked"]

_PATIENCE = 60.0
"""Seconds for which a connection may be silent."""
_GRACE = 5.0
"""Seconds for which the process goes on taking after its rank has died: what the others had kept is on its way."""
_CHUNK = 2**18
_LONGEST = 2**24
"""Bytes of a list."""
_TAKEN = b"taken"


@dataclass(frozen=True)
class Destination:
    """The process that takes copies on the next host. `max_rate`: bytes a second."""

    address: str
    port: int
    key: bytes
    max_rate: float | None = None


def own_address(towards: str) -> str:
    """Under which others reach this host: that of its interface on the way to `towards`, which is not asked."""
    family = socket.getaddrinfo(towards, None, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family[0], socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))
        return str(probe.getsockname()[0])


def send_copies(place: Path, listed: FileList, destination: Destination) -> None:
    """Send the files of `listed`, below the tag directory `place`. Raises OSError, or StateError with what the other
    host says."""
    with socket.create_connection((destination.address, destination.port), timeout=_PATIENCE) as connection:
        begun, sent = time.monotonic(), 0
        with suppress(BrokenPipeError, ConnectionResetError):
            # Whoever stops listening says why.
            for chunk in _message(place, listed, destination.key):
                connection.sendall(chunk)
                sent += len(chunk)
                if destination.max_rate is not None:
                    time.sleep(max(0.0, begun + sent / destination.max_rate - time.monotonic()))
        answer = connection.recv(_CHUNK)
    if answer != _TAKEN:
        said = answer.decode(errors="replace") or "the connection was closed"
        raise StateError(f"host {destination.address} did not take a copy: {said}")


def _message(place: Path, listed: FileList, key: bytes) -> Iterator[bytes]:
    head = json.dumps({"tag": place.name, "list": listed.fields}).encode()
    yield len(head).to_bytes(4, "big") + head + _signature(key, head)
    for name in sorted(listed.files):
        with (place / name).open("rb") as stream:
            while chunk := stream.read(_CHUNK):
                yield chunk


def _signature(key: bytes, head: bytes) -> bytes:
    return hmac.digest(key, head, "sha256")


class Receiver:
    """The process of this host that takes copies of files into `directory`, from the side of the rank that starts it.

    It ends when that rank has, and what is on its way has come.
    """

    def __init__(self, directory: Path, key: bytes) -> None:
        server = _Server(directory, key)
        self.port = int(server.server_address[1])
        theirs, self._connection = Pipe(duplex=False)
        self.process = os.fork()
        if not self.process:
            _serve(server, theirs)
        server.socket.close()
        theirs.close()

    def close(self) -> None:
        """It ends when what is on its way has come."""
        self._connection.send(None)
        self._connection.close()
        os.waitpid(self.process, 0)


class _Server(socketserver.ThreadingTCPServer):
    def __init__(self, directory: Path, key: bytes) -> None:
        super().__init__(("", 0), _Handler, bind_and_activate=False)
        self.directory, self.key = directory, key
        self.socket.close()
        both = socket.has_dualstack_ipv6()
        family = socket.AF_INET6 if both else socket.AF_INET
        self.socket = socket.create_server(("", 0), family=family, dualstack_ipv6=both)
        self.server_address = self.socket.getsockname()


class _Handler(socketserver.StreamRequestHandler):
    server: _Server
    timeout = _PATIENCE

    def handle(self) -> None:
        try:
            _take(self.rfile, self.server)
        except (OSError, StateError, ValueError, KeyError, TypeError) as error:
            with suppress(OSError):
                self.wfile.write(f"{type(error).__name__}: {error}".encode())
            return
        self.wfile.write(_TAKEN)


def _take(stream: BufferedIOBase, server: _Server) -> None:
    """One message. The former list of the rank goes first, as when it replaces files itself."""
    place, listed = _read_head(stream, server)
    place.mkdir(exist_ok=True)
    list_file(place, listed.rank).unlink(missing_ok=True)
    for name, (size, sha256) in sorted(listed.files.items()):
        write_checked(_chunks(stream, size), _inside(place, name), sha256)
    write_list(place, listed)


def _read_head(stream: BufferedIOBase, server: _Server) -> tuple[Path, FileList]:
    size = int.from_bytes(_read(stream, 4), "big")
    if size > _LONGEST:
        raise StateError("this is no list of files")
    head, signature = _read(stream, size), _read(stream, hashlib.sha256().digest_size)
    if not hmac.compare_digest(signature, _signature(server.key, head)):
        raise StateError("the list of files is not of this job")
    found: dict[str, Any] = json.loads(head)
    fields = {key: value for key, value in found["list"].items() if key != "sha256"}
    return _inside(server.directory, found["tag"]), FileList.of(fields)


def _inside(place: Path, name: str) -> Path:
    found = (place / name).resolve()
    if not found.is_relative_to(place.resolve()):
        raise StateError(f"{name} is outside of {place}")
    return found


def _read(stream: BufferedIOBase, size: int) -> bytes:
    found = stream.read(size)
    if len(found) < size:
        raise StateError("the connection was closed")
    return found


def write_checked(chunks: Iterable[bytes], file: Path, sha256: str) -> None:
    """`chunks` become `file`. StateError where that is not their digest."""
    file.parent.mkdir(parents=True, exist_ok=True)
    written, digest = temporary(file), hashlib.sha256()
    with written.open("wb") as target:
        os.fchmod(target.fileno(), 0o600)
        for chunk in chunks:
            digest.update(chunk)
            target.write(chunk)
    if digest.hexdigest() != sha256:
        written.unlink()
        raise StateError(f"{file.name} was damaged on its way")
    os.replace(written, file)


def _chunks(stream: BufferedIOBase, size: int) -> Iterator[bytes]:
    while size:
        chunk = _read(stream, min(size, _CHUNK))
        size -= len(chunk)
        yield chunk


def _serve(server: _Server, connection: Any) -> None:
    """The life of the process; it does not return."""
    code = 1
    try:
        leave_rank({connection.fileno(), server.fileno()})
        threading.Thread(target=_end_with_rank, args=(server, connection), daemon=True).start()
        server.serve_forever(poll_interval=1.0)
        server.server_close()
        code = 0
    finally:
        os._exit(code)


def _end_with_rank(server: _Server, connection: Any) -> None:
    try:
        connection.recv()
    except EOFError:
        # It was killed.
        time.sleep(_GRACE)
    server.shutdown()
