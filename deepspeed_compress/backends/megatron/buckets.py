"""Layout and ownership of the elements in Megatron's buckets of gradients and weights.

Source: `_ParamAndGradBuffer` of megatron/core/distributed/param_and_grad_buffer.py. With the distributed optimizer, a
bucket is padded between parameters and at its end, and cut into equal shares; rank r of the data-parallel group has the
fp32 master weights of the r-th share. Without it, every rank has all of them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.collectives.buckets import Partition, even_partition
from deepspeed_compress.compression.segments import PADDING


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


def describe(groups: Sequence[Any], names: Mapping[Parameter, str], ranks: int) -> list[BucketGroup]:
    """Return descriptions of Megatron's bucket `groups`, which are reduced over `ranks` ranks."""
    return [BucketGroup(group, [_bucket(one, group, names, ranks) for one in group.buckets]) for group in groups]


def _bucket(bucket: Any, group: Any, names: Mapping[Parameter, str], ranks: int) -> Bucket:
    sizes = flat_sizes(bucket.grad_data, [(names[one], one.main_grad) for one in bucket.params_list])
    partition = _without_end(even_partition(sizes, ranks))
    divided = ranks if group.ddp_config.average_in_collective else 1
    return Bucket(bucket.grad_data[: partition.numel], partition, bucket.gradient_scaling_factor / divided)


def flat_sizes(flat: Tensor, views: Sequence[tuple[str, Tensor]]) -> list[tuple[str, int]]:
    """Return the (name, numel) pairs of the content of `flat`, in order: its named `views`, and `PADDING`."""
    return [(name, numel) for name, numel in _pieces(flat, views) if numel]


def _pieces(flat: Tensor, views: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, int]]:
    end = 0
    for name, view in sorted(views, key=lambda one: one[1].data_ptr()):
        offset = (view.data_ptr() - flat.data_ptr()) // flat.element_size()
        assert end <= offset <= flat.numel() - view.numel(), f"{name} is not a part of its bucket"
        yield PADDING, offset - end
        yield name, view.numel()
        end = offset + view.numel()
    yield PADDING, flat.numel() - end


def _without_end(partition: Partition) -> Partition:
    """Return the partition without the padding at its end, which is not sent. Shares do not change."""
    last = max(number for number, segment in enumerate(partition.segments) if segment.parameter != PADDING)
    return Partition(partition.segments[: last + 1], partition.world_size)
