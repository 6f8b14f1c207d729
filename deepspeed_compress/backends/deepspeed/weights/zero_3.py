"""Weight gather of ZeRO 3 in forward and backward: `partition_parameters._dist_allgather_fn`.

No rank keeps what it gathers, so there is no common base for differences. The weights themselves are quantized instead,
as in ZeRO++ with 8 bits (arXiv:2306.10209, section 3.1). The master weights stay exact, and every gather of a step
quantizes them alike. The function is replaced while the parameter coordinator starts the gathers of a submodule in
training. All other gathers (`GatheredParameters`, saving, evaluation) are exact.

Parameters that are not rounded (see `find_rounded`) are gathered by DeepSpeed in a message of their own, whose bits
nothing touches. Which they are is decided when the engine is attached, so all ranks send the same messages in the same
order.

Persistent parameters are among them. DeepSpeed gathers them after each optimizer step and after loading, outside of any
submodule, and releases them in its first backward passes only, while it records the order of modules. If they were
rounded, it would depend on the age of the engine.
"""

import warnings
from functools import cache, partial
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.partition_parameters import MultipleAllGatherHandles, get_allgather_dtype
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.engine_facts import bucket_size
from deepspeed_compress.collectives.buckets import partition_by_owners
from deepspeed_compress.collectives.payload import PendingGather
from deepspeed_compress.collectives.weight_reduction import (
    WeightReduction,
    find_rounded,
    warn_of_evaluation,
    warn_without_frozen,
)
from deepspeed_compress.config import CompressedWeights
from deepspeed_compress.config.layout_problems import OWN_GATHERS
from deepspeed_compress.errors import CompressWarning, SeamError, UnsupportedError
from deepspeed_compress.session.patches import replaced
from deepspeed_compress.session.session import Session

_PREFETCH = "_PartitionedParameterCoordinator__prefetch_bucket_sz"
_PREFETCH_KEYS = frozenset({"stage3_prefetch_bucket_size", "prefetch_bucket_size"})


def check_weights_3(engine: Any) -> None:
    """Check that `engine` gathers weights in the way that this module replaces.

    Raises:
        UnsupportedError: a ZeRO setting makes DeepSpeed gather differently.
    """
    config = engine._config.zero_config
    for key, (off, _) in OWN_GATHERS.items():
        # DeepSpeed's attributes have no prefix.
        found = getattr(config, key.removeprefix("stage3_"))
        if found != off:
            raise UnsupportedError(
                f"/deepspeed_compress/weights cannot be combined with /zero_optimization/{key}: {found} (allowed: "
                f"{off}); remove one of the two"
            )


def rounded_parameters(engine: Any, settings: CompressedWeights) -> frozenset[str]:
    """Return the names of the parameters that are rounded when forward and backward gather them."""
    names = engine.param_names
    trained = {names[parameter]: parameter for group in engine.optimizer.fp16_groups for parameter in group}
    frozen = {name: parameter for parameter, name in names.items() if name not in trained}
    persistent = {name for parameter, name in names.items() if parameter.ds_persist}
    return find_rounded(settings, trained, frozen) - persistent


def _warn_of_persistent(engine: Any) -> None:
    """Warn, on rank 0, that no weights are compressed."""
    threshold = engine._config.zero_config.param_persistence_threshold
    text = (
        "/deepspeed_compress/weights has no effect, because ZeRO 3 keeps all parameters of up to "
        f"stage3_param_persistence_threshold: {threshold} elements on every rank, and gathers them exactly (allowed: a "
        "threshold below the size of the largest parameter); write 0, or remove the key"
    )
    if engine.global_rank == 0:
        warnings.warn(text, CompressWarning, stacklevel=4)


def attach_weights_3(engine: Any, weights: WeightReduction, session: Session) -> None:
    """Compress the weights that forward and backward gather, except in dense steps."""
    gathers, patches = _Gathers(engine, weights, session), session.patches
    coordinator = engine.optimizer.parameter_offload.get_param_coordinator()
    patches.wrap(coordinator, "fetch_sub_module", gathers.fetch)
    patches.precede(engine.optimizer, "partition_grads", gathers.note_reduction)
    if not _PREFETCH_KEYS & engine.config.get("zero_optimization", {}).keys():
        # DeepSpeed's default of 50 million would put most models into one message, for which the second layer would
        # wait. After `stage3_allgather_sequential`, DeepSpeed's value is 1 and stays 1.
        if _PREFETCH not in vars(coordinator):
            raise SeamError("PartitionedParameterCoordinator.__prefetch_bucket_sz is missing in this DeepSpeed")
        numel = sum(parameter.ds_numel for parameter in engine.module.parameters())
        patches.replace(coordinator, _PREFETCH, min(vars(coordinator)[_PREFETCH], bucket_size(numel)))
    for parameter in engine.module.parameters():
        # `counted` counts the bytes that DeepSpeed sends and wraps DeepSpeed's own method.
        counted = parameter.all_gather_coalesced
        patches.replace(parameter, "all_gather_coalesced", partial(gathers.gather, counted, counted.__wrapped__))


