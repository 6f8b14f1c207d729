"""Checks of what cannot work with FSDP2. All problems are reported at once, before anything is attached."""

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from deepspeed_compress.backends.fsdp2.units import Ranks, Unit
from deepspeed_compress.backends.groups import ranks_per_node
from deepspeed_compress.config import SECTION, CompressConfig, CompressedWeights

_REDUCED = (torch.float32, torch.bfloat16)
_GATHERED = (torch.float32, torch.bfloat16, torch.float16)


def find_division_limits(units: Sequence[Unit], ranks: Ranks) -> Iterator[str]:
    """Yield what is wrong with the sharding of `units`."""
    for unit in units:
        if not unit.alone or unit.ranks() != ranks:
            yield f"{unit.names[0]}: it is sharded over other ranks than {units[0].names[0]}; use one mesh for all"
        for name, parameter in unit.parameters():
            if parameter.is_dtensor:
                yield f"{name}: it is also sharded by tensor parallelism (allowed: FSDP2 alone); use no other sharding"
            dim = parameter.fsdp_placement.dim
            if dim != 0:
                yield f"{name}: it is sharded along dimension {dim} (allowed: 0); remove shard_placement_fn"


def find_gradient_limits(units: Sequence[Unit], ranks: Ranks, config: CompressConfig) -> Iterator[str]:
    """Yield what is wrong with `config` for the gradients of `units`."""
    for unit in units:
        if type(unit.theirs._reduce_scatter_comm) is not DefaultReduceScatter:
            yield f"{unit.names[0]}: it already has a custom reduce-scatter (set_custom_reduce_scatter); remove it"
        trained = unit.trained().values()
        if len({parameter.dtype for parameter in trained}) > 1 or any(one.grad_dtype != one.dtype for one in trained):
            yield (
                f"{unit.names[0]}: it, the parameters reduced with it, and their gradients (grad_dtype) have several "
                "dtypes (allowed: one for all); shard them separately, and do not set grad_dtype"
            )
        found = unit.reduce_dtypes(unit.trained()) - set(_REDUCED)
        if found:
            what = f"{unit.names[0]}: gradients are reduced in {', '.join(map(str, found))}"
            yield f"{what} (allowed: float32, bfloat16); write MixedPrecisionPolicy(reduce_dtype=torch.float32)"
    if ranks.replicate is not None:
        yield from _wrong_copies(ranks, config)


def _wrong_copies(ranks: Ranks, config: CompressConfig) -> Iterator[str]:
    """Yield what is wrong with `config` for HSDP, which has a mesh of two dimensions."""
    gradients, shards = f"/{SECTION}/gradients", ranks.shard.size()
    if shards == 1:
        yield "its mesh shards nothing (the second dimension is 1); use DistributedDataParallel and ddp.attach"
    if config.gradients.method == "powersgd":
        what = '"powersgd" with copies of the model (allowed: every other method)'
        yield f"{gradients}/method: {what}; choose another, or a mesh of one dimension"
    on_node = ranks_per_node(config)
    if on_node is not None and on_node != shards:
        what = f"{on_node}, but {shards} ranks share each copy of the model (allowed: {shards})"
        yield f"{gradients}/hierarchy/ranks_per_node: {what}. Write {shards}"
    if config.monitor.cosine_every:
        what = f"{config.monitor.cosine_every} with copies of the model, of which no rank has the true mean"
        yield f"/{SECTION}/monitor/cosine_every: {what} (allowed: 0). Write 0"


def find_weight_limits(units: Sequence[Unit], weights: CompressedWeights, rounded: frozenset[str]) -> Iterator[str]:
    """Yield what is wrong with `weights`, or with what `units` gather together with any of the parameters `rounded`."""
    place, found = f"/{SECTION}/weights", weights.model_dump(include={"method", "bits", "rounding"})
    if (found["method"], found.get("rounding")) != ("blockwise", "nearest") or found.get("bits", 0) < 4:
        why = "which rounds the weights themselves, not differences (allowed: blockwise, 8 or 4 bits, to nearest)"
        yield f'{place}: {found} cannot be combined with FSDP2, {why}. Write {{"bits": 8}}'
    if weights.overlap:
        what = "true has no effect with FSDP2, which prefetches weights itself (allowed: false)"
        yield f"{place}/overlap: {what}. Write false"
    for unit in (unit for unit in units if not rounded.isdisjoint(unit.names)):
        dtypes = sorted(map(str, unit.gather_dtypes()))
        if len(dtypes) > 1 or not unit.gather_dtypes() <= set(_GATHERED):
            what = f"{unit.names[0]} and the parameters gathered with it have the dtypes {', '.join(dtypes)}"
            yield f"{place}: {what} (allowed: one of float32, bfloat16, float16). Remove the key, or shard them apart"
        for name, one in unit.parameters():
            if hasattr(one._sharded_local_tensor, "fsdp_pre_all_gather"):
                yield f"{place}: {name} defines its own gather (fsdp_pre_all_gather). Remove the key"
