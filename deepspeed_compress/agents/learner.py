"""A policy that learns from samples on a DeepSpeed engine, on all of its ranks, and its checkpoints."""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from deepspeed_compress.agents.grpo import (
    Batch,
    Sample,
    advantages,
    collate,
    divergence,
    first_turns,
    next_token_logprobs,
    token_losses,
)
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.errors import StateError, UnsupportedError


@dataclass(frozen=True)
class LearnerSettings:
    """Settings of a learner.

    Attributes:
        clip: largest distance from 1 of an importance ratio that is rewarded.
        corrected: True to weight tokens by their ratio to the policy that sampled them.
        temperature: temperature at which completions are sampled.
        divergence: factor of the KL divergence from the reference model; 0 for none.
        epochs: number of passes over each batch of samples.
        seed: seed of the order of samples.
    """

    clip: float = 0.2
    corrected: bool = True
    temperature: float = 1.0
    divergence: float = 0.0
    epochs: int = 1
    seed: int = 0


@dataclass(frozen=True)
class Learned:
    """Figures of one call of `learn`.

    Attributes:
        steps: number of optimizer steps.
        loss: mean over the steps of the sum of this rank's token losses, divided by an even share of the step's tokens.
        reward: mean reward of all episodes.
        lag: mean number of versions by which samples were behind.
    """

    steps: int
    loss: float
    reward: float
    lag: float


class Learner:
    """Trains the causal language model of `engine` by GRPO.

    All ranks of the engine call `learn` with the same samples. Each data-parallel rank takes its part of them, together
    with the ranks with which it shares layers (AutoTP).

    Args:
        engine: the DeepSpeed engine. An optimizer step takes its micro-batches, of completions, on all data-parallel
            ranks.
        pad: id of the padding token; None if the tokenizer has none.
        settings: how the policy learns.
        reference: model from which the policy should not diverge; needed if `settings.divergence` is not 0.

    Raises:
        UnsupportedError: the engine is a pipeline, or divides sequences among ranks.
    """

    def __init__(self, engine: Any, pad: int | None, settings: LearnerSettings, reference: Any = None) -> None:
        if settings.divergence and reference is None:
            raise ValueError(f"divergence is {settings.divergence}, so a reference model is needed")
        if engine.pipeline_parallelism or engine.sequence_parallel_size > 1:
            division = "is a pipeline" if engine.pipeline_parallelism else "divides sequences among ranks"
            raise UnsupportedError(
                f"the engine {division}, but a policy needs the logits of whole completions on each rank; use ZeRO 3, "
                'or write "tensor_parallel": {"autotp_size": 2} into ds_config.json in place of that'
            )
        self._engine, self._pad, self._settings, self._reference = engine, pad, settings, reference
        self._rank, self._ranks = dist.get_rank(engine.data_parallel_group), engine.dp_world_size

    def learn(self, samples: Sequence[Sample], version: int) -> Learned:
        """Learn from `samples`, now that the weights have version `version`. Collective.

        Raises:
            ValueError: there are no samples, or those of an episode have different rewards.
        """
        if not samples:
            raise ValueError("there are no samples to learn from")
        losses = []
        scored = list(zip(samples, advantages(samples), strict=True))
        # A policy that is resumed from a checkpoint continues with the same order.
        order = random.Random(f"{self._settings.seed} {self._engine.global_steps}")
        for _ in range(self._settings.epochs):
            order.shuffle(scored)
            losses += [self._step(chunk) for chunk in self._chunks(scored)]
        lag = sum(version - sample.version for sample in samples) / len(samples)
        rewards = [first_turn.reward for first_turn in first_turns(samples)]
        return Learned(len(losses), sum(losses) / len(losses), sum(rewards) / len(rewards), lag)

    def _chunks(self, scored: Sequence[tuple[Sample, float]]) -> Iterator[list[tuple[Sample, float]]]:
        """Yield the samples of each optimizer step, the last ones filled up with samples of weight 0."""
        # DeepSpeed's train_batch_size also counts ranks that share layers, which take the same samples.
        engine = self._engine
        size = engine.train_micro_batch_size_per_gpu() * engine.gradient_accumulation_steps() * self._ranks
        for begin in range(0, len(scored), size):
            chunk = list(scored[begin : begin + size])
            filling = (replace(chunk[0][0], weight=0.0), 0.0)
            yield chunk + [filling] * (size - len(chunk))

    def _step(self, chunk: Sequence[tuple[Sample, float]]) -> float:
        """Take an optimizer step, and return the sum of this rank's token losses, divided by its share of tokens."""
        engine = self._engine
        tokens = sum(one.weight * len(one.completion) for one, _ in chunk)
        own = chunk[self._rank :: self._ranks]
        size = engine.train_micro_batch_size_per_gpu()
        losses = [self._backward(own[begin : begin + size], tokens) for begin in range(0, len(own), size)]
        return sum(losses) / len(losses)

    def _backward(self, part: Sequence[tuple[Sample, float]], tokens: float) -> float:
        """Run one micro-step of a step with `tokens` tokens over all ranks."""
        engine = self._engine
        batch = collate([one for one, _ in part], [score for _, score in part], self._pad, engine.device)
        # DeepSpeed averages over ranks and micro-steps, but the loss is a mean over tokens.
        scale = self._ranks * engine.gradient_accumulation_steps() / (tokens or 1.0)
        settings, logprobs = self._settings, self._logprobs(engine, batch)
        losses = token_losses(logprobs, batch, settings.clip, settings.corrected)
        if settings.divergence:
            with torch.no_grad():
                reference = self._logprobs(self._reference, batch)
            losses = losses + settings.divergence * divergence(logprobs, reference)
        loss = (losses * batch.weights).sum() * scale
        engine.backward(loss)
        engine.step()
        return float(loss.detach())

    def _logprobs(self, model: Any, batch: Batch) -> torch.Tensor:
        """Return the log-probability of each token of a completion, and 0 elsewhere.

        An improbable token of a prompt could have an infinite ratio to the reference, which times a weight of 0 is NaN.
        """
        logits = model(input_ids=batch.tokens, attention_mask=batch.attention).logits
        found = next_token_logprobs(logits, batch.tokens, self._settings.temperature)
        return found.masked_fill(batch.weights == 0, 0.0)


