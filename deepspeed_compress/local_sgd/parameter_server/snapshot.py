"""Persistent state of a parameter server: a safetensors file with its tensors and records.

The file is replaced as a whole, when an island enters or resumes, now and then after other calls, and at the end. After
a crash the server continues from it, and asks islands for the calls that it had answered since.
"""

import json
from collections.abc import Mapping

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.coordinator.coordinator import HeldFile
from deepspeed_compress.local_sgd.parameter_server.store import Records, Store
from deepspeed_compress.safe_files import replacing, sync_directory, temporary

_RECORDS = "records"
_DAMAGE = (OSError, SafetensorError, ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)


class Snapshot(HeldFile):
    """File in which a parameter server keeps its state."""

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
        try:
            scratch = temporary(self._path)
            with replacing(self._path, scratch, private=True):
                save_file(dict(tensors), scratch, metadata={_RECORDS: json.dumps(records.model_dump())})
            sync_directory(self._path.parent)
        except SafetensorError as error:
            raise OSError(f"{self._path}: {error}") from error
