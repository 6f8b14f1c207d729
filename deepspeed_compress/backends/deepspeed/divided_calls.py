"""Calls of an engine that trains on one part of the job (see `division`): `initialize` and `deepspeed_io`."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups

from deepspeed_compress.backends.deepspeed.groups import destroy_with_engine, partition_groups
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, RankUnit
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.session.patches import Patches, replaced


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
    if _divides_itself(call, config):
        raise UnsupportedError(
            f"{unit.pointer} divides the ranks itself, so it cannot be combined with another mpu, with a mesh for "
            "sequence parallelism, or with a pipeline, whose stages use all ranks of the job (allowed: data "
            "parallelism, ZeRO 0 to 3, AutoTP); remove the key, or the other division"
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


def _divides_itself(call: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Return True if DeepSpeed divides the ranks of the job according to the call or the configuration."""
    # DeepSpeed makes a mesh only if the file has both sizes.
    meshed = call.get("mesh_param") or {"sequence_parallel_size", "data_parallel_size"} <= config.keys()
    return call.get("mpu") is not None or bool(meshed) or isinstance(call.get("model"), PipelineModule)


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
        patches.wrap(result[0], name, partial(_call_divided, unit))
    if not result[0].zero_optimization_partition_weights():
        # The parameters of ZeRO 3 stay divided over these groups, in a later engine too.
        destroy_with_engine(result[0], unit.made, patches)
    return result


def _call_divided(unit: RankUnit, method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    with _divided_groups(unit):
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
                f"{group.group_desc} has divided the parameters of this model over {group.size()} ranks, for another "
                f"engine or in deepspeed.zero.Init, but this engine divides it over {size} (allowed: the same key and "
                "value in both configurations, or a new model); make the model anew, or write the same"
            )


def divide_data(engine: Any, unit: RankUnit, patches: Patches) -> None:
    """Have the `deepspeed_io` of `engine` divide data over all ranks of the job.

    DeepSpeed itself would divide it over the ranks of `unit` only.
    """
    patches.wrap(engine, "deepspeed_io", partial(_over_all_ranks, engine, unit))


def _over_all_ranks(engine: Any, unit: RankUnit, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """Call DeepSpeed's `deepspeed_io` while the engine's `mpu` answers for the data of the job."""
    with replaced(engine, mpu=_DataUnit(**vars(unit))):
        return original(*args, **options)
