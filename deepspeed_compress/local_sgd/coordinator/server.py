"""Server of a coordinator, and the file from which it resumes."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.local_sgd.coordinator.coordinator import Coordinator
from deepspeed_compress.local_sgd.coordinator.messages import COORDINATOR, FROM_ISLANDS
from deepspeed_compress.local_sgd.coordinator.records import Saved
from deepspeed_compress.safe_files import lock, open_own
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.machine_server import MachineServer, Service
from deepspeed_compress.transport.rate_limited_log import ignore


def lock_file(path: Path) -> TextIO:
    """Lock the file `path` until the returned lock file is closed. Its directory is created.

    Raises:
        ConfigError: if another process holds it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path.with_suffix(path.suffix + ".lock"), "w", opener=open_own)  # noqa: SIM115  (held by the caller)
    try:
        lock(file, waits=False)
    except BlockingIOError as error:
        file.close()
        raise ConfigError(
            f"--state {path}: another coordinator uses this file; stop it, or give another file"
        ) from error
    return file


def rename_durably(temporary: Path, path: Path) -> None:
    """Rename `temporary`, which is on disk, to `path`, in a way that survives a power failure."""
    # First, because it fails if there are too many descriptors, and nothing must have changed then.
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.replace(temporary, path)
        os.fsync(directory)
    finally:
        os.close(directory)


class StateFile:
    """File in which a coordinator keeps `Saved`. Only one coordinator may hold it.

    Raises:
        ConfigError: if another coordinator holds it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, lock_file(path)

    def read(self) -> Saved | None:
        """Return the state that the last coordinator left; None if there is none.

        Raises:
            StateError: if it is damaged.
        """
        try:
            return Saved(**json.loads(self._path.read_text(encoding="utf-8")))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError) as error:
            self.close()
            raise StateError(
                f"--state {self._path}: the file is damaged, or was not written by a coordinator ({error!r}); give "
                "another file"
            ) from error

    def write(self, text: str) -> None:
        """Write `text`. It is on disk when this returns, as a whole or not at all."""
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        temporary.unlink(missing_ok=True)
        with temporary.open("x", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        rename_durably(temporary, self._path)

    def close(self) -> None:
        """Release the file for another coordinator."""
        self._lock.close()


def island_server(
    file: StateFile | None, host: str, port: int, report: Callable[[str], None] = ignore
) -> MachineServer:
    """Return a server for a coordinator of islands, which continues from the state in `file`, if any."""
    saved = file.read() if file is not None else None
    machine = Coordinator(saved or Saved(), came_back=saved is not None)
    service = Service(COORDINATOR, "island", FROM_ISLANDS, frozenset({"forget"}))
    return MachineServer(service, machine, file, host, port, report, Credentials.find())
