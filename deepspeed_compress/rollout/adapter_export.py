"""Export of published adapters to directories that PEFT and vLLM load."""

import re
import shutil
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.module_weights import make_holder
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import find_versions, read_manifest
from deepspeed_compress.safe_files import check_regular, completing, locked, replacing, temporary, write_json

_NAME = re.compile(r"adapter_v(\d{6,})")
_WEIGHTS, _CONFIG = "adapter_model.safetensors", "adapter_config.json"
_DIGEST = "digest"
"""Key of the model digest in the metadata of a file of weights."""


class AdapterExporter:
    """Writer of versions of an adapter as directories `adapter_v000012`, in the format of PEFT's `save_pretrained`.

    Values are checked by the digest of the version. One process, on any host, does this for all ranks.

    Args:
        store: the store that is published to, with `adapters="alone"`.
        directory: directory for the versions, which the hosts of engines share.
        keep: number of versions to keep. An engine may read a version again as long as requests name it.

    Examples:
        >>> exporter = AdapterExporter(DirectoryStore("/shared/policy"), Path("/shared/adapters"))
        >>> exporter.update()
    """

    def __init__(self, store: Store, directory: Path, keep: int = 8) -> None:
        self._store, self._directory, self._keep = store, directory, keep
        self._receiver: Receiver | None = None
        directory.mkdir(parents=True, exist_ok=True)

    def place(self, version: int) -> Path:
        """Return the directory of a version."""
        return self._directory / f"adapter_v{version:06d}"

    def update(self, version: int | None = None) -> list[int]:
        """Write a version unless it is there, and remove those before the newest ones.

        Args:
            version: its number; None for the newest one in the store.

        Returns:
            The numbers of the written versions: one, or none.

        Raises:
            RolloutError: the version cannot be reached, is no adapter, or the directory has that of another store.
            OSError: the store cannot be read, or the directory cannot be written.
        """
        target = version or max(find_versions(self._store), default=None)
        if target is None:
            return []
        with locked(self._directory):
            digest = read_manifest(self._store, target).digest
            if self.place(target).exists():
                _check_same(self.place(target), digest)
                return []
            self._write(target)
            matches = (_NAME.fullmatch(path.name) for path in self._directory.iterdir())
            for old in sorted(int(match[1]) for match in matches if match is not None)[: -self._keep]:
                shutil.rmtree(self.place(old))
        return [target]

    def _write(self, version: int) -> None:
        manifest = read_manifest(self._store, version)
        if manifest.adapter is None:
            raise RolloutError(f'version {version} has weights, but no adapter: publish with "adapters": "alone"')
        if self._receiver is None:
            self._holder = make_holder(self._store)
            self._receiver = Receiver(self._holder, self._store)
        self._receiver.update(version)
        tensors = {name: value.detach() for name, value in self._holder.named_parameters()}
        with completing(self.place(version)) as scratch:
            file = scratch / _WEIGHTS
            with replacing(file, temporary(file)):
                save_file(tensors, temporary(file), {"format": "pt", _DIGEST: self._receiver.digest})
            write_json(scratch / _CONFIG, manifest.adapter.model_dump(mode="json"))


def _check_same(place: Path, digest: str) -> None:
    """Check that a directory has the version with a digest.

    Raises:
        RolloutError: it has another one, or is damaged.
    """
    try:
        check_regular(str(place / _WEIGHTS))
        with safe_open(place / _WEIGHTS, "pt") as opened:
            found = (opened.metadata() or {}).get(_DIGEST)
    except (OSError, SafetensorError) as error:
        raise RolloutError(f"{place} is damaged: {error}") from error
    if found != digest:
        raise RolloutError(f"{place} is of another store: use a directory with one store only")