class _Gathers:
    """Gathers of one engine: compressed while a submodule in training is fetched, except in dense steps."""

    def __init__(self, engine: Any, weights: WeightReduction, session: Session) -> None:
        self._compressing = self._warned = False
        self._module = engine.module
        self._names = engine.param_names
        self._rounded = rounded_parameters(engine, weights.settings)
        warn_without_frozen(weights, self._rounded)
        if all(parameter.ds_persist for parameter in engine.param_names):
            _warn_of_persistent(engine)
        self._session = session
        self._reducer = cache(weights.rounding_reducer)

    def fetch(self, original: Any, current_submodule: Any, forward: bool) -> None:
        """Run DeepSpeed's `fetch_sub_module` with compressed gathers, in training and unless the step is dense."""
        self._compressing = self._module.training and not self._session.plan.dense
        try:
            original(current_submodule, forward=forward)
        finally:
            self._compressing = False

    def note_reduction(self) -> None:
        """Warn, once per engine, if gradients are reduced in evaluation mode, in which all gathers are exact."""
        if self._rounded and not (self._warned or self._module.training or self._session.plan.dense):
            self._warned = True
            warn_of_evaluation()

    def gather(self, counted: Any, original: Any, params: Any, *args: Any, **options: Any) -> Any:
        """Run DeepSpeed's `all_gather_coalesced`, apart for the parameters that are rounded if any are now."""
        exact: list[Any] = []
        rounded: list[Any] = []
        for parameter in params:
            rounds = self._compressing and self._names.get(parameter) in self._rounded
            (rounded if rounds else exact).append(parameter)
        if not rounded:
            return counted(exact, *args, **options)
        first = [counted(exact, *args, **options)] if exact else []
        waiting = {parameter.ds_id: parameter for parameter in sorted(rounded, key=lambda one: one.ds_id)}
        with replaced(partition_parameters, _dist_allgather_fn=partial(self._start, waiting)):
            last = original(list(waiting.values()), *args, **options)
        return MultipleAllGatherHandles([*first, last]) if first else last

    @torch.no_grad()
    def _start(
        self, waiting: dict[int, Any], input_tensor: Tensor, output_tensor: Tensor, group: ProcessGroup
    ) -> PendingGather:
        """Send this rank's shares of parameters, concatenated in `input_tensor`, and start to receive the others'.

        Args:
            waiting: the parameters still to be gathered, by id; those gathered now are removed.
            input_tensor: this rank's shares, flat.
            output_tensor: the shares of all ranks, in order of rank; flat [ranks * share].
            group: the ranks that hold shares.

        Returns:
            The pending gather, with which DeepSpeed does what it does with a handle of torch.distributed: wait.
        """
        rank, share = group.rank(), input_tensor.numel()
        parameters = _take(waiting, share, output_tensor.dtype, group)
        sizes = [(self._names[parameter], parameter.ds_tensor.ds_numel) for parameter in parameters]
        mine = output_tensor[rank * share : (rank + 1) * share]
        if mine.data_ptr() != input_tensor.data_ptr():
            mine.copy_(input_tensor)
        for part, parameter in zip(torch.split(mine, [numel for _, numel in sizes]), parameters, strict=True):
            # DeepSpeed never writes the padding of last shares, and it would spoil the scale of quantization blocks.
            part[max(0, parameter.ds_numel - rank * part.numel()) :].zero_()
        partition = partition_by_owners(tuple(sizes), group.size())
        return self._reducer(group, output_tensor.dtype).start_all_gather(output_tensor, partition)


def _take(waiting: dict[int, Any], share: int, dtype: torch.dtype, group: ProcessGroup) -> list[Any]:
    """Remove from `waiting`, and return, the parameters whose shares are gathered now, in order of their ids.

    DeepSpeed gathers all parameters of one group and dtype at once, or one parameter after the other (with
    `stage3_allgather_sequential`, or if there is only one).

    Raises:
        SeamError: the parameters do not add up to `share` elements.
    """
    alike = [
        parameter
        for parameter in waiting.values()
        if parameter.ds_process_group is group and get_allgather_dtype(parameter, parameter.ds_tensor) == dtype
    ]
    taken = alike[:1] if alike and alike[0].ds_tensor.ds_numel == share else alike
    found = sum(parameter.ds_tensor.ds_numel for parameter in taken)
    if found != share:
        raise SeamError(f"partition_parameters._dist_allgather_fn gathers {share} elements, but {found} are expected")
    for parameter in taken:
        del waiting[parameter.ds_id]
    return taken
