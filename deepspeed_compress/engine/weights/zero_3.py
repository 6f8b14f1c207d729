"""Weights that ZeRO 3 gathers for forward and backward: `partition_parameters._dist_allgather_fn`.

No rank keeps what it gathered, so there is nothing that a difference could be taken to: the weights themselves are
rounded, the masters stay exact, and every gather of a step rounds them alike (ZeRO++, arXiv:2306.10209, section 3.1,
with 8 bits). The function is exchanged while the coordinator of parameters begins the gathers of a submodule in
training. What others gather (`GatheredParameters`, saving, evaluation) is exact.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.buckets import partition_by_owners
from deepspeed_compress.communication.payload import PendingGather
from deepspeed_compress.communication.reduction import WeightReduction
from deepspeed_compress.engine.gradients.early import bucket_size
from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.session.session import Session

__all__ = ["attach_weights_3", "check_weights_3"]

_OFF = (
    ("zero_hpz_partition_size", "zero_hpz_partition_size", 1),
    ("zero_quantized_weights", "zero_quantized_weights", False),
    ("zero_quantized_nontrainable_weights", "zero_quantized_nontrainable_weights", False),
    ("use_all_reduce_for_fetch_params", "stage3_use_all_reduce_for_fetch_params", False),
)
"""Attributes of DeepSpeed's configuration, their keys, and the values with which it gathers by `_dist_allgather_fn`."""


_PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
_PREFETCH_KEYS = frozenset({"stage3_prefetch_bucket_size", "prefetch_bucket_size"})


def check_weights_3(engine: Any) -> None:
    """UnsupportedError where `engine` gathers weights in a way that is not known here."""
    config = engine._config.zero_config
    for name, key, off in _OFF:
        found = getattr(config, name)
        if found != off:
            raise UnsupportedError(
                f"/deepspeed_compress/weights cannot be combined with /zero_optimization/{key}: {found} (allowed: "
                f"{off}); remove one of the two"
            )


def attach_weights_3(engine: Any, weights: WeightReduction, session: Session) -> None:
    """Compress the weights that forward and backward gather, except in dense steps."""
    check_weights_3(engine)
    gathers, patches = _Gathers(engine, weights, session), session.patches
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    patches.wrap(coordinator, "fetch_sub_module", gathers.fetch)
    if not _PREFETCH_KEYS & engine.config.get("zero_optimization", {}).keys():
        patches.replace(coordinator, _PREFETCH, _prefetch_size(engine, coordinator))
    for parameter in engine.module.parameters():
        # `counted` counts what DeepSpeed itself sends, and has the method of DeepSpeed inside.
        counted = parameter.all_gather_coalesced
        patches.replace(parameter, "all_gather_coalesced", partial(gathers.gather, counted, counted.__wrapped__))


def _prefetch_size(engine: Any, coordinator: Any) -> int:
    """Elements that are prefetched at once: DeepSpeed's 50 million would be most models in one message, which the
    second layer waits for. After `stage3_allgather_sequential` it is 1 and stays so."""
    theirs: int | None = vars(coordinator).get(_PREFETCH)
    if theirs is None:
        raise SeamError("PartitionedParameterCoordinator.__prefetch_bucket_sz is missing in this DeepSpeed")
    return min(theirs, bucket_size(sum(parameter.ds_numel for parameter in engine.module.parameters())))


class _Gathers:
    """The gathers of one engine: ours while a submodule in training is fetched, in steps that are not dense."""

    def __init__(self, engine: Any, weights: WeightReduction, session: Session) -> None:
        self._compressing = False
        self._module = engine.module
        self._names = engine.param_names
        self._session = session
        self._reducer = cache(weights.rounding_reducer)

    def fetch(self, original: Any, current_submodule: Any, forward: bool) -> None:
        """DeepSpeed's `fetch_sub_module`."""
        self._compressing = self._module.training and not self._session.dense
        try:
            original(current_submodule, forward=forward)
        finally:
            self._compressing = False

    def gather(self, counted: Any, original: Any, params: Any, *args: Any, **options: Any) -> Any:
        """DeepSpeed's `all_gather_coalesced`."""
        if not self._compressing:
            return counted(params, *args, **options)
        waiting = {parameter.ds_id: parameter for parameter in sorted(params, key=lambda one: one.ds_id)}
        theirs = partition_parameters._dist_allgather_fn
        partition_parameters._dist_allgather_fn = partial(self._start, waiting)
        try:
            return original(list(waiting.values()), *args, **options)
        finally:
            partition_parameters._dist_allgather_fn = theirs

    @torch.no_grad()
    def _start(
        self, waiting: dict[int, Any], input_tensor: Tensor, output_tensor: Tensor, group: ProcessGroup
    ) -> PendingGather:
        """Send this rank's shares of parameters, side by side in `input_tensor`, and begin to receive the others'."""
        rank, share = group.rank(), input_tensor.numel()
        parameters = _take(waiting, share, output_tensor.dtype, group)
        sizes = [(self._names[one], one.ds_tensor.ds_numel) for one in parameters]
        mine = output_tensor[rank * share : (rank + 1) * share]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        _clear_padding(mine, parameters, rank)
        partition = partition_by_owners(tuple(sizes), group.size())
        # DeepSpeed waits for it as for a handle of torch.distributed.
        return self._reducer(group, output_tensor.dtype).start_all_gather(output_tensor, partition)


def _clear_padding(shares: Tensor, parameters: Sequence[Any], rank: int) -> None:
    """DeepSpeed never writes the elements that fill up the last shares; what lies there would spoil their blocks."""
    sizes = [parameter.ds_tensor.ds_numel for parameter in parameters]
    for share, parameter in zip(torch.split(shares, sizes), parameters, strict=True):
        share[max(0, parameter.ds_numel - rank * share.numel()) :].zero_()


def _take(waiting: dict[int, Any], share: int, dtype: torch.dtype, group: ProcessGroup) -> list[Any]:
    """The parameters whose shares are gathered now, taken out of those `waiting` for it, by their ids.

    DeepSpeed gathers what belongs to one group and travels in one type at once, or one parameter after the other
    (`stage3_allgather_sequential`, and where there is only one).
    """
    alike = [
        parameter
        for parameter in waiting.values()
        if parameter.ds_process_group is group and get_allgather_dtype(parameter, parameter.ds_tensor) == dtype
    ]
    taken = alike[:1] if alike and alike[0].ds_tensor.ds_numel == share else alike
    found = sum(parameter.ds_tensor.ds_numel for parameter in taken)
    if found != share:
        raise SeamError(
            f"partition_parameters._dist_allgather_fn gathers {share} elements where {found} are waited for"
        )
    for parameter in taken:
        del waiting[parameter.ds_id]
    return taken
