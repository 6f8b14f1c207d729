"""One optimizer step and one evaluation, on either kind of DeepSpeed engine."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.engine import PipelineEngine
from numpy.typing import NDArray
from torch import Tensor

from deepspeed_compress.training.data import Windows, eval_starts, step_starts

ISLANDS = 2**32
"""Between the seeds of two islands, above all that is written as a seed."""


@dataclass(frozen=True)
class Share:
    """Which part of a batch this rank reads: `rank` of `size` data-parallel ranks. `stage`: of a pipeline. `island`: of
    a job of its own among others, which must read something else."""

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
        """This rank's part, (micro_batches, micro_size), of the starts of a whole batch, (batch_size,)."""
        parts = starts.reshape(self.size, self.micro_batches, self.micro_size)
        return np.asarray(parts[self.rank])


def share_of(engine: Any) -> Share:
    """Tensor and pipeline neighbours get the same share: only the data-parallel group divides a batch, and islands.

    `group`: a mean over it is one over the shares."""
    session = vars(engine).get("compression")
    islands = session is not None and session.islands is not None
    group = dist.group.WORLD if islands else engine.data_parallel_group
    elastic = islands and session.config.islands.elastic is not None
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if islands and not elastic:
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
    """Both methods take token windows (micro_batches, micro_size, length) and return a mean loss, ()."""

    def train(self, batch: Tensor) -> Tensor:
        """One optimizer step."""

    def evaluate(self, batch: Tensor) -> Tensor:
        """Loss without gradients."""


class PlainStepper:
    """ZeRO 0 to 3, with or without tensor parallelism. The loss is this rank's own."""

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
    """The pipeline engine, which runs all micro-batches itself. The loss is the mean of all ranks."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def train(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.engine.train_batch(iter([(tokens, tokens) for tokens in batch]))
        return loss.detach().float().reshape(())

    def evaluate(self, batch: Tensor) -> Tensor:
        loss: Tensor = self.engine.eval_batch(iter([(tokens, tokens) for tokens in batch]))
        return loss.detach().float().reshape(())


def train_step(stepper: Stepper, windows: Windows, share: Share, seed: int, step: int, device: Any) -> Tensor:
    """Optimizer step number `step`, counted from 1. What it reads and drops out follows from (seed, step).

    Ranks that share layers drop out the same, since each has the whole of what goes from layer to layer.
    """
    seed += share.island * ISLANDS
    starts = share.of(step_starts(windows, share.batch_size, seed, step))
    torch.manual_seed(int(np.random.SeedSequence((seed, step, share.rank, share.stage)).generate_state(1)[0]))
    return stepper.train(_read(windows, starts, device))


def eval_loss(stepper: Stepper, windows: Windows, share: Share, batches: int, device: Any) -> float:
    """Mean loss over the held-out windows, the same on every rank."""
    starts = eval_starts(windows, batches, share.batch_size)
    losses = [stepper.evaluate(_read(windows, share.of(batch), device)) for batch in starts]
    return mean_over_ranks(losses, share)


def mean_over_ranks(losses: list[Tensor], share: Share) -> float:
    """Mean of `losses` over the data-parallel ranks, each rank with as many of them."""
    mean = torch.stack(losses).float().mean()
    dist.all_reduce(mean, group=share.group)
    return mean.item() / dist.get_world_size(share.group)


def _read(windows: Windows, starts: NDArray[np.int64], device: Any) -> Tensor:
    tokens = windows.read(starts.reshape(-1)).reshape(*starts.shape, windows.length)
    return torch.from_numpy(tokens).to(device)
