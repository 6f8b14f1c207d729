"""Place of a rank's files of compression state in a checkpoint."""

from typing import Any

from deepspeed_compress.backends.deepspeed.groups import find_position
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.session.state_files import Place


def find_place(engine: Any, config: CompressConfig) -> Place:
    """Return the place of this rank's files. Collective.

    Each island within the job has its own directory, and numbers its ranks separately.
    """
    island = engine.mpu.ranks if isinstance(engine.mpu, IslandUnit) else None
    rank = engine.global_rank if island is None else island.index(engine.global_rank)
    return Place(rank, find_position(engine, config, island), engine.device)
