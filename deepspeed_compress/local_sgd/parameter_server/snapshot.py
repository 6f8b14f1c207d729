"""Persistent state of a parameter server: a safetensors file with its tensors and records.

The file is replaced as a whole, when an island enters or resumes, now and then after other calls, and at the end. After
a crash the server continues from it, and asks islands for the calls that it had answered since.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.coordinator.server import lock_file, rename_durably
from deepspeed_compress.local_sgd.parameter_server.records import Records
from deepspeed_compress.local_sgd.parameter_server.store import Store

_RECORDS = "records"
_DAMAGE = (OSError, SafetensorError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class Snapshot:
    """File `path`, which only one server may hold.

    Raises:
        ConfigError: if another server holds the file.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, lock_file(path)

    def read(self) -> Store | None:
        """Return the store that was written last; None if there is none.

        Raises:
            StateError: if the file is damaged or does not belong to a parameter server.
        """
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, framework="pt") as file:
                records = Records.read(json.loads(file.metadata()[_RECORDS]))
                return Store(records, {name: file.get_tensor(name) for name in file.keys()})  # noqa: SIM118  (no dict)
        except _DAMAGE as error:
            self.close()
            raise StateError(
                f"{self._path} is damaged or does not belong to a parameter server ({error!r}); restore it, or give "
                "another --state file"
            ) from error

    def write(self, records: Records, tensors: Mapping[str, Tensor]) -> None:
        """Replace the file. Raises OSError if that is not possible; the file is then as it was."""
        temporary = self._path.with_suffix(self._path.suffix + ".tmp")
        try:
            save_file(dict(tensors), temporary, metadata={_RECORDS: json.dumps(records.as_json())})
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            rename_durably(temporary, self._path)
        except (OSError, SafetensorError) as error:
            temporary.unlink(missing_ok=True)
            raise OSError(f"{temporary}: {error}") from error

    def close(self) -> None:
        """Release the file for another server."""
        self._lock.close()
