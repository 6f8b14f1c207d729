"""Tags of island checkpoints, which are directories below the island's own directory."""

import re
from pathlib import Path, PurePath

from deepspeed_compress.errors import ConfigError

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


def tag_of_file(file: str | Path, directory: str | Path) -> str:
    """Return the tag of the checkpoint in `directory` that contains `file`. A tag may have several parts."""
    return Path(file).parent.relative_to(directory).as_posix()
