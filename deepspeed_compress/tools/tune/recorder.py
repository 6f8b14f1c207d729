"""Recording of the optimizer steps of a trial, in each of its processes."""

import functools
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from deepspeed import DeepSpeedEngine
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import Tensor

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.patching import Undo, replace_methods
from deepspeed_compress.monitor import KINDS, StepStatistics
from deepspeed_compress.safe_files import write_text
from deepspeed_compress.tools.tune.trials import LINES, TRIAL, Task


class Recorder:
    """Recorder of the losses and times of optimizer steps on this rank, and of statistics on the rank that has them."""

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task = task
        self.statistics: dict[int, StepStatistics] = {}
        self._device = device
        self._parts: list[Tensor] = []
        self._losses: list[Tensor] = []
        self._times = [time.perf_counter()]

    @property
    def steps(self) -> int:
        return len(self._losses)

    def add(self, loss: Tensor) -> None:
        """Record this rank's part of the current step's loss, a tensor of shape (). The parts of a step are summed."""
        self._parts.append(loss.detach().float().reshape(()))

    def end_step(self) -> None:
        """End an optimizer step.

        Raises:
            SystemExit: This was the last step of the trial.
            ConfigError: No loss was recorded for the step.
        """
        if not self._parts:
            raise ConfigError("no loss before the optimizer step; write engine.backward(loss), not loss.backward()")
        get_accelerator().synchronize()
        self._times.append(time.perf_counter())
        self._losses.append(torch.stack(self._parts).sum())
        self._parts.clear()
        if self.steps == self.task.steps:
            self._finish()

    def _finish(self) -> NoReturn:
        losses = torch.stack(self._losses).to(self._device)
        dist.all_reduce(losses)
        if dist.get_rank() == 0:
            self._write((losses / dist.get_world_size()).tolist())
        # No rank may leave before all have arrived here, because communication ends with it.
        dist.barrier()
        raise SystemExit(0)

    def _write(self, losses: Sequence[float]) -> None:
        lines = []
        for step, loss in enumerate(losses, 1):
            found = self.statistics.get(step)
            sent = None if found is None else sum(getattr(found, kind) or 0 for kind in KINDS)
            elapsed = 1e3 * (self._times[step] - self._times[step - 1])
            lines.append(json.dumps({"step": step, "loss": loss, "step_ms": elapsed, "bytes": sent}) + "\n")
        write_text(Path(self.task.directory) / LINES, "".join(lines))


class EngineWatcher:
    """Watcher of the first engine that is trained, however it was created. `recorder` is None until then."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None
        self._engine: Any = None

    def follow(self) -> Undo:
        """Follow DeepSpeed engines from now on, and return the function that undoes it."""
        return replace_methods(
            (DeepSpeedEngine, "backward", functools.partial(_with_loss, self)),
            (DeepSpeedEngine, "step", functools.partial(_with_end, self)),
            (PipelineEngine, "train_batch", functools.partial(_with_both, self)),
        )

    @property
    def steps(self) -> tuple[int, int | None]:
        """Return the number of steps recorded and the number wanted, which is None if no engine was trained."""
        return (0, None) if self.recorder is None else (self.recorder.steps, self.recorder.task.steps)

    def of(self, engine: Any) -> Recorder | None:
        """Return the recorder if `engine` is the one being followed, else None.

        The first engine that is passed here becomes the one being followed.
        """
        if self.recorder is None:
            if TRIAL not in engine.config or SECTION not in engine.config:
                raise ConfigError(f"/{TRIAL}: is missing from the configuration of DeepSpeed; pass on the whole file")
            self.recorder, self._engine = Recorder(Task(**engine.config[TRIAL]), engine.device), engine
            engine.compression.subscribe(self._keep)
        return self.recorder if engine is self._engine else None

    def _keep(self, statistics: StepStatistics) -> None:
        assert self.recorder is not None, "subscribed to by a recorder"
        self.recorder.statistics[self.recorder.steps + 1] = statistics


Method = Callable[..., Any]


def _with_loss(watcher: EngineWatcher, backward: Method, engine: Any, *args: Any, **options: Any) -> Any:
    """Run DeepSpeedEngine.backward, which returns the loss of a micro-step as it enters the loss of the step."""
    scaled = backward(engine, *args, **options)
    recorder = None if isinstance(engine, PipelineEngine) else watcher.of(engine)
    if recorder is not None:
        recorder.add(scaled)
    return scaled


def _with_end(watcher: EngineWatcher, step: Method, engine: Any, *args: Any, **options: Any) -> Any:
    """Run DeepSpeedEngine.step, which is called for every micro-step. The engine counts the optimizer steps."""
    before = engine.global_steps
    result = step(engine, *args, **options)
    recorder = watcher.of(engine) if engine.global_steps > before else None
    if recorder is not None:
        recorder.end_step()
    return result


def _with_both(watcher: EngineWatcher, train_batch: Method, engine: Any, *args: Any, **options: Any) -> Any:
    """Run PipelineEngine.train_batch, which is an optimizer step and returns the mean loss on every rank."""
    # The recorder must exist before the step, to receive its statistics.
    recorder = watcher.of(engine)
    loss = train_batch(engine, *args, **options)
    if recorder is not None:
        recorder.add(loss)
        recorder.end_step()
    return loss
