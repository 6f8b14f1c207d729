"""Gradient reduction without ZeRO and with the bf16 optimizer: `DeepSpeedEngine.allreduce_bucket`.

DeepSpeed flattens the gradients of a bucket, all-reduces them, and copies the flat mean back. It does so after
backward, and in one bucket for most models. On CPU, the backend's own threads send messages, so buckets are smaller and
begin during backward (`early`). Sparse gradients (of `nn.Embedding(sparse=True)`) take DeepSpeed's `sparse_all_gather`;
their bytes are only counted.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.engine import MEMORY_OPT_ALLREDUCE_SIZE
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from deepspeed_compress.backends.deepspeed.engine_facts import bucket_size
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions, reduces_now
from deepspeed_compress.backends.deepspeed.groups import reduction_group
from deepspeed_compress.backends.deepspeed.versions import may_defer_reductions
from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, even_partition
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import ring_all_gather, ring_all_reduce
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.session import Session

Bucket = Sequence[Tensor]


def attach_zero_0(engine: Any, session: Session) -> int:
    """Replace the all-reduce of gradient buckets; for method "none", only count its bytes.

    The replacement is an attribute of this engine alone; DeepSpeed's class is unchanged.

    Returns:
        The bytes that this rank sends for weights in one optimizer step. The bf16 optimizer partitions its states and
        gathers the weights; other optimizers send none.
    """
    buckets = _Buckets(engine, session)
    session.replace_reduction(buckets.replace, buckets.only_count)
    session.patches.wrap(engine, "sparse_all_gather", partial(_count_sparse, session))
    flats, groups = (getattr(engine.optimizer, name, []) for name in ("bf16_groups_flat", "real_dp_process_group"))
    return sum(ring_all_gather(flat.nbytes, group.size()) for flat, group in zip(flats, groups, strict=True))


class _Buckets:
    """Reduction, or counting, of the buckets that DeepSpeed fills: lists of gradients."""

    def __init__(self, engine: Any, session: Session) -> None:
        self._engine, self._session, self._names = engine, session, _Names(engine)
        self._early: EarlyReductions | None = None

    def replace(self, patches: Patches) -> None:
        """Reduce in place of DeepSpeed, and begin during backward if possible."""
        engine = self._engine
        patches.wrap(engine, "allreduce_bucket", self._reduce)
        if not may_begin_early(engine):
            return
        reduces = partial(self._in_buckets, engine.buffered_allreduce_fallback)
        early = EarlyReductions(self._session, _Gradients(engine, self._names), reduces, patches)
        patches.replace(self, "_early", early)
        patches.replace(engine, "buffered_allreduce_fallback", early.reduce)
        # DeepSpeed's `destroy` removes its own hooks only.
        self._session.patches.precede(engine, "destroy", early.remove_hooks)

    def only_count(self, patches: Patches) -> None:
        """Leave the reduction to DeepSpeed, and count its bytes."""
        patches.wrap(self._engine, "allreduce_bucket", self._count)
        patches.wrap(self._engine, "allreduce_and_copy", self._unless_alone)

    def _count(self, original: Any, bucket: Bucket, dp_group: Any, *rest: Any, **named: Any) -> Any:
        self._session.meter.count_engine_reduction(self._uncompressed_bytes(bucket, dp_group))
        return original(bucket, dp_group, *rest, **named)

    def _unless_alone(
        self, original: Any, small_bucket: Bucket, dp_group: Any, dp_world_size: float | None = None
    ) -> None:
        """Call DeepSpeed's `allreduce_and_copy` unless it would change nothing.

        With a single rank (in an island of one rank, for example), DeepSpeed copies the gradients to a bucket and back
        in every step, although they are already their mean.
        """
        cast = small_bucket[0].dtype != self._engine.communication_data_type
        scaled = self._engine.gradient_predivide_factor() != 1.0 or dp_world_size not in (None, 1)
        if dp_group.size() > 1 or cast or scaled:
            original(small_bucket, dp_group, dp_world_size)

    def _reduce(self, original: Any, bucket: Bucket, dp_group: Any, dp_world_size: float | None = None) -> Tensor:
        """Reduce a bucket in place of DeepSpeed's `allreduce_bucket`, and return the flat mean."""
        self._session.meter.count("bytes_uncompressed", self._uncompressed_bytes(bucket, dp_group))
        sizes, dtype = self._contents(bucket), bucket[0].dtype
        begun = self._early.take(dtype, dtype, tuple(name for name, _ in sizes)) if self._early is not None else None
        if begun is not None:
            begun.finish(begun.bucket)
            return begun.bucket  # type: ignore[no-any-return]
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        divisor = (dp_world_size or dp_group.size()) if self._engine.gradient_average else 1.0
        partition = even_partition(sizes, dp_group.size())
        self._session.gradients.reduce(flat, partition, 1.0 / divisor, everywhere=True)
        return flat

    def _in_buckets(
        self, original: Any, grads: Any = None, elements_per_buffer: int = MEMORY_OPT_ALLREDUCE_SIZE
    ) -> None:
        """Call DeepSpeed's `buffered_allreduce_fallback`, with smaller buckets if they can begin early.

        A reducer that works in phases keeps the large buckets, because it waits for each phase of each bucket.
        """
        size = elements_per_buffer
        if isinstance(self._session.gradients.reducer, PayloadReducer):
            numel = sum(parameter.numel() for parameter in self._names.of if parameter.requires_grad)
            size = min(size, bucket_size(numel))
        original(grads=grads, elements_per_buffer=size)

    def _uncompressed_bytes(self, bucket: Bucket, dp_group: Any) -> int:
        """Return the bytes that this rank sends if DeepSpeed all-reduces `bucket`."""
        size = sum(tensor.numel() for tensor in bucket) * self._engine.communication_data_type.itemsize
        return ring_all_reduce(size, dp_group.size())

    def _contents(self, bucket: Bucket) -> list[tuple[str, int]]:
        """Return (parameter, numel) of each part of `bucket`, in order. Padding is named `PADDING`."""
        optimizer = self._engine.optimizer
        known: dict[int, list[tuple[str, int]]] = {}
        if not isinstance(optimizer, BF16_Optimizer):
            known = _contents_of_gradients(self._names.of)
            if any(tensor.data_ptr() not in known for tensor in bucket):
                known = _contents_of_gradients(dict(self._names.trained()))
        else:
            # The gradient buffer of each group (`get_grads_for_reduction`).
            for flat, group in zip(optimizer.fp32_groups_gradients_flat, optimizer.bf16_groups, strict=True):
                sizes = [(self._names.of[parameter], parameter.numel()) for parameter in group]
                padding = flat.numel() - sum(numel for _, numel in sizes)
                known[flat.data_ptr()] = [*sizes, (PADDING, padding)]
        return [entry for tensor in bucket for entry in known[tensor.data_ptr()]]