class Checkpoints:
    """Saves the engine of a policy after some batches of rollouts, and loads it at the start of a resumed run.

    Make it before the weights are published for the first time. All ranks make it, and call its methods.

    Args:
        engine: the DeepSpeed engine of the policy.
        directory: directory for the checkpoints, which all ranks share.
        every: number of batches from one checkpoint to the next.
        resume: True to continue from the newest checkpoint, or to start if there is none.

    Attributes:
        batches: number of batches that the engine had learned from when its checkpoint was saved; 0 for a new run.

    Raises:
        StateError: the directory has checkpoints but `resume` is False, or the newest one is not of such a run.
    """

    def __init__(self, engine: Any, directory: str | os.PathLike[str], every: int = 10, resume: bool = False) -> None:
        if every < 1:
            raise ValueError(f"every is {every} (allowed: 1 or more)")
        self._engine, self._directory, self._every = engine, Path(directory), every
        # A shared directory may show new files to other hosts later.
        exists = of_first((self._directory / "latest").exists())
        if exists and not resume:
            earlier = f"{self._directory} has checkpoints of an earlier run"
            raise StateError(f"{earlier}: write resume=True to continue it, or name another directory")
        path, state = engine.load_checkpoint(str(self._directory)) if exists else ("", {"batches": 0})
        if path is None or "batches" not in state:
            raise StateError(f"the newest checkpoint in {self._directory} does not tell its number of batches")
        self.batches = int(state["batches"])

    def save_if_due(self, batches: int, last: bool) -> None:
        """Save after batch number `batches`, if it is a multiple of `every` or the last one. Collective."""
        if last or batches % self._every == 0:
            self._engine.save_checkpoint(str(self._directory), tag=f"batch{batches}", client_state={"batches": batches})
