"""Settings that contradict hybrid sharding (`parallelism.shard_within`), in the section and in the rest of the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE, TENSOR, value_at
from deepspeed_compress.config.places import PowerSGDGradients
from deepspeed_compress.config.problems import Conflicts, find_conflicts_with, problem, show
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write

_KEY: Path = ("parallelism", "shard_within")

_SHARDING = pointer((SECTION, *_KEY))
_CONFLICTS: Conflicts = {
    ("islands",): (None, "islands divide the ranks of the job themselves", "null, or remove shard_within"),
    ("parallelism", "pipeline"): (
        1,
        "DeepSpeed distributes stages over all ranks of the job",
        "1, or remove shard_within",
    ),
    ("weights", "method"): ("none", "weights never leave a node", '"none"'),
    ("gradients", "hierarchy"): (None, "DeepSpeed reduces inside a node", "null"),
    ("gradients", "clip_norm"): (
        None,
        "a shard has parts of parameters, whose norms are smaller than those of the parameters",
        "null",
    ),
    ("checkpointing", "memory"): (
        None,
        "only the first node writes the model, so other hosts would have nothing in memory",
        "null",
    ),
    ("ownership",): ("contiguous", "all shards of a node have the same size", '"contiguous"'),
}
_ON_NVME: tuple[tuple[Path, str], ...] = (
    (
        ("zero_optimization", "offload_optimizer", "device"),
        "DeepSpeed writes gradients to a file before they are averaged over the nodes",
    ),
    (
        ("zero_optimization", "offload_param", "device"),
        "DeepSpeed keeps weights in files, so those of the nodes cannot be compared",
    ),
)
"""Place of each device that must not be NVMe, and the reason."""


def find_sharding_contradictions(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield settings of the section that hybrid sharding leaves without effect, or cannot be combined with."""
    if section.parallelism is None or section.parallelism.shard_within is None:
        return
    yield from find_conflicts_with(_SHARDING, section, _CONFLICTS)
    if isinstance(section.gradients, PowerSGDGradients):
        why = "a shard has parts of matrices, which low-rank factors cannot approximate (allowed: other methods)"
        yield problem(("gradients", "method"), f"cannot be combined with {_SHARDING}: {why}", '"blockwise"')


def find_sharding_mismatches(
    ds_config: Mapping[str, Any], section: CompressConfig, world_size: int | None
) -> Iterator[Diagnostic]:
    """Yield contradictions of hybrid sharding with the rest of the file, or with `world_size` ranks in total."""
    parallelism = section.parallelism or Parallelism()
    within, stage = parallelism.shard_within, STAGE.effective(ds_config, parallelism)
    if within is None:
        return
    if stage == 0:
        what = f"{show(within)} has no effect with {pointer(STAGE.place(parallelism))}: 0, which shards nothing"
        yield problem(_KEY, f"{what} (allowed: stages 1, 2 and 3)", "null, or another stage")
    for place, why in _ON_NVME:
        if value_at(ds_config, place) == "nvme":
            what = f'"nvme" cannot be combined with {_SHARDING}: {why} (allowed: "cpu", "none")'
            yield Diagnostic(at(*place), what, write('"cpu"'))
    size = within * TENSOR.effective(ds_config, parallelism) if isinstance(within, int) else 1
    if world_size is not None and world_size % size:
        what = f"nodes of {size} ranks do not divide the world size {world_size} (allowed: divisors of the world size)"
        yield problem(_KEY, what, f"another number, or start a multiple of {size} ranks")
