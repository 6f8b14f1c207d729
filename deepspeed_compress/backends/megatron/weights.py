"""Gathers of the new weights of Megatron's distributed optimizer as compressed differences, in `start_param_sync`.

Each rank updates the fp32 master weights of its share. Megatron rounds them into that share of the bucket of weights
and gathers the bucket, at the end of the step or, with `overlap_param_gather`, when forward needs it. The adapter
restores the share to the values that all ranks hold, and sends differences to them (`collectives.gather`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.collectives.buckets import even_partition, flat_sizes
from deepspeed_compress.collectives.gather import DifferenceGather, PendingWeights
from deepspeed_compress.monitor import ring_all_gather
from deepspeed_compress.session.session import Session

GatherFactory = Callable[[Sequence[tuple[str, int]], torch.dtype], DifferenceGather]
"""Factory for the gather of a flat buffer, from its (name, numel) pairs in order, including padding, and its dtype."""


def has_masters(source: Any) -> bool:
    """Return True if a bucket group's weights are rounded from fp32 master weights. Weights in fp32 need none."""
    return all(bucket.param_data.dtype in (torch.bfloat16, torch.float16) for bucket in source.buckets)


@dataclass(frozen=True, eq=False)
class _Flat:
    """The weights of a bucket as all ranks hold them, and their gather.

    Attributes:
        held: the weights.
        gather: the gather.
        mine: the parameters whose master weights this rank has, in order, with numel; None for padding.
        tag: number of messages of the preceding buckets.
    """

    held: Tensor
    gather: DifferenceGather
    mine: Sequence[tuple[Any, int]]
    tag: int

    @property
    def own(self) -> Tensor:
        return self.gather.own(self.held)

    def master(self) -> Tensor:
        """Return the master weights of this rank's part, flat fp32."""
        device = self.held.device
        parts = [torch.zeros(n, device=device) if one is None else one.main_param.view(-1) for one, n in self.mine]
        return torch.cat(parts)


class Weights:
    """The weights of bucket groups `sources`, which are sent as differences after each step of the optimizer.

    Between a step and its gather, a rank keeps no extra state: the share in the bucket is what the other ranks hold,
    and the master weights belong to the optimizer. During a step, there is a copy of the share.
    """

    def __init__(
        self, session: Session, sources: Sequence[Any], names: Mapping[Parameter, str], make_gather: GatherFactory
    ) -> None:
        self._session, self._meter = session, session.meter
        self._sources = sources
        self._flats: dict[int, list[_Flat]] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._due: set[int] = set()
        """Bucket groups whose master weights have changed since their last gather."""
        self._exact = True
        tag = 0
        for source in sources:
            flats = self._flats[id(source)] = []
            for bucket in source.buckets:
                flats.append(_flat(bucket, names, make_gather, tag))
                tag += flats[-1].gather.rounds
            session.patches.wrap(source, "start_param_sync", partial(self._start, source))

    def before_step(self) -> None:
        self._exact = self._session.plan.dense
        if self._exact:
            # Megatron will round the shares, so there is nothing to take differences to.
            self._due.clear()
        else:
            self._kept = {key: [flat.own.clone() for flat in flats] for key, flats in self._flats.items()}

    def after_step(self, applied: bool) -> None:
        for key in list(self._kept):
            self._put_back(key)
            if applied:
                self._due.add(key)
        if applied and self._exact:
            for flat in chain.from_iterable(self._flats.values()):
                self._meter.count("bytes_weights", ring_all_gather(flat.held.nbytes, flat.gather.group.size()))

    def forget(self) -> None:
        """Discard pending gathers, because weights and master weights have been loaded."""
        self._due.clear()

    def synchronise(self) -> None:
        """Replace the weights of all ranks by their rounded master weights. All ranks must call this."""
        for source in self._sources:
            if source.param_gather_handle is not None:
                source.start_param_sync(force_sync=True)
            for flat in self._flats[id(source)]:
                flat.gather.synchronise(flat.held, flat.master())
        self.forget()

    def _start(self, source: Any, original: Callable[..., None], force_sync: bool = False) -> None:
        key, flats = id(source), self._flats[id(source)]
        # It has begun, it is exact, or there are no new weights.
        if source.param_gather_handle is not None or (key not in self._kept and key not in self._due):
            original(force_sync=force_sync)
            return
        if key in self._kept:
            self._put_back(key)
        self._due.discard(key)
        if source.ddp_config.overlap_param_gather and not force_sync:
            pending = [flat.gather.begin(flat.held, flat.master(), flat.tag) for flat in flats]
            source.param_gather_handle = SimpleNamespace(wait=partial(_finish, pending))
        else:
            for flat in flats:
                flat.gather.gather(flat.held, flat.master())
        source.param_gather_dispatched = True

    def _put_back(self, key: int) -> None:
        for flat, own in zip(self._flats[key], self._kept.pop(key), strict=True):
            flat.own.copy_(own)


def _finish(pending: Sequence[PendingWeights]) -> None:
    for one in pending:
        one.finish()


def _flat(bucket: Any, names: Mapping[Parameter, str], make_gather: GatherFactory, tag: int) -> _Flat:
    sizes = flat_sizes(bucket.param_data, [(names[one], one.data) for one in bucket.params_list])
    gather = make_gather(sizes, bucket.param_data.dtype)
    parameters = {names[one]: one for one in bucket.params_list}
    own = even_partition(sizes, gather.group.size()).owned_by(gather.group.rank())
    mine = [(parameters.get(segment.parameter), segment.numel) for segment in own]
    return _Flat(bucket.param_data, gather, mine, tag)
