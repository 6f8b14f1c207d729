"""Training loop with evaluations, log lines and checkpoints, and exact resuming.

DeepSpeed's checkpoint holds weights, optimizer and schedule; deepspeed_compress adds its residuals. The program itself
only needs the step number, because (seed, step) determine which data a step reads. It saves its other settings only in
order to refuse a resume that could not be exact.
"""

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepspeed.accelerator import get_accelerator
from torch import Tensor

from deepspeed_compress.errors import ConfigError, StateError
from deepspeed_compress.training.options import Options
from deepspeed_compress.training.output import Metrics
from deepspeed_compress.training.ranks import Ranks
from deepspeed_compress.training.setup import Data
from deepspeed_compress.training.stepper import Share, Stepper, eval_loss, mean_over_ranks, train_step

STATE = "train_gpt"
DIRECTORY = "checkpoints"


@dataclass(frozen=True)
class Identity:
    """Settings that a resumed run must not change, named as on the command line."""

    seed: int
    seq_len: int
    held_out: float
    data: str
    train_batch_size: int


def add_program_state(engine: Any, identity: Identity) -> None:
    """Add the program's state to checkpoints that are saved automatically, so that the program can resume from them."""
    session = vars(engine).get("compression")
    if session is not None and session.saving is not None:
        session.saving.set_client_state(lambda: {STATE: vars(identity)})


def first_step(engine: Any, output_dir: Path, identity: Identity, ranks: Ranks, resuming: bool) -> int:
    """Return the step after which this run continues.

    It is the step of the checkpoint that the engine loaded when it was made, or else of the newest checkpoint of the
    program, which is loaded if `resuming`; 0 if there is none.

    Raises:
        ConfigError: if the options differ from those with which the checkpoint was made.
    """
    session = vars(engine).get("compression")
    state = None if session is None else session.resumed
    if state is None:
        if not (resuming and ranks.first_only((output_dir / DIRECTORY / "latest").is_file)):
            return 0
        _, state = engine.load_checkpoint(str(output_dir / DIRECTORY))
    _check((state or {}).get(STATE), identity)
    return int(engine.global_steps)


def _check(saved: dict[str, Any] | None, identity: Identity) -> None:
    if saved is None:
        raise ConfigError("--resume: the checkpoint was not written by this program; choose another --output-dir")
    changed = [
        f"{name} was {saved[name]} and is {value}" for name, value in vars(identity).items() if saved[name] != value
    ]
    if changed:
        raise ConfigError(f"--resume: {'; '.join(changed)}; restore the old value, or start a new run")


@dataclass(frozen=True)
class Loop:
    """Training loop, with everything that a run needs at each step."""

    options: Options
    engine: Any
    stepper: Stepper
    share: Share
    data: Data
    identity: Identity
    metrics: Metrics
    ranks: Ranks

    def run(self, first: int) -> float:
        """Train from step `first` + 1 to the last one; return the final held-out loss.

        Raises:
            StateError: if the loss is not finite.
        """
        options, engine, latest = self.options, self.engine, math.nan
        losses, seconds = list[Tensor](), 0.0
        for step in range(first + 1, options.steps + 1):
            rates = engine.get_lr()
            rate, begin = float(rates[0]) if rates else None, time.perf_counter()
            losses.append(train_step(self.stepper, self.data.train, self.share, options.seed, step, engine.device))
            get_accelerator().synchronize()
            seconds += time.perf_counter() - begin
            if step % options.log_every == 0 or step == options.steps:
                self._log(step, losses, seconds / len(losses), rate)
                losses, seconds = [], 0.0
            if options.eval_every and step % options.eval_every == 0:
                latest = self._evaluate(step)
            if options.save_every and (step % options.save_every == 0 or step == options.steps):
                directory = str(options.output_dir / DIRECTORY)
                engine.save_checkpoint(directory, client_state={STATE: vars(self.identity)})
        evaluated = options.steps > first and options.eval_every and options.steps % options.eval_every == 0
        return latest if evaluated else self._evaluate(max(first, options.steps))

    def _log(self, step: int, losses: list[Tensor], seconds: float, rate: float | None) -> None:
        loss = mean_over_ranks(losses, self.share)
        self.metrics.add(step=step, train_loss=loss, step_time_s=seconds, lr=rate)
        self.ranks.print_once(f"{step}/{self.options.steps}  loss {loss:.4f}  {seconds:.3f} s/step")
        if not math.isfinite(loss):
            raise StateError(f"step {step}: the training loss is {loss}; lower the learning rate, or check the data")

    def _evaluate(self, step: int) -> float:
        loss = eval_loss(self.stepper, self.data.held_out, self.share, self.options.eval_batches, self.engine.device)
        self.metrics.add(step=step, eval_loss=loss)
        self.ranks.print_once(f"step {step}: held-out loss {loss:.4f}")
        return loss
