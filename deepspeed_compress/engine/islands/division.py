"""How islands are dealt out: the groups that DeepSpeed gets for the ranks of a job, and what it is told of them.

DeepSpeed divides ranks as the `mpu` that it is given says. Under AutoTP it takes groups of its own in place of that,
which its module `groups` keeps: its tensor-parallel groups, of consecutive ranks, stay, and the data-parallel one
becomes that of the island. Pipelines divide all ranks by themselves.
"""

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch.distributed import ProcessGroup

from deepspeed_compress.config import Islands
from deepspeed_compress.engine.groups import downward_group, made_group
from deepspeed_compress.engine.seams import Seam
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.session.patches import Patches

__all__ = [
    "SEAMS",
    "IslandUnit",
    "check_undivided",
    "deciding_group",
    "divide_call",
    "groups_restored_on_failure",
    "make_divided",
    "make_unit",
]

_POINTER = "/deepspeed_compress/islands"
_TENSOR_POINTER = "/tensor_parallel/autotp_size"

SEAMS = (
    Seam("deepspeed.utils.groups:_init_tp_mesh_device", ("tensor_model_parallel_size", "data_parallel_size")),
    Seam("deepspeed.utils.groups:get_data_parallel_group", ()),
    Seam("deepspeed.utils.groups:get_tensor_model_parallel_group", ()),
)


@dataclass(frozen=True)
class IslandUnit:
    """What DeepSpeed calls an `mpu`: this rank's data-parallel group inside its island, and the tensor-parallel one.

    `ranks`: global ones of the island, of which `tensor` consecutive ones share each layer. `whole`: all of them.
    `data`: those with this one's tensor rank. `model`: those that share layers with it. `peers`: the ranks of equal
    place. `job`: what DeepSpeed has as the data-parallel group without islands, under AutoTP. `living`: the units of
    all engines with islands that live, this one's and later ones' too. `before`: DeepSpeed's `mpu` without islands.
    """

    ranks: tuple[int, ...]
    number: int
    islands: int
    tensor: int
    whole: ProcessGroup
    data: ProcessGroup
    model: ProcessGroup
    peers: ProcessGroup
    downward: ProcessGroup | None
    job: ProcessGroup | None
    living: "list[IslandUnit]" = field(compare=False, repr=False)
    before: Any = field(default=None, compare=False, repr=False)

    @property
    def place(self) -> int:
        """Of this rank in its island: peers have the same."""
        return self.ranks.index(dist.get_rank())

    @property
    def share_of_job(self) -> tuple[int, int]:
        """Which part of a batch of all islands this rank reads: the number of the part, and of how many."""
        return dist.get_rank() // self.tensor, self.islands * len(self.ranks) // self.tensor

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.data

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self.ranks[self.get_model_parallel_rank() :: self.tensor])

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks) // self.tensor

    def get_data_parallel_rank(self) -> int:
        return self.place // self.tensor

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.model

    def get_model_parallel_world_size(self) -> int:
        return self.tensor

    def get_model_parallel_rank(self) -> int:
        return self.place % self.tensor

    def get_tensor_model_parallel_src_rank(self) -> int:
        return dist.get_rank() - self.get_model_parallel_rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        return 1

    def get_pipeline_model_parallel_rank(self) -> int:
        return 0

    # Names by which DeepSpeed asks as well (`bwc_tensor_model_parallel_rank` and others).
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def deciding_group(engine: Any) -> ProcessGroup | None:
    """The ranks that decide alike: those of the island that this one is of; None for all of the job."""
    return engine.mpu.whole if isinstance(engine.mpu, IslandUnit) else None


class _BatchUnit(IslandUnit):
    """As DeepSpeed counts a batch under AutoTP: every rank for a data-parallel one."""

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)


