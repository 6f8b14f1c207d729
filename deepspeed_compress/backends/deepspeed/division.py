"""Division of a job's ranks into islands or nodes, and the calls of an engine that trains on one part of the job.

DeepSpeed divides ranks according to its `mpu` argument. Under AutoTP it uses its own groups instead, which it stores in
its module `groups`. Its tensor-parallel groups, of consecutive ranks, stay; the data-parallel group becomes that of the
island or node. Pipelines divide all ranks themselves.
"""

import copy
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

import deepspeed
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.groups import (
    destroy_with_engine,
    downward_group,
    made_group,
    partition_groups,
)
from deepspeed_compress.backends.deepspeed.seams import Seam, check_seams
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, RankUnit
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.pace import launched_ranks_of_host
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.session.patches import Patches, replaced

SEAMS = (
    Seam("deepspeed.utils.groups:_init_tp_mesh_device", "tensor_model_parallel_size data_parallel_size"),
    Seam("deepspeed.utils.groups:get_tensor_model_parallel_group", ""),
)

_Kind = type[IslandUnit] | type[NodeUnit]


def make_unit(config: CompressConfig, ds_config: Mapping[str, Any]) -> RankUnit | None:
    """Return this rank's part if the section divides the job into islands or nodes; None otherwise.

    Collective; initializes torch.distributed first if necessary.

    Raises:
        ConfigError: the ranks of the job cannot be divided in this way.
        UnsupportedError: this process already shares layers between other ranks.
    """
    parallelism, islands = config.parallelism or Parallelism(), config.islands
    kind: _Kind = NodeUnit
    key, size, idle_alone = kind.pointer, parallelism.shard_within, True
    if islands is not None and islands.elastic is None:
        kind, size = IslandUnit, "node" if islands.by_host else islands.size
        key = f"{kind.pointer}/{'by_host' if islands.by_host else 'size'}"
        idle_alone = islands.outer.optimizer == "average" and islands.outer.lr == 1.0
    if size is None:
        return None
    check_seams(SEAMS, deepspeed.__version__)
    unit = _divide(kind, key, size, TENSOR.effective(ds_config, parallelism))
    if unit.count == 1 and idle_alone:
        text = (
            f"{kind.pointer}: has no effect, because all {len(unit.ranks)} ranks are in one part (allowed: at least 2 "
            f"{kind.parts}); start more ranks, write a smaller number of ranks, or remove the key"
        )
        warnings.warn(text, CompressWarning, stacklevel=4)
    return unit


def _divide(kind: _Kind, key: str, size: int | Literal["node"], tensor: int) -> RankUnit:
    """Make the groups of parts of `size` data-parallel ranks, or of those of a host, and return this rank's part.

    Args:
        kind: the kind of part.
        key: JSON pointer of the key that gives the size.
        size: data-parallel ranks of a part; "node" for all ranks of a host.
        tensor: the number of ranks that share each layer.
    """
    if not dist.is_initialized():
        deepspeed.init_distributed()
    world, rank = dist.get_world_size(), dist.get_rank()
    held = _ranks_of_host(kind, key, tensor) if size == "node" else size * tensor
    if world % held:
        raise ConfigError(
            f"{key}: {kind.parts} of {held} do not divide the {world} ranks of the job (allowed: divisors); start as "
            "many ranks for each"
        )
    parts = [tuple(range(first, first + held)) for first in range(0, world, held)]
    lines = [ranks[one::tensor] for ranks in parts for one in range(tensor)]
    places = list(zip(*parts, strict=True))
    whole = made_group(parts, kind.pointer)
    return kind(
        ranks=parts[rank // held],
        number=rank // held,
        count=len(parts),
        tensor=tensor,
        whole=whole,
        data=whole if tensor == 1 else made_group(lines, kind.pointer),
        model=_tensor_group(kind, tensor),
        peers=made_group(places),
        downward=downward_group(places),
    )


def _ranks_of_host(kind: _Kind, key: str, tensor: int) -> int:
    """Return the number of ranks per host, from the variables of torchrun or the deepspeed launcher. Collective.

    Raises:
        ConfigError: neither launcher was used, hosts have unequal numbers of ranks, or `tensor` does not divide the
            ranks of a host. Raised on all ranks.
    """
    local = gather_objects(launched_ranks_of_host())
    sizes = sorted({size for size in local if size is not None})
    if None in local:
        raise ConfigError(
            f"{key}: this launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE (allowed: a number of ranks in place "
            f"of the host); write 8, for instance, if {kind.parts} have 8 ranks"
        )
    if len(sizes) > 1:
        raise ConfigError(
            f"{key}: hosts have {sizes} ranks (allowed: the same number on each); start the same number on every host, "
            "or write a number of ranks in place of the host"
        )
    if sizes[0] % tensor:
        raise ConfigError(
            f"{key}: {tensor} ranks that share each layer do not divide the {sizes[0]} ranks of a host (allowed: "
            "divisors); write such a number, or a number of ranks in place of the host"
        )
    return sizes[0]


def _tensor_group(kind: _Kind, tensor: int) -> ProcessGroup:
    """Return the group of ranks that share layers with this one."""
    if tensor == 1:
        return made_group([(one,) for one in range(dist.get_world_size())])
    # Layers that were split before an engine exists have already made these groups.
    groups._init_tp_mesh_device(tensor_model_parallel_size=tensor)
    found: ProcessGroup = groups.get_tensor_model_parallel_group()
    first = dist.get_rank() // tensor * tensor
    if dist.get_process_group_ranks(found) != list(range(first, first + tensor)):
        raise UnsupportedError(
            f"{kind.pointer}: {tensor} ranks should share each layer, but DeepSpeed has groups of {found.size()} "
            "in this process (allowed: the same number); train with the other number in a separate process"
        )
    return found


class _BatchUnit(RankUnit):
    """Unit that reports every rank as data-parallel, as DeepSpeed counts a batch under AutoTP."""

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)


