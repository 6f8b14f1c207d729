"""Sequence parallelism in `bench step`: attention of transformers on Ulysses, and steps on parts of sequences."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import PlainStepper, Share

ATTENTION = "sdpa"
"""Attention of transformers that Ulysses calls for the heads of a rank."""


@dataclass(frozen=True)
class Registration:
    """Attention of all models of this process on Ulysses, until `undo`.

    Attributes:
        mpu: DeepSpeed's description of the groups.
        original: attention before.
    """

    mpu: Any
    original: Callable[..., Any]

    def undo(self) -> None:
        """Give transformers its own attention back, and release the groups."""
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS[ATTENTION] = self.original
        self.mpu._release_sequence_parallel_groups()


def register(model: nn.Module, workload: Workload) -> Registration:
    """Let attention exchange heads for parts of sequences between `workload.sequence` ranks."""
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    mpu = UlyssesSPAttentionHF.register_with_transformers(
        model, ATTENTION, workload.sequence, workload.micro_batch, seq_length_is_variable=True
    )
    return Registration(mpu, original)


def share_of_sequence(workload: Workload) -> Share:
    """Return the share of this rank: ranks that divide sequences read the same ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas = ranks // workload.sequence
    return Share(rank // workload.sequence, replicas, workload.accumulation, workload.micro_batch, dist.group.WORLD)


class UlyssesStepper(PlainStepper):
    """Steps on this rank's part of each sequence. The loss is that of its tokens."""

    def __init__(self, engine: Any, sequence: int) -> None:
        super().__init__(engine)
        self._rank, self._ranks = dist.get_rank() % sequence, sequence

    def _loss(self, tokens: Tensor) -> Tensor:
        targets = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        own, labels, places = (one.chunk(self._ranks, 1)[self._rank] for one in (tokens, targets, positions))
        logits: Tensor = self.engine(input_ids=own, position_ids=places, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
