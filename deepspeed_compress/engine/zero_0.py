"""Without ZeRO, and for the bf16 optimizer that keeps fp32 gradients: `DeepSpeedEngine.allreduce_bucket`.

DeepSpeed flattens the gradients of a bucket, all-reduces them and hands the flat mean back. Sparse gradients (of
`nn.Embedding(sparse=True)`) go another way, `sparse_all_gather`, which is DeepSpeed's own and only counted.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from deepspeed_compress.communication.buckets import even_partition
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.engine.session import Session
from deepspeed_compress.engine.traffic import ring_all_gather, ring_all_reduce

__all__ = ["attach_zero_0"]

Bucket = Sequence[Tensor]
Contents = Sequence[tuple[str, int]]
"""(parameter, numel) of what lies in a flat tensor, in its order; padding is named `PADDING`."""


def attach_zero_0(engine: Any, session: Session) -> Callable[[], int]:
    """Replace, or for method "none" only count, the all-reduce of gradient buckets.

    It becomes an attribute of this engine alone; DeepSpeed's class stays as it is. Returns a function that gives the
    bytes that this rank sends for weights in an optimizer step: the bf16 optimizer partitions its states, and gathers.
    """
    reduce = _count if session.config.gradients.method == "none" else _reduce
    session.patches.wrap(engine, "allreduce_bucket", partial(reduce, engine, session))
    session.patches.wrap(engine, "sparse_all_gather", partial(_count_sparse, session))
    flats = getattr(engine.optimizer, "bf16_groups_flat", [])
    return lambda: sum(ring_all_gather(flat.nbytes, engine.seq_data_parallel_group.size()) for flat in flats)


def _count(
    engine: Any, session: Session, original: Any, bucket: Bucket, dp_group: Any, *rest: Any, **named: Any
) -> Any:
    _count_uncompressed(engine, session, bucket, dp_group)
    session.meter.bytes_sent = session.meter.bytes_uncompressed
    return original(bucket, dp_group, *rest, **named)


def _reduce(
    engine: Any, session: Session, original: Any, bucket: Bucket, dp_group: Any, dp_world_size: float | None = None
) -> Tensor:
    _count_uncompressed(engine, session, bucket, dp_group)
    contents = _contents(engine)
    flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
    sizes = [entry for tensor in bucket for entry in contents[tensor.data_ptr()]]
    divisor = (dp_world_size or dp_group.size()) if engine.gradient_average else 1.0
    session.reduce(flat, even_partition(sizes, dp_group.size()), 1.0 / divisor, everywhere=True)
    return flat


def _count_uncompressed(engine: Any, session: Session, bucket: Bucket, dp_group: Any) -> None:
    size = sum(tensor.numel() for tensor in bucket) * engine.communication_data_type.itemsize
    session.meter.bytes_uncompressed += ring_all_reduce(size, dp_group.size())


def _contents(engine: Any) -> dict[int, Contents]:
    """What lies in each tensor that DeepSpeed may put into a bucket, by its address."""
    if isinstance(engine.optimizer, BF16_Optimizer):
        return dict(_contents_of_groups(engine.optimizer, engine.param_names))
    return {
        parameter.grad.data_ptr(): [(engine.param_names[parameter], parameter.numel())]
        for parameter in engine.module.parameters()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }


def _contents_of_groups(optimizer: Any, names: Any) -> Any:
    """The bf16 optimizer has one buffer of gradients for each of its groups (`get_grads_for_reduction`)."""
    for flat, group in zip(optimizer.fp32_groups_gradients_flat, optimizer.bf16_groups, strict=True):
        sizes = [(names[parameter], parameter.numel()) for parameter in group]
        padding = flat.numel() - sum(numel for _, numel in sizes)
        yield flat.data_ptr(), [*sizes, (PADDING, padding)]


def _count_sparse(session: Session, original: Any, value: Tensor, dp_group: Any) -> list[Tensor]:
    """Rows of sparse gradients are gathered, padded to those of the rank that has most."""
    gathered: list[Tensor] = original(value, dp_group)
    sent = (dp_group.size() - 1) * max(one.nbytes for one in gathered)
    for kind in ("bytes_uncompressed", "bytes_sent", "bytes_raw"):
        session.meter.count(kind, sent)
    return gathered
