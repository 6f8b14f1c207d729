"""Steps, evaluations and log lines, until the last step."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.errors import StateError
from deepspeed_compress.training import checkpoint
from deepspeed_compress.training.checkpoint import Identity
from deepspeed_compress.training.options import Options
from deepspeed_compress.training.progress import Display
from deepspeed_compress.training.records import Metrics
from deepspeed_compress.training.setup import Data
from deepspeed_compress.training.stepper import Share, Stepper, eval_loss, mean_over_ranks, train_step


@dataclass
class Since:
    """Losses and seconds of the steps since the last log line."""

    losses: list[Tensor] = field(default_factory=list)
    seconds: float = 0.0

    @contextmanager
    def timed(self) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        get_accelerator().synchronize()
        self.seconds += time.perf_counter() - begin


@dataclass(frozen=True)
class Loop:
    """Everything that a run needs at each step."""

    options: Options
    engine: Any
    stepper: Stepper
    share: Share
    data: Data
    identity: Identity
    metrics: Metrics
    display: Display

    def run(self, first: int) -> float:
        """Train from step `first` + 1 to the last one; return the final held-out loss.

        Raises StateError when the loss is no longer finite.
        """
        options, since, latest = self.options, Since(), math.nan
        for step in range(first + 1, options.steps + 1):
            rate = self._learning_rate()
            with since.timed():
                since.losses.append(self._step(step))
            if step % options.log_every == 0 or step == options.steps:
                self._log(step, since, rate)
                since = Since()
            if options.eval_every and step % options.eval_every == 0:
                latest = self._evaluate(step)
            if options.save_every and (step % options.save_every == 0 or step == options.steps):
                checkpoint.save(self.engine, options.output_dir, self.identity)
        evaluated = options.steps > first and options.eval_every and options.steps % options.eval_every == 0
        return latest if evaluated else self._evaluate(max(first, options.steps))

    def _step(self, step: int) -> Tensor:
        return train_step(self.stepper, self.data.train, self.share, self.options.seed, step, self.engine.device)

    def _learning_rate(self) -> float | None:
        rates = self.engine.get_lr()
        return float(rates[0]) if rates else None

    def _log(self, step: int, since: Since, rate: float | None) -> None:
        loss, seconds = mean_over_ranks(since.losses, self.share), since.seconds / len(since.losses)
        self.metrics.add(step=step, train_loss=loss, step_time_s=seconds, lr=rate)
        self.display.show(step, self.options.steps, f"loss {loss:.4f}  {seconds:.3f} s/step")
        if not math.isfinite(loss):
            raise StateError(f"step {step}: the training loss is {loss}; lower the learning rate, or check the data")

    def _evaluate(self, step: int) -> float:
        loss = eval_loss(self.stepper, self.data.held_out, self.share, self.options.eval_batches, self.engine.device)
        self.metrics.add(step=step, eval_loss=loss)
        self.display.line(f"step {step}: held-out loss {loss:.4f}")
        return loss
