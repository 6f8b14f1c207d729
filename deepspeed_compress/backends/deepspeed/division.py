"""Division of a job's ranks into islands: the process groups that DeepSpeed is given, and the arguments of its calls.

DeepSpeed divides ranks according to its `mpu` argument. Under AutoTP it uses its own groups instead, which it stores in
its module `groups`. Its tensor-parallel groups, of consecutive ranks, stay; the data-parallel group becomes that of the
island. Pipelines divide all ranks themselves.
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

from deepspeed_compress.backends.deepspeed.groups import downward_group, made_group
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.config import Islands
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
    """This rank's island, in the form of DeepSpeed's `mpu`.

    Attributes:
        ranks: the global ranks of the island. `tensor` consecutive ones share each layer.
        number: the number of the island, from 0.
        islands: the number of islands.
        tensor: the number of ranks that share each layer.
        whole: the group of all ranks of the island.
        data: the group of its ranks with the same tensor rank as this one.
        model: the group of ranks that share layers with this one.
        peers: the group of ranks with the same place in their islands.
        downward: a second group of `peers`; see `downward_group`.
        job: DeepSpeed's data-parallel group without islands, under AutoTP; None otherwise.
        living: the units of all existing engines with islands, including this one's and later ones'; one shared list.
        before: DeepSpeed's `mpu` without islands.
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
        """Return the index of this rank in its island, which is the same for all its peers."""
        return self.ranks.index(dist.get_rank())

    @property
    def share_of_job(self) -> tuple[int, int]:
        """Return which part of a batch of all islands this rank reads: (index of the part, number of parts)."""
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

    # Other names that DeepSpeed uses (`bwc_tensor_model_parallel_rank` and others).
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank


def deciding_group(engine: Any) -> ProcessGroup | None:
    """Return the group of ranks that must decide alike: those of this rank's island; None for the whole job."""
    return engine.mpu.whole if isinstance(engine.mpu, IslandUnit) else None


class _BatchUnit(IslandUnit):
    """Island unit that reports every rank as data-parallel, as DeepSpeed counts a batch under AutoTP."""

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)


def make_unit(settings: Islands, tensor: int = 1) -> IslandUnit:
    """Divide the ranks of the job into islands. Collective; initializes torch.distributed first if necessary.

    Args:
        settings: the section's `islands`.
        tensor: the number of ranks that share each layer.

    Raises:
        ConfigError: the ranks of the job cannot be divided in this way.
        UnsupportedError: this process already shares layers between other ranks.
    """
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
"""Names in DeepSpeed's module `groups` that determine how the ranks of later engines are divided."""


@contextmanager
def groups_restored_on_failure() -> Iterator[None]:
    """Restore DeepSpeed's division of ranks, for later engines, if the block raises."""
    before = {name: getattr(groups, name) for name in _GROUPS if hasattr(groups, name)}
    try:
        yield
    except BaseException:
        for name, value in before.items():
            setattr(groups, name, value)
        raise


