"""Files of an island: the state of its exchange, and the tags of its checkpoints.

Each rank writes a pair of files next to the engine's (`state`). Tags are directories below the island's own directory.
"""

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

import torch.distributed as dist

from deepspeed_compress.checkpointing.deepspeed.participants import SaveRequest
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.state_description import Moment, Position
from deepspeed_compress.config import CompressConfig, masked
from deepspeed_compress.errors import CompressWarning, ConfigError, StateError
from deepspeed_compress.session.state_files import Write, check_owners, check_save, result_on_all

_STEM = "deepspeed_compress_islands"


def first_file(directory: Path) -> Path:
    """Return the file of the first rank in the tag `directory`, whose description stands for those of all ranks."""
    return state.state_file(directory, 0, _STEM)


@dataclass(frozen=True)
class ExchangeFiles:
    """Files of this rank.

    Attributes:
        engine: the engine.
        config: the section of the engine.
        stores: the residuals and the anchor.
        position: the position of this rank among those that save together.
    """

    engine: Any
    config: CompressConfig
    stores: ResidualStores
    position: Position

    def save(self, request: SaveRequest, decisions: Mapping[str, Any], write: Write = state.write) -> None:
        """Have `write` write the state with `decisions`, which are equal on all ranks, for the save `request`."""
        stage = int(self.engine.zero_optimization_stage())
        moment = Moment(stage, self.engine.global_steps, save=request.name)
        section = masked(self.config.model_dump(mode="json"))
        kept = state.contents(self.stores.by_name, self.position, moment, section, decisions)
        write(kept, state.state_file(request.place, dist.get_rank(), _STEM))

    def restore(self, directory: Path, save: str) -> bool:
        """Restore the state, and return True if the rank that saved it had the position of this one.

        `save` is the name of the save in DeepSpeed's files of this checkpoint; see `check_save`.

        Raises:
            StateError: a file is missing or damaged, or its values have other owners.
        """
        found = state.sources(directory, dist.get_rank(), self.position, _STEM)
        check_save(found, self.engine.global_steps, save)
        check_owners(found[0][1], self.config)
        return state.restore(self.stores.by_name, found, self.position, 1.0, self.engine.device)

    def restored_on_all(self, restore: Callable[[], object], reset: str) -> bool:
        """Call `restore` on all ranks. Return False, with a CompressWarning that `reset` happens, if it fails on any.

        Raises:
            StateError: it fails, and `on_missing_state` is "error". Raised on all ranks.
        """
        try:
            result_on_all(restore)
            return True
        except StateError as error:
            problems = str(error)
        if self.config.on_missing_state == "error":
            raise StateError(
                f'{problems}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
                f'"error", "reset"): then {reset}'
            )
        warnings.warn(f"{reset}: {problems}", CompressWarning, stacklevel=5)
        return False


ISLAND = re.compile(r"island_\d{4}")
"""Name of an island's directory."""


def check_tag(tag: str) -> None:
    """Check that a checkpoint with `tag` lies in the directory of its island. Slashes are allowed: "epoch/1".

    Raises:
        ConfigError: it would lie outside, or in the directory of another island.
    """
    path = PurePath(tag)
    if path.is_absolute() or ".." in path.parts or any(ISLAND.fullmatch(part) for part in path.parts):
        raise ConfigError(
            f"save_checkpoint: tag {tag!r} is not below the directory of this island, and islands would overwrite each "
            'other (allowed: a relative path without ".." and "island_0001"); write "epoch/1", for instance'
        )
