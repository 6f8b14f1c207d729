"""Check that all ranks have the same settings: messages have no header, so ranks with others would misread them."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.errors import ConfigError

_OF_A_RANK: Mapping[str, Any] = {
    **dict.fromkeys(("checkpointing", "communication", "islands", "lint", "rollout"), True),
    "monitor": {"path", "announce"},
}
"""Keys that may differ between ranks, such as paths and rates."""


def check_alike(config: CompressConfig, total: int | None, group: ProcessGroup | None) -> None:
    """Check that all ranks of `group`, or of the job if None, have the same settings. Collective.

    Args:
        config: the section of this rank.
        total: optimizer steps of the whole training; None if unknown.
        group: the ranks.

    Raises:
        ConfigError: on all ranks, if two of them differ.
    """
    own = config.model_dump(mode="json", exclude=dict(_OF_A_RANK))
    own["schedule"]["total_steps"] = total
    # Figures are computed over all ranks if they are written.
    own["monitor"]["path"] = "a path" if config.monitor.path else None
    first, *others = gather_objects(own, group)
    for rank, other in enumerate(others, 1):
        for path, value, different in _differences(first, other, f"/{SECTION}"):
            raise ConfigError(
                f"{path}: {value!r} on rank 0, but {different!r} on rank {rank} (allowed: the same on all "
                "ranks); give all of them the same configuration"
            )


def _differences(one: Any, other: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the values that differ between `one` and `other`, each with its JSON pointer."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        for key, value in one.items():
            yield from _differences(value, other[key], f"{path}/{key}")
    elif one != other:
        yield path, one, other
