"""Without ZeRO, and for the bf16 optimizer that keeps fp32 gradients: `DeepSpeedEngine.allreduce_bucket`.

DeepSpeed flattens the gradients of a bucket, all-reduces them and hands the flat mean back.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.buckets import even_partition
from deepspeed_compress.engine.session import Session
from deepspeed_compress.engine.traffic import ring_all_gather, ring_all_reduce

__all__ = ["attach_zero_0"]


def attach_zero_0(engine: Any, session: Session) -> Callable[[], int]:
    """Replace, or for method "none" only count, the all-reduce of gradient buckets.

    It becomes an attribute of this engine alone; DeepSpeed's class stays as it is. Returns a function that gives the
    bytes that this rank sends for weights in an optimizer step: the bf16 optimizer partitions its states, and gathers.
    """
    original = engine.allreduce_bucket

    def allreduce_bucket(bucket: list[Tensor], dp_group: Any, dp_world_size: float | None = None) -> Tensor:
        ranks = dp_group.size()
        numel = sum(tensor.numel() for tensor in bucket)
        session.meter.bytes_uncompressed += ring_all_reduce(numel * engine.communication_data_type.itemsize, ranks)
        if session.config.gradients.method == "none":
            session.meter.bytes_sent = session.meter.bytes_uncompressed
            return original(bucket, dp_group, dp_world_size)  # type: ignore[no-any-return]
        names = dict(_gradient_names(engine))
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        sizes = [(names[tensor.data_ptr()], tensor.numel()) for tensor in bucket]
        divisor = (dp_world_size or ranks) if engine.gradient_average else 1.0
        session.reduce(flat, even_partition(sizes, ranks), 1.0 / divisor, everywhere=True)
        return flat

    engine.allreduce_bucket = allreduce_bucket
    flats = getattr(engine.optimizer, "bf16_groups_flat", [])
    return lambda: sum(ring_all_gather(flat.nbytes, engine.seq_data_parallel_group.size()) for flat in flats)


def _gradient_names(engine: Any) -> Iterator[tuple[int, str]]:
    """Address of each gradient that DeepSpeed may put into a bucket, and the name of its parameter."""
    names = engine.param_names
    for parameter in engine.module.parameters():
        if parameter.grad is not None:
            yield parameter.grad.data_ptr(), names[parameter]
        if getattr(parameter, "_hp_grad", None) is not None:
            yield parameter._hp_grad.data_ptr(), names[parameter]
