"""Parameters that Megatron reduces together, and the layout and ownership of the elements in their buckets.

Source: `_ParamAndGradBuffer` of megatron/core/distributed/param_and_grad_buffer.py. With the distributed optimizer, a
bucket is padded between parameters and at its end, and cut into equal shares; rank r of the data-parallel group has the
fp32 master weights of the r-th share. Without it, every rank has all of them. Experts have a separate data-parallel
group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from deepspeed_compress.collectives.buckets import Partition, even_partition, flat_sizes
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.model_families import user_name
from deepspeed_compress.monitor import ring_all_gather


@dataclass(frozen=True, eq=False)
class Bucket:
    """A bucket of gradients.

    Attributes:
        gradients: flat view of the gradients, without the padding at the end.
        partition: owners of the elements.
        scale: factor of the sum over the ranks that gives Megatron's result.
    """

    gradients: Tensor
    partition: Partition
    scale: float


@dataclass(frozen=True, eq=False)
class BucketGroup:
    """Megatron's bucket group `source` with its buckets, which are reduced together."""

    source: Any
    buckets: Sequence[Bucket]

    @property
    def distributed(self) -> bool:
        """Return True if a rank needs only the sums of its share."""
        return bool(self.source.ddp_config.use_distributed_optimizer)


def name_parameters(chunks: Sequence[Any]) -> dict[str, Parameter]:
    """Return the trained parameters by unique name.

    The name is that in their chunk, prefixed with the chunk's number if there are several.
    """
    return {
        f"{number}.{name}" if len(chunks) > 1 else name: parameter
        for number, chunk in enumerate(chunks)
        for name, parameter in chunk.module.named_parameters()
        if parameter.requires_grad
    }


@dataclass(frozen=True)
class Share:
    """Parameters of `chunks` that are reduced over one group: those of `experts`, or all others.

    `names` has a unique name for every parameter of either kind.
    """

    chunks: Sequence[Any]
    names: Mapping[Parameter, str]
    experts: bool

    @property
    def sources(self) -> list[Any]:
        """Return Megatron's bucket groups, chunk after chunk."""
        kind = "expert_parallel_bucket_groups" if self.experts else "bucket_groups"
        return [group for chunk in self.chunks for group in getattr(chunk, kind)]

    @property
    def whole(self) -> ProcessGroup | None:
        """Return the ranks of the reduction, or None for experts if there is nothing to reduce."""
        first = self.chunks[0]
        group: ProcessGroup = first.intra_expt_dp_group if self.experts else first.intra_dp_cp_group
        nothing = self.experts and (not self.sources or group.size() == 1)
        return None if nothing else group

    @property
    def group(self) -> ProcessGroup:
        """Return `whole`, which must not be None."""
        assert self.whole is not None
        return self.whole

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    def weight_bytes(self, sources: Sequence[Any]) -> int:
        """Return the bytes that a rank sends per step for the weights of bucket groups.

        0 without the distributed optimizer.
        """
        buckets = [bucket for source in sources for bucket in source.buckets if bucket.param_data is not None]
        return sum(ring_all_gather(bucket.param_data.nbytes, self.group.size()) for bucket in buckets)

    @cached_property
    def groups(self) -> list[BucketGroup]:
        """Return the bucket groups with their buckets."""
        return [BucketGroup(source, [self._bucket(one, source) for one in source.buckets]) for source in self.sources]

    def _bucket(self, bucket: Any, source: Any) -> Bucket:
        """Return the description of a bucket, without the padding at its end, which is not sent."""
        ranks, named = self.group.size(), [(self.names[one], one.main_grad) for one in bucket.params_list]
        segments = even_partition(flat_sizes(bucket.grad_data, named), ranks).segments
        last = max(number for number, segment in enumerate(segments) if segment.parameter != PADDING)
        partition = Partition(segments[: last + 1], ranks)
        divided = ranks if source.ddp_config.average_in_collective else 1
        return Bucket(bucket.grad_data[: partition.numel], partition, bucket.gradient_scaling_factor / divided)

    def described(self) -> Parameters:
        """Return the description of the parameters for reducers.

        Collective: all ranks of the job must call this, because overrides may refer to parameters of other ranks.
        """
        here = {one for group in self.sources for one in group.params}
        mine = {name: one for one, name in self.names.items() if one in here}
        called = {name: _called(one, name) for name, one in mine.items()}
        found = gather_objects(sorted(set(called.values())))
        dtypes = {bucket.grad_data.dtype for group in self.sources for bucket in group.buckets}
        return Parameters(
            shapes={name: tuple(one.shape) for name, one in mine.items()},
            everywhere=sorted({name for names in found for name in names}),
            excluded=frozenset(name for name, one in mine.items() if self._copied(one)),
            dtype=reduce(torch.promote_types, dtypes) if dtypes else torch.float32,
            user_names=called,
        )

    def _copied(self, parameter: Parameter) -> bool:
        """Return True if tensor-parallel ranks hold copies.

        Copies would diverge if they were compressed in different messages.
        """
        return self._tensor_size > 1 and not getattr(parameter, "tensor_model_parallel", False)

    @property
    def _tensor_size(self) -> int:
        """Return the number of ranks that share a layer."""
        first = self.chunks[0]
        of_experts = first.config.expert_tensor_parallel_size if self.experts else None
        return int(of_experts or first.tp_group.size())


def _called(parameter: Parameter, name: str) -> str:
    """Return the user-facing name of a parameter, without the number of its chunk and the prefixes of wrappers."""
    plain = name.partition(".")[2] if name.partition(".")[0].isdigit() else name
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return user_name(parameter, plain)