class _DataUnit(RankUnit):
    """Unit that reports the share of the job's data that this rank reads."""

    def get_data_parallel_world_size(self) -> int:
        return self.share_of_job[1]

    def get_data_parallel_rank(self) -> int:
        return self.share_of_job[0]


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


_CALLS = (
    "_take_model_step",
    "buffered_allreduce_fallback",
    "get_data_parallel_rank",
    "load_checkpoint",
    "save_checkpoint",
)
"""Methods of an engine that ask `groups` for the data-parallel ranks when they are called."""


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


def _divided_groups(unit: RankUnit) -> AbstractContextManager[None]:
    """Have DeepSpeed's module `groups` answer for `unit` in the block, and as before after it.

    DeepSpeed asks this module for all engines of a process, and other engines may divide the ranks in another way.
    """
    division: dict[str, Any] = {"mpu": unit, "mesh_device": None}
    if unit.tensor > 1:
        division["_DATA_PARALLEL_GROUP"] = unit.data
    return replaced(groups, **division)


def divide_call(unit: RankUnit, call: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` for one part of the job.

    `train_batch_size` is that of the whole job; DeepSpeed gets the share of the part. Training data is removed, because
    it is divided over all ranks of the job.

    Args:
        unit: this rank's part.
        call: the arguments for the whole job.
        config: the configuration of the whole job.

    Raises:
        UnsupportedError: the model is a pipeline, or the call divides the ranks in another way.
        ConfigError: the batch cannot be divided evenly.
    """
    # DeepSpeed makes a mesh only if the file has both sizes.
    meshed = call.get("mesh_param") or {"sequence_parallel_size", "data_parallel_size"} <= config.keys()
    if call.get("mpu") is not None or meshed or isinstance(call.get("model"), PipelineModule):
        raise UnsupportedError(
            f"{unit.pointer} divides the ranks itself, so it cannot be combined with another mpu, a sequence-parallel "
            "mesh, or a pipeline, whose stages use all ranks (allowed: data parallelism, ZeRO 0 to 3, AutoTP); remove "
            "the key, or the other division"
        )
    divided = copy.deepcopy(dict(config))
    batch = divided.get("train_batch_size")
    if isinstance(batch, int):
        if batch % unit.count:
            raise ConfigError(
                f"/train_batch_size: {batch} is not divisible by {unit.count}, the number of parts of {unit.pointer} "
                f"(allowed: multiples); write {batch + -batch % unit.count}"
            )
        divided["train_batch_size"] = batch // unit.count
    given = unit if unit.tensor == 1 else _BatchUnit(**vars(unit))
    return {**call, "config": divided, "mpu": given, "training_data": None}


def make_divided(original: Callable[..., Any], call: Mapping[str, Any], unit: RankUnit) -> Sequence[Any]:
    """Call `original`, `deepspeed.initialize`, with the arguments `call` of `divide_call`.

    Returns:
        The result of `original`; its engine has `unit` as `mpu`.

    Raises:
        UnsupportedError: the engine shares layers between other ranks than the configuration says.
    """
    with _divided_groups(unit):
        result: Sequence[Any] = original(**call)
        _check_tensor(result[0], unit)
    # AutoTP has replaced it with DeepSpeed's module `groups`, which does not know about units.
    result[0].mpu = unit
    # Independent of `detach`: the engine's groups are those of its unit for as long as it exists.
    patches = Patches()
    for name in _CALLS:
        patches.wrap(result[0], name, partial(_call_within, partial(_divided_groups, unit)))
    if not result[0].zero_optimization_partition_weights():
        # The parameters of ZeRO 3 stay divided over these groups, in a later engine too.
        destroy_with_engine(result[0], unit.made, patches)
    return result


def _call_within(
    block: Callable[[], AbstractContextManager[None]], method: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    with block():
        return method(*args, **options)


def _check_tensor(engine: Any, unit: RankUnit) -> None:
    found = max(1, int(engine.autotp_size()))
    if found != unit.tensor:
        raise UnsupportedError(
            f"{unit.pointer}: tp_model_init was called for {found} ranks that share each layer, but the configuration "
            f'says {unit.tensor} (allowed: the same); write "tensor_parallel": {{"autotp_size": {found}}}'
        )


def check_division(engine: Any) -> None:
    """Check that ZeRO 3 has divided the parameters of `engine` over its data-parallel ranks, not over another part.

    Parameters stay divided over a part of the job if an earlier engine, or `deepspeed.zero.Init`, has divided them so.
    DeepSpeed would then average their gradients over this part.

    Raises:
        UnsupportedError: they are divided over a part of another size.
    """
    for group in partition_groups(engine):
        size = engine.seq_data_parallel_group.size()
        if group.group_desc in (IslandUnit.pointer, NodeUnit.pointer) and group.size() != size:
            raise UnsupportedError(
                f"{group.group_desc} has divided the parameters of this model over {group.size()} ranks, in another "
                f"engine or zero.Init, but this engine divides it over {size} (allowed: the same value of the key in "
                "both configurations); make the model anew, or write the same value"
            )


def divide_data(engine: Any, unit: RankUnit, patches: Patches) -> None:
    """Have the `deepspeed_io` of `engine` divide data over all ranks of the job, for which its `mpu` then answers.

    DeepSpeed itself would divide it over the ranks of `unit` only.
    """
    block = partial(replaced, engine, mpu=_DataUnit(**vars(unit)))
    patches.wrap(engine, "deepspeed_io", partial(_call_within, block))
