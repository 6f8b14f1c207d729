"""One optimizer step and one evaluation, on either kind of DeepSpeed engine."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_compress.backends.deepspeed.units import RankUnit
from deepspeed_compress.training.data.tokens import Windows, eval_starts, step_starts

ISLANDS = 2**32
"""Distance between the seeds of two islands. It is larger than any seed that users choose."""


@dataclass(frozen=True)
class Share:
    """Part of a batch that this rank reads.

    Attributes:
        rank: data-parallel rank.
        size: number of data-parallel ranks.
        micro_batches: micro-batches in a step.
        micro_size: samples in a micro-batch.
        group: process group over which a mean is the mean over all shares.
        stage: pipeline stage.
        island: number of this island if islands are separate jobs, each of which reads other data.
    """

    rank: int
    size: int
    micro_batches: int
    micro_size: int
    group: Any
    stage: int = 0
    island: int = 0

    @property
    def batch_size(self) -> int:
        return self.size * self.micro_batches * self.micro_size

    def of(self, starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return this rank's part, (micro_batches, micro_size), of the starts of a whole batch, (batch_size,)."""
        parts = starts.reshape(self.size, self.micro_batches, self.micro_size)
        return np.asarray(parts[self.rank])


def share_of(engine: Any) -> Share:
    """Return the share of this rank.

    Ranks of one tensor-parallel or pipeline group get the same share: only data-parallel ranks, islands and nodes split
    a batch.
    """
    session = vars(engine).get("compression")
    islands = session is not None and session.islands is not None
    divided = isinstance(engine.mpu, RankUnit)
    elastic = islands and session.config.islands.elastic is not None
    group = dist.group.WORLD if divided or elastic else engine.data_parallel_group
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if divided:
        rank, size = engine.mpu.share_of_job
    return Share(
        rank,
        size,
        engine.gradient_accumulation_steps(),
        engine.train_micro_batch_size_per_gpu(),
        group,
        engine.stage_id if isinstance(engine, PipelineEngine) else 0,
        session.islands.number if elastic else 0,
    )


class Stepper(Protocol):
    """Interface for steps on one kind of engine.

    Both methods take token windows (micro_batches, micro_size, length) and return a loss, ().
    """

    def train(self, batch: Tensor) -> Tensor:
        """Take one optimizer step, and return the mean loss."""

    def evaluate(self, batch: Tensor) -> Tensor:
        """Return the mean loss, without computing gradients."""


class PlainStepper:
    """Steps with ZeRO 0 to 3, with or without tensor parallelism. The loss is that of this rank."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def train(self, batch: Tensor) -> Tensor:
        self.engine.train()
        return torch.stack([self._accumulate(tokens) for tokens in batch]).mean()

    def evaluate(self, batch: Tensor) -> Tensor:
        self.engine.eval()
        with torch.no_grad():
            return torch.stack([self._loss(tokens) for tokens in batch]).mean()

    def _accumulate(self, tokens: Tensor) -> Tensor:
        loss = self._loss(tokens)
        self.engine.backward(loss)
        self.engine.step()
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss.float()


class PipelineStepper:
    """Steps with the pipeline engine, which runs all micro-batches itself. The loss is the mean of all ranks."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def train(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.engine.train_batch(iter([(tokens, tokens) for tokens in batch]))
        return loss.detach().float().reshape(())

    def evaluate(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.engine.eval_batch(iter([(tokens, tokens) for tokens in batch]))
        return loss.detach().float().reshape(())


def train_step(stepper: Stepper, windows: Windows, share: Share, seed: int, step: int, device: Any) -> Tensor:
    """Take optimizer step number `step` (1-based). (seed, step) determine the data and dropout.

    Ranks that share layers use the same dropout masks, because each holds all activations between layers.
    """
    seed += share.island * ISLANDS
    starts = share.of(step_starts(windows, share.batch_size, seed, step))
    torch.manual_seed(int(np.random.SeedSequence((seed, step, share.rank, share.stage)).generate_state(1)[0]))
    return stepper.train(_read(windows, starts, device))


def eval_loss(stepper: Stepper, windows: Windows, share: Share, batches: int, device: Any) -> float:
    """Return the mean loss over the held-out windows, the same on every rank."""
    starts = eval_starts(windows, batches, share.batch_size)
    losses = [stepper.evaluate(_read(windows, share.of(batch), device)) for batch in starts]
    return mean_over_ranks(losses, share)


def mean_over_ranks(losses: list[Tensor], share: Share) -> float:
    """Return the mean of `losses` over the data-parallel ranks, all of which pass the same number of losses."""
    mean = torch.stack(losses).float().mean()
    dist.all_reduce(mean, group=share.group)
    return mean.item() / dist.get_world_size(share.group)


def _read(windows: Windows, starts: NDArray[np.int64], device: Any) -> Tensor:
    tokens = windows.read(starts.reshape(-1)).reshape(*starts.shape, windows.length)
    return torch.from_numpy(tokens).to(device)
