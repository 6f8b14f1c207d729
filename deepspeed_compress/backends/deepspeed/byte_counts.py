"""Byte counts of divided models, taken where DeepSpeed calls its communication backend.

Everything that DeepSpeed sends passes through one object, `deepspeed.comm.comm.cdb`: activations and their gradients
between stages, gradients of tied weights, the collectives of tensor parallelism, tokens between ranks that share
experts, and the all-to-alls of sequence parallelism. While engines with such traffic exist, methods of that object are
replaced by ones that count messages to the groups of the running engine. They count from a forward pass with gradients
to the end of the optimizer step, so evaluations and checkpoints are excluded.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.comm import comm
from deepspeed.module_inject.layers import TensorParallel_Layer
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from deepspeed_compress.backends.activations.messages import AllToAllCall
from deepspeed_compress.backends.deepspeed.activations.experts import find_expert_layers
from deepspeed_compress.backends.deepspeed.engine_facts import stage_count, tensor_size
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.monitor import KINDS, Meter, ring_all_gather, ring_all_reduce
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.reporting import ByteReport, Sizes

_BACKEND = "deepspeed.comm.torch:TorchBackend."

SEAMS = (
    Seam("deepspeed.runtime.engine:DeepSpeedEngine._backward_prologue", "self"),
    Seam("deepspeed.runtime.engine:DeepSpeedEngine.destroy", "self"),
    Seam("deepspeed.runtime.pipe.engine:PipelineEngine.train_batch", "self data_iter"),
    Seam("deepspeed.runtime.pipe.module:PipelineModule.get_tied_weights_and_groups", "self"),
    Seam(_BACKEND + "inference_all_reduce", "self tensor op group"),
    *(Seam(_BACKEND + name) for name in ("all_reduce", "all_gather_into_tensor", "all_to_all_single", "send", "isend")),
)

_STAGES = "stages"
"""Placeholder for a group name, for messages between neighboring pipeline stages, which are sent one by one."""

_ALL_TO_ALL = "all_to_all:"
"""Prefix of the name of a group, for all-to-alls. Other messages to the same ranks are norms, losses and flags."""

_Sent = tuple[str | None, Callable[[], int]]
"""Name of the group, and a function that returns the bytes that this rank sends to it."""


def _all_reduce(tensor: Tensor, op: Any = None, group: Any = None, async_op: bool = False) -> _Sent:
    return _name(group), lambda: ring_all_reduce(tensor.nbytes, group.size())


def _all_gather(output_tensor: Tensor, input_tensor: Tensor, group: Any = None, async_op: bool = False) -> _Sent:
    return _name(group), lambda: ring_all_gather(output_tensor.nbytes, group.size())


def _send(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> _Sent:
    return _STAGES, lambda: tensor.nbytes


def _all_to_all(*args: Any, **options: Any) -> _Sent:
    call = AllToAllCall(*args, **options)
    return f"{_ALL_TO_ALL}{_name(call.group)}", call.bytes_sent


_SENT: Mapping[str, Callable[..., _Sent]] = {
    "all_reduce": _all_reduce,
    "inference_all_reduce": _all_reduce,
    "all_gather_into_tensor": _all_gather,
    "all_to_all_single": _all_to_all,
    "send": _send,
    "isend": _send,
}
"""Backend methods that divided models call. Parameters have the same names and order as there."""


def _name(group: Any) -> str | None:
    return getattr(group, "group_name", None)


@dataclass(frozen=True)
class _ByteAccount:
    """Fields of `meter` to which the bytes of one engine are added, by group name.

    It stores names rather than groups because the backend, which holds the account, outlives the groups.
    """

    meter: Meter
    fields: Mapping[str, str]

    def add(self, group: str | None, size: Callable[[], int]) -> None:
        if group is not None and group in self.fields:
            self.meter.count(self.fields[group], size())


@dataclass
class _TrafficCounter:
    """Counter of a backend's traffic, for one engine at a time.

    Attributes:
        account: the account of the engine that started a pass last; None between passes.
        engines: the number of attached engines.
        methods: the counting methods, by name.
    """

    account: _ByteAccount | None = None
    engines: int = 0
    methods: dict[str, Callable[..., Any]] = field(default_factory=dict)

    def counted(self, method: Callable[..., Any], sent: Callable[..., _Sent]) -> Callable[..., Any]:
        @wraps(method)
        def counted(*args: Any, **options: Any) -> Any:
            # Checked first, because a compiled graph must not depend on counters.
            if not torch.compiler.is_compiling() and self.account is not None:
                self.account.add(*sent(*args, **options))
            return method(*args, **options)

        return counted


_LISTENER = "_compress_listener"
"""Attribute of the backend that holds its `_TrafficCounter`."""


def _join(backend: Any) -> _TrafficCounter:
    """Return the counter of `backend`, installed if necessary, with one more engine."""
    if _LISTENER not in vars(backend):
        made = _TrafficCounter()
        made.methods |= {name: made.counted(getattr(backend, name), sent) for name, sent in _SENT.items()}
        vars(backend).update({_LISTENER: made, **made.methods})
    listener: _TrafficCounter = vars(backend)[_LISTENER]
    listener.engines += 1
    return listener


def _leave(backend: Any, listener: _TrafficCounter, account: _ByteAccount, handle: Any) -> None:
    """Undo `_join` and the hook of `count_parallel`. After the last engine, the backend gets its own methods back."""
    handle.remove()
    if listener.account is account:
        listener.account = None
    listener.engines -= 1
    if not listener.engines:
        for name, ours in {_LISTENER: listener, **listener.methods}.items():
            if vars(backend).get(name) is ours:
                delattr(backend, name)


def count_parallel(engine: Any, meter: Meter, patches: Patches) -> Callable[[], None]:
    """Count in `meter` the bytes that ranks with different parts of a model send, until the engine is destroyed.

    Returns:
        A function to call after every optimizer step. Without such traffic, nothing is replaced and it does nothing.
    """
    account = _ByteAccount(meter, _fields(engine))
    if not account.fields:
        return lambda: None
    backend, listener = comm.cdb, _join(comm.cdb)
    run, rest = partial(setattr, listener, "account", account), partial(setattr, listener, "account", None)

    def begin(*_: Any) -> None:
        if not torch.compiler.is_compiling():
            (run if torch.is_grad_enabled() else rest)()

    handle = engine.module.register_forward_pre_hook(begin)
    patches.end_with(engine, _leave, backend, listener, account, handle)
    patches.precede(engine, "_backward_prologue", run)
    patches.precede(engine, "_take_model_step", run)
    if isinstance(engine, PipelineEngine):
        patches.precede(engine, "train_batch", run)
    return rest


def _fields(engine: Any) -> dict[str, str]:
    """Return the fields of the meter, by the names of the groups that they count."""
    layers = [layer for layer in engine.module.modules() if isinstance(layer, TensorParallel_Layer)]
    fields: dict[str, str] = {layer.mp_group.group_name: "bytes_tensor" for layer in layers if layer.tp_world_size > 1}
    fields |= {f"{_ALL_TO_ALL}{layer.ep_group.group_name}": "bytes_experts" for layer in find_expert_layers(engine)}
    if engine.sequence_parallel_size > 1:
        fields[f"{_ALL_TO_ALL}{engine.seq_parallel_group.group_name}"] = "bytes_sequence"
    if isinstance(engine, PipelineEngine) and engine.num_stages > 1:
        tied = {group.group_name: "bytes_tied" for _, group in engine.module.get_tied_weights_and_groups()}
        fields |= {_STAGES: "bytes_pipeline", **tied}
        # Ranks with the same layers each send a part of the activations, which are all-gathered afterwards.
        fields[engine.grid.get_slice_parallel_group().group_name] = "bytes_tensor"
    return fields


def make_byte_report(engine: Any) -> ByteReport:
    """Return a function that selects the byte counts to report; it returns them on rank 0 only, and None elsewhere.

    The reported rank is the one that sends the most, because it sets the pace; the first of several. If the model is
    not divided beyond ZeRO, all ranks send alike, and rank 0's own counts are used. Otherwise the function is a
    collective within each island.
    """
    whole = engine.mpu.whole if isinstance(engine.mpu, IslandUnit) else dist.group.WORLD
    split, spread = tensor_size(engine) > 1, bool(find_expert_layers(engine))
    divided = split or spread or stage_count(engine) > 1

    def report(sizes: Sizes) -> tuple[int, Sizes] | None:
        tables = [sizes]
        if divided:
            mine = torch.tensor(list(sizes.values()), device=engine.device)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(whole))]
            dist.all_gather(every, mine, group=whole)
            tables = [dict(zip(sizes, row, strict=True)) for row in torch.stack(every).tolist()]
        if engine.global_rank != 0:
            return None
        rank, found = max(enumerate(tables), key=lambda entry: sum(entry[1][kind] for kind in KINDS))
        # Traffic inside a compiled graph cannot be counted.
        inside = {"bytes_tensor": split, "bytes_experts": spread} if engine.is_compiled else {}
        return rank, {**found, **{kind: None for kind, sent in inside.items() if sent}}

    return report