def make_unit(settings: Islands, tensor: int = 1) -> IslandUnit:
    """Divide the ranks of the job, `tensor` of which share each layer. Collective; joins the job first, where that is
    not done. Raises ConfigError, and UnsupportedError where this process shares layers in another way already."""
    if not dist.is_initialized():
        deepspeed.init_distributed()
    world, rank, size = dist.get_world_size(), dist.get_rank(), _ranks_of_island(settings, tensor)
    _check_size(settings, world, size)
    islands = [tuple(range(first, first + size)) for first in range(0, world, size)]
    lines = [ranks[one::tensor] for ranks in islands for one in range(tensor)]
    places = list(zip(*islands, strict=True))
    whole = made_group(islands)
    model, job = _tensor_groups(tensor)
    return IslandUnit(
        ranks=islands[rank // size],
        number=rank // size,
        islands=len(islands),
        tensor=tensor,
        whole=whole,
        data=whole if tensor == 1 else made_group(lines),
        model=model,
        peers=made_group(places),
        downward=downward_group(places),
        job=job,
        living=groups.mpu.living if isinstance(groups.mpu, IslandUnit) else [],
        before=groups.mpu.before if isinstance(groups.mpu, IslandUnit) else groups.mpu,
    )


_GROUPS = (
    "mpu",
    "mesh_device",
    "_DATA_PARALLEL_GROUP",
    "_MODEL_PARALLEL_GROUP",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_TENSOR_MODEL_PARALLEL_GROUP",
    "_WORLD_GROUP",
    "_ZERO_PARAM_INTRA_PARALLEL_GROUP",
)
"""Names in DeepSpeed's module `groups` by which it divides the ranks of all engines to come."""


@contextmanager
def groups_restored_on_failure() -> Iterator[None]:
    """Divide the ranks of later engines as before if the block raises."""
    before = {name: getattr(groups, name) for name in _GROUPS if hasattr(groups, name)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(groups, name, value)
        raise


def _ranks_of_island(settings: Islands, tensor: int) -> int:
    """`size` counts data-parallel ranks, and a host has all of its own."""
    if not settings.by_host:
        assert settings.size is not None, "size or by_host: the section is checked"
        return settings.size * tensor
    size = _ranks_of_host()
    if size % tensor:
        raise ConfigError(
            f"{_POINTER}/by_host: true, and {tensor} ranks that share each layer do not divide the {size} of a host "
            "(allowed: divisors); write such a number, or islands of a size in place of by_host"
        )
    return size


def _check_size(settings: Islands, world: int, size: int) -> None:
    if world % size:
        key = "by_host" if settings.by_host else "size"
        raise ConfigError(
            f"{_POINTER}/{key}: islands of {size} do not divide the {world} ranks of the job (allowed: divisors); "
            "start as many ranks for every island"
        )
    if world == size and settings.outer.optimizer == "average" and settings.outer.lr == 1.0:
        text = (
            f"{_POINTER}: has no effect, because all {world} ranks are one island; start more, or write smaller islands"
        )
        warnings.warn(text, CompressWarning, stacklevel=5)


def _ranks_of_host() -> int:
    """As torchrun, and as the deepspeed launcher says it. Collective: ConfigError on all ranks where neither has, or
    hosts have unequal numbers."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE"))
    if None in told:
        raise ConfigError(
            f"{_POINTER}/by_host: true, and this launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE (allowed: size "
            'in its place); write "size": 8, the ranks of an island'
        )
    sizes = sorted({int(size) for size in told})
    if len(sizes) > 1:
        raise ConfigError(
            f"{_POINTER}/by_host: true, and hosts have {sizes} ranks (allowed: as many on each); start as many on "
            "every host, or write islands of a size in place of by_host"
        )
    return sizes[0]


def _tensor_groups(tensor: int) -> tuple[ProcessGroup, ProcessGroup | None]:
    """The ranks that share layers with this one, and DeepSpeed's data-parallel group beside them."""
    if tensor == 1:
        return made_group([(one,) for one in range(dist.get_world_size())]), None
    # Layers that were split before there is an engine have them already.
    groups._init_tp_mesh_device(tensor_model_parallel_size=tensor)
    found = groups.get_tensor_model_parallel_group()
    first = dist.get_rank() // tensor * tensor
    if dist.get_process_group_ranks(found) != list(range(first, first + tensor)):
        raise UnsupportedError(
            f"{_POINTER}: {tensor} ranks are to share each layer, and DeepSpeed has groups of {found.size()} in this "
            "process (allowed: the same); train with the other number in a process of its own"
        )
    # Where an engine with islands lives, DeepSpeed has that one's.
    former = groups.mpu.job if isinstance(groups.mpu, IslandUnit) else None
    return found, former or groups.get_data_parallel_group()


def divide_call(unit: IslandUnit, call: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `deepspeed.initialize` for one island; `config`: of the whole job. Raises UnsupportedError.

    `train_batch_size` is that of the job, as without islands; DeepSpeed gets the island's part. Training data is left
    out, for `attach_islands` to divide over all ranks.
    """
    if call.get("mpu") is not None or isinstance(call.get("model"), PipelineModule):
        raise UnsupportedError(
            f"{_POINTER} divides the ranks by itself, and not beside a pipeline, whose stages DeepSpeed deals out over "
            "all ranks of the job, or another mpu (allowed: data parallelism, ZeRO 0 to 3, AutoTP); remove the key, or "
            "the other division"
        )
    divided = copy.deepcopy(dict(config))
    batch = divided.get("train_batch_size")
    if isinstance(batch, int):
        if batch % unit.islands:
            raise ConfigError(
                f"/train_batch_size: {batch} is not divisible by {unit.islands} islands (allowed: multiples); write "
                f"{batch + -batch % unit.islands}"
            )
        divided["train_batch_size"] = batch // unit.islands
    given = unit if unit.tensor == 1 else _BatchUnit(**vars(unit))
    return {**call, "config": divided, "mpu": given, "training_data": None}


def make_divided(original: Callable[..., Any], call: Mapping[str, Any], unit: IslandUnit) -> Sequence[Any]:
    """What `original`, `deepspeed.initialize`, returns for a `divide_call`; its engine has `unit` as `mpu`.

    Raises UnsupportedError where it shares layers between other ranks than was said.
    """
    # From now on what ends an engine of before leaves the division alone.
    unit.living.append(unit)
    if unit.tensor > 1:
        groups._DATA_PARALLEL_GROUP = unit.data
    try:
        result: Sequence[Any] = original(**call)
        _check_tensor(result[0], unit)
    except BaseException:
        _undivide(unit)
        raise
    # AutoTP has put DeepSpeed's module of groups in its place, which tells nobody of islands.
    result[0].mpu = groups.mpu = unit
    # For as long as the engine lives, compressed or not: its groups are those of the island.
    Patches().precede(result[0], "destroy", partial(_undivide, unit))
    return result


def _check_tensor(engine: Any, unit: IslandUnit) -> None:
    found = max(1, int(engine.autotp_size()))
    if found != unit.tensor:
        raise UnsupportedError(
            f"{_POINTER}: tp_model_init was called for {found} ranks that share each layer, and the configuration says "
            f'{unit.tensor} (allowed: the same); write "tensor_parallel": {{"autotp_size": {found}}}'
        )


def _undivide(unit: IslandUnit) -> None:
    """Give DeepSpeed the division of the last engine with islands that lives, or the one from before.

    It keeps the last `mpu` for all engines to come, and asks it for those that are made. An engine that was destroyed
    is destroyed again by the garbage collector, at any time.
    """
    if unit not in unit.living:
        return
    unit.living.remove(unit)
    last = unit.living[-1] if unit.living else None
    if isinstance(groups.mpu, IslandUnit):
        groups.mpu = unit.before if last is None else last
    if unit.tensor > 1:
        groups._DATA_PARALLEL_GROUP = unit.job if last is None else last.data


def check_undivided() -> None:
    """UnsupportedError while an engine with islands lives: DeepSpeed would divide another one in the same way."""
    if isinstance(groups.mpu, IslandUnit):
        raise UnsupportedError(
            f"{_POINTER} is missing, and an engine of this process has it: DeepSpeed divides the ranks of both alike; "
            "write the same islands into both, or destroy the first engine"
        )