def _ranks_of_island(settings: Islands, tensor: int) -> int:
    """Return the number of ranks per island.

    The setting `size` counts data-parallel ranks only. With `by_host`, an island has all ranks of a host.
    """
    if not settings.by_host:
        assert settings.size is not None, "size or by_host: the section is checked"
        return settings.size * tensor
    size = _ranks_of_host()
    if size % tensor:
        raise ConfigError(
            f"{_POINTER}/by_host: true, but {tensor} ranks that share each layer do not divide the {size} "
            "ranks of a host (allowed: divisors); write such a number, or size instead of by_host"
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
    """Return the number of ranks per host, from the variables of torchrun or the deepspeed launcher. Collective.

    Raises:
        ConfigError: neither launcher was used, or hosts have unequal numbers of ranks. Raised on all ranks.
    """
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE"))
    if None in told:
        raise ConfigError(
            f"{_POINTER}/by_host: true, but this launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE (allowed: size "
            'in its place); write "size": 8, the ranks of an island'
        )
    sizes = sorted({int(size) for size in told})
    if len(sizes) > 1:
        raise ConfigError(
            f"{_POINTER}/by_host: true, but hosts have {sizes} ranks (allowed: the same number on each); "
            "start the same number on every host, or write size instead of by_host"
        )
    return sizes[0]


def _tensor_groups(tensor: int) -> tuple[ProcessGroup, ProcessGroup | None]:
    """Return the group of ranks that share layers with this one, and DeepSpeed's own data-parallel group."""
    if tensor == 1:
        return made_group([(one,) for one in range(dist.get_world_size())]), None
    # Layers that were split before an engine exists have already made these groups.
    groups._init_tp_mesh_device(tensor_model_parallel_size=tensor)
    found = groups.get_tensor_model_parallel_group()
    first = dist.get_rank() // tensor * tensor
    if dist.get_process_group_ranks(found) != list(range(first, first + tensor)):
        raise UnsupportedError(
            f"{_POINTER}: {tensor} ranks should share each layer, but DeepSpeed has groups of {found.size()} in this "
            "process (allowed: the same number); train with the other number in a separate process"
        )
    # While an engine with islands exists, DeepSpeed's data-parallel group is that of the engine's island.
    former = groups.mpu.job if isinstance(groups.mpu, IslandUnit) else None
    return found, former or groups.get_data_parallel_group()


def divide_call(unit: IslandUnit, call: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` for one island.

    `train_batch_size` is that of the job, as without islands; DeepSpeed gets the island's share. Training data is
    removed, because `attach_islands` divides it over all ranks.

    Args:
        unit: this rank's island.
        call: the arguments for the whole job.
        config: the configuration of the whole job.

    Raises:
        UnsupportedError: the model is a pipeline, or the call has another `mpu`.
        ConfigError: the batch cannot be divided evenly.
    """
    if call.get("mpu") is not None or isinstance(call.get("model"), PipelineModule):
        raise UnsupportedError(
            f"{_POINTER} divides the ranks itself, so it cannot be combined with another mpu, or with a "
            "pipeline, whose stages use all ranks of the job (allowed: data parallelism, ZeRO 0 to 3, AutoTP); remove "
            "the key, or the other division"
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
    """Call `original`, `deepspeed.initialize`, with the arguments `call` of `divide_call`.

    Returns:
        The result of `original`; its engine has `unit` as `mpu`.

    Raises:
        UnsupportedError: the engine shares layers between other ranks than the configuration says.
    """
    # From now on, destroying an older engine leaves this division in place.
    unit.living.append(unit)
    if unit.tensor > 1:
        groups._DATA_PARALLEL_GROUP = unit.data
    try:
        result: Sequence[Any] = original(**call)
        _check_tensor(result[0], unit)
    except BaseException:
        _undivide(unit)
        raise
    # AutoTP has replaced it with DeepSpeed's module `groups`, which does not know about islands.
    result[0].mpu = groups.mpu = unit
    # Independent of `detach`: the engine's groups are those of the island for as long as it exists.
    Patches().precede(result[0], "destroy", partial(_undivide, unit))
    return result


def _check_tensor(engine: Any, unit: IslandUnit) -> None:
    found = max(1, int(engine.autotp_size()))
    if found != unit.tensor:
        raise UnsupportedError(
            f"{_POINTER}: tp_model_init was called for {found} ranks that share each layer, but the configuration says "
            f'{unit.tensor} (allowed: the same); write "tensor_parallel": {{"autotp_size": {found}}}'
        )


def _undivide(unit: IslandUnit) -> None:
    """Restore the division of the newest remaining engine with islands, or the one from before islands.

    DeepSpeed uses the last `mpu` for all later engines, and queries it for existing ones. The garbage collector may
    destroy an engine a second time, at any time.
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
    """Check that no engine with islands exists, because DeepSpeed would divide another engine in the same way.

    Raises:
        UnsupportedError: one exists.
    """
    if isinstance(groups.mpu, IslandUnit):
        raise UnsupportedError(
            f"{_POINTER} is missing, but another engine of this process has it, and both engines must divide "
            "the ranks alike; write the same islands into both, or destroy the first engine"
        )
