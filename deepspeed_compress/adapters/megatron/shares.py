"""The two kinds of parameters of Megatron's model chunks: experts have a data-parallel group of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from deepspeed_compress.adapters.megatron.buckets import BucketGroup, describe
from deepspeed_compress.communication.reduction import Parameters
from deepspeed_compress.config.names import user_name
from deepspeed_compress.session.traffic import ring_all_gather

__all__ = ["Share"]


@dataclass(frozen=True)
class Share:
    """Parameters of `chunks` that are reduced over one group, those of `experts` or all others. `names`: of all, each
    with a name that no other has."""

    chunks: Sequence[Any]
    names: Mapping[Parameter, str]
    experts: bool

    @property
    def sources(self) -> list[Any]:
        """Megatron's bucket groups, chunk after chunk."""
        kind = "expert_parallel_bucket_groups" if self.experts else "bucket_groups"
        return [group for chunk in self.chunks for group in getattr(chunk, kind)]

    @property
    def whole(self) -> ProcessGroup | None:
        """The ranks that it is reduced over; None for experts of which there is nothing to reduce."""
        first = self.chunks[0]
        group: ProcessGroup = first.intra_expt_dp_group if self.experts else first.intra_dp_cp_group
        nothing = self.experts and (not self.sources or group.size() == 1)
        return None if nothing else group

    @property
    def group(self) -> ProcessGroup:
        """`whole`, where there is one."""
        assert self.whole is not None
        return self.whole

    @property
    def device(self) -> torch.device:
        device: torch.device = next(self.chunks[0].parameters()).device
        return device

    def weight_bytes(self, sources: Sequence[Any]) -> int:
        """That a rank sends for the weights of bucket groups in a step: 0 without the distributed optimizer."""
        buckets = [bucket for source in sources for bucket in source.buckets if bucket.param_data is not None]
        return sum(ring_all_gather(bucket.param_data.nbytes, self.group.size()) for bucket in buckets)

    @cached_property
    def groups(self) -> list[BucketGroup]:
        return describe(self.sources, self.names, self.group.size())

    def described(self) -> Parameters:
        """For reducers. Collective: all ranks of the job must call it, for overrides may mean another's parameters."""
        here = {one for group in self.sources for one in group.params}
        mine = {name: one for one, name in self.names.items() if one in here}
        called = {name: _called(one, name) for name, one in mine.items()}
        found: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(found, sorted(set(called.values())))
        dtypes = {bucket.grad_data.dtype for group in self.sources for bucket in group.buckets}
        return Parameters(
            shapes={name: tuple(one.shape) for name, one in mine.items()},
            everywhere=sorted({name for names in found for name in names}),
            exempt=frozenset(name for name, one in mine.items() if self._copied(one)),
            dtype=reduce(torch.promote_types, dtypes) if dtypes else torch.float32,
            user_names=called,
        )

    def _copied(self, parameter: Parameter) -> bool:
        """Whether tensor-parallel ranks hold copies: in different messages, they would drift apart if compressed."""
        return self._tensor_size > 1 and not getattr(parameter, "tensor_model_parallel", False)

    @property
    def _tensor_size(self) -> int:
        """Ranks that share a layer."""
        first = self.chunks[0]
        if self.experts:
            return int(first.config.expert_tensor_parallel_size or first.tp_group.size())
        return int(first.tp_group.size())


def _called(parameter: Parameter, name: str) -> str:
    """What users call it: its name in the model, without the wrappers around that and the number of its chunk."""
    plain = name.partition(".")[2] if name.partition(".")[0].isdigit() else name
    while plain.startswith("module."):
        plain = plain.removeprefix("module.")
    return user_name(parameter, plain)
