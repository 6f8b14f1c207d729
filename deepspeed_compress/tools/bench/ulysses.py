"""Sequence parallelism in `bench step`: attention of transformers on Ulysses, and steps on parts of sequences."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import PlainStepper, Share

ATTENTION = "sdpa"
"""Attention of transformers that Ulysses calls for the heads of a rank."""


@contextmanager
def attention_on_ulysses(model: nn.Module, workload: Workload) -> Iterator[Any]:
    """Let attention of all models of this process exchange heads for parts of sequences within the context.

    Yields DeepSpeed's description of the groups of `workload.sequence` ranks.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    mpu: Any = UlyssesSPAttentionHF.register_with_transformers(
        model, ATTENTION, workload.sequence, workload.micro_batch, seq_length_is_variable=True
    )
    try:
        yield mpu
    finally:
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = original
        mpu._release_sequence_parallel_groups()


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