def _contents_of_gradients(names: Mapping[Any, str]) -> dict[int, list[tuple[str, int]]]:
    """Return the contents of each dense gradient, by its address; see `_Buckets._contents`."""
    return {
        parameter.grad.data_ptr(): [(name, parameter.numel())]
        for parameter, name in names.items()
        if parameter.grad is not None and parameter.grad.layout == torch.strided
    }


def may_begin_early(engine: Any) -> bool:
    """Return True if reductions may begin before backward ends.

    This requires a backend with its own threads (CPU), and gradients that are those of the parameters.
    """
    own = not isinstance(engine.optimizer, BF16_Optimizer) and not isinstance(engine, PipelineEngine)
    on_host = torch.device(engine.device).type == "cpu"
    return own and on_host and not engine.has_moe_layers and may_defer_reductions()


_ADDED = (
    "/deepspeed_compress/gradients: the program has added parameters to the model of an engine, whose gradients are "
    "sent uncompressed; add them before the engine is made"
)


class _Names:
    """Names of the parameters of an engine, also of those that the program has added since the engine was made.

    No settings apply to added parameters, so their gradients are sent uncompressed.
    """

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.of: dict[Any, str] = dict(engine.param_names)
        self.parameters: dict[str, Any] = {name: parameter for parameter, name in self.of.items()}
        """Parameters by name."""

    def trained(self) -> Iterator[tuple[Any, str]]:
        """Yield the trained parameters that the model has now, with their names. This takes milliseconds."""
        for parameter in self._engine.module.parameters():
            if parameter.requires_grad:
                if parameter not in self.of:
                    name = f"added {len(self.of)}"
                    self.of[parameter], self.parameters[name] = name, parameter
                    warnings.warn(_ADDED, CompressWarning, stacklevel=2)
                yield parameter, self.of[parameter]


class _Gradients:
    """Gradients of a DeepSpeed engine without ZeRO; see `Gradients`."""

    everywhere = True

    def __init__(self, engine: Any, names: _Names) -> None:
        self.group = self.asking = reduction_group(engine)
        self.device = torch.device(engine.device)
        # The same divisor that `_reduce_non_expert_gradients` passes to `allreduce_bucket`.
        ranks = self.group.size() / engine.sequence_parallel_size
        self.scale = 1.0 / ranks if engine.gradient_average else 1.0
        self.partition = lru_cache(maxsize=LAYOUTS)(self._partition)
        self._engine = engine
        self._names = names

    def hooked(self) -> Iterator[tuple[Any, str]]:
        return self._names.trained()

    def of(self, key: str) -> Tensor:
        parameter = self._names.parameters[key]
        dense = parameter.grad is not None and parameter.grad.layout == torch.strided
        return (parameter.grad if dense else torch.zeros_like(parameter)).reshape(-1)

    def due(self) -> Iterator[str]:
        """Yield the keys of the gradients that DeepSpeed is about to reduce.

        Parameters without a gradient count as zeros. Sparse gradients are reduced elsewhere.
        """
        for parameter, name in self._names.trained():
            if parameter.numel() and (parameter.grad is None or parameter.grad.layout == torch.strided):
                yield name

    def side_by_side(self, keys: tuple[str, ...]) -> tuple[str, ...]:
        """Return `keys` unchanged: a bucket is divided evenly, whatever its order."""
        return keys

    def complete_now(self) -> bool:
        return reduces_now(self._engine) and bool(self._engine.is_gradient_accumulation_boundary())

    def _partition(self, keys: tuple[str, ...]) -> Partition:
        return even_partition([(name, self._names.parameters[name].numel()) for name in keys], self.group.size())


def _count_sparse(session: Session, original: Any, value: Tensor, dp_group: Any) -> list[Tensor]:
    """Gather rows of sparse gradients with DeepSpeed's function, and count the bytes.

    Each rank's rows are padded to those of the rank that has the most.
    """
    gathered: list[Tensor] = original(value, dp_group)
    sent = (dp_group.size() - 1) * max(one.nbytes for one in gathered)
    for kind in ("bytes_uncompressed", "bytes_sent", "bytes_raw"):
        session.meter.count(kind, sent)
    return gathered
