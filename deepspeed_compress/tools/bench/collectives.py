"""The collectives that are measured, each on a buffer of a given size."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.distributed as dist
from torch import Tensor

from deepspeed_compress.communication.exchange import exchange

__all__ = ["COLLECTIVES", "Collective"]


@dataclass(frozen=True)
class Collective:
    """`prepare(buffer)` returns the call that is timed, for a uint8 `buffer` of a multiple of the number of ranks.

    `rounds`: how often a ring sends the part of the buffer that is not the rank's own, (R-1)/R of it: bytes that must
    leave a rank are `rounds` times that.
    """

    prepare: Callable[[Tensor], Callable[[], object]]
    rounds: int = 1

    def sent(self, size: int, ranks: int) -> float:
        """The least bytes that a rank sends for a buffer of `size`."""
        return self.rounds * size * (ranks - 1) / ranks


def _own(buffer: Tensor) -> Tensor:
    return buffer.new_zeros(buffer.numel() // dist.get_world_size())


def _all_reduce(buffer: Tensor) -> Callable[[], object]:
    return lambda: dist.all_reduce(buffer)


def _all_gather(buffer: Tensor) -> Callable[[], object]:
    own = _own(buffer)
    return lambda: dist.all_gather_into_tensor(buffer, own)


def _reduce_scatter(buffer: Tensor) -> Callable[[], object]:
    own = _own(buffer)
    return lambda: dist.reduce_scatter_tensor(own, buffer)


def _all_to_all(buffer: Tensor) -> Callable[[], object]:
    out = torch.empty_like(buffer)
    return lambda: dist.all_to_all_single(out, buffer)


def _exchange(buffer: Tensor) -> Callable[[], object]:
    group = dist.distributed_c10d._get_default_group()
    outgoing = buffer.chunk(group.size())
    incoming = torch.empty_like(buffer).chunk(group.size())
    return lambda: exchange(group, outgoing, incoming)


COLLECTIVES: Mapping[str, Collective] = MappingProxyType(
    {
        "all_reduce": Collective(_all_reduce, rounds=2),
        "all_gather_into_tensor": Collective(_all_gather),
        "reduce_scatter_tensor": Collective(_reduce_scatter),
        "all_to_all_single": Collective(_all_to_all),
        "exchange": Collective(_exchange),
    }
)
"""By name; `exchange` is what compressed messages go through."""
