"""Measure what monitoring and steering cost at the end of a step, relative to the whole step.

    torchrun --nproc_per_node 2 -m launch.studies.monitoring_cost --steps 200

Each setting has an engine of the same model, and the engines take steps in turn, so that other load on the machine
affects all of them alike. Ranks synchronize before the clock starts, so that late ranks do not count. Processor time is
that of all threads of rank 0, which other programs change less than wall time.
"""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import deepspeed_compress
from deepspeed_compress.models import build_model, read_model_config
from launch.studies.harness import new_parser

SEQUENCES, TOKENS = 4, 128
SETTINGS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "monitor every 10": {"monitor": {"every": 10, "path": "ten"}},
    "monitor every 1": {"monitor": {"every": 1, "path": "one"}},
    "schedule": {"schedule": {"phases": [{"until": 0.5}, {"gradients": {"bits": 4}}], "total_steps": 10**6}},
    "guard": {"guard": {}},
    "adaptive, measured every 10": {"adaptive": {"probe_every": 10, "max_error": 0.05}},
}
"""Keys of the section next to 4-bit gradients. `max_error` is so small that `adaptive` stays with 8 bits or none."""
WARM_UP, WINDOW = 10, 10
"""Number of first steps that are left out, and of steps in a mean before the median is taken."""


Milliseconds = tuple[float, float]
"""Wall time and processor time."""
CLOCKS = ("time", "processor")


def now() -> Milliseconds:
    """Return both clocks."""
    return 1e3 * time.perf_counter(), 1e3 * time.process_time()


def since(begin: Milliseconds) -> Milliseconds:
    """Return the time since `begin`."""
    passed, worked = now()
    return passed - begin[0], worked - begin[1]


class Timed:
    """Engine with the durations of its steps, and of the work at the end of each step, by each of `CLOCKS`."""

    def __init__(self, model_file: Path, keys: dict[str, Any], directory: Path) -> None:
        model = build_model(model_file, read_model_config(model_file), seed=0)
        monitor = dict(keys.get("monitor", {}))
        if "path" in monitor:
            monitor["path"] = str(directory / monitor["path"])
        section = {"gradients": {"bits": 4}, **keys, "monitor": monitor}
        ds_config = {
            "train_micro_batch_size_per_gpu": SEQUENCES,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
            "zero_optimization": {"stage": 2},
            "deepspeed_compress": section,
        }
        self.engine = deepspeed_compress.initialize(
            model=model, model_parameters=list(model.parameters()), config=ds_config
        )[0]
        self.steps: list[Milliseconds] = []
        self.ends: list[Milliseconds] = []
        self._finish = self.engine.compression.finish
        self.engine.compression.finish = self._timed_finish

    def _timed_finish(self, finished: Any) -> Any:
        dist.barrier()
        begin = now()
        result = self._finish(finished)
        self.ends.append(since(begin))
        return result

    def step(self, tokens: torch.Tensor) -> None:
        """Train a step on `tokens`."""
        dist.barrier()
        begin = now()
        self.engine.backward(self.engine(input_ids=tokens, labels=tokens).loss)
        self.engine.step()
        self.steps.append(since(begin))

    def step_time(self, clock: int) -> float:
        """Return the median duration of a step."""
        return statistics.median(step[clock] for step in self.steps[WARM_UP:])

    def end(self, clock: int) -> float:
        """Return the median over windows of the mean duration of a step's end. One step in ten may be monitored."""
        ends = [end[clock] for end in self.ends[WARM_UP:]]
        return statistics.median(
            statistics.fmean(ends[first : first + WINDOW]) for first in range(0, len(ends), WINDOW)
        )


def main() -> None:
    """Train all engines and print their times."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_2m.json"), help="model config")
    parser.add_argument("--steps", type=int, default=200, help="steps of each engine, a multiple of 10 (default: 200)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        timed = {name: Timed(options.model, keys, Path(directory)) for name, keys in SETTINGS.items()}
        words = read_model_config(options.model).vocab_size
        for _ in range(WARM_UP + options.steps):
            tokens = torch.randint(words, (SEQUENCES, TOKENS), device=next(iter(timed.values())).engine.device)
            for one in timed.values():
                one.step(tokens)
    if dist.get_rank() == 0:
        show(timed)


def show(timed: dict[str, Timed]) -> None:
    """Print a line for each clock and setting."""
    for clock, what in enumerate(CLOCKS):
        without = timed["nothing"].end(clock)
        for name, one in timed.items():
            step, end = one.step_time(clock), one.end(clock)
            cost = f"this costs {end - without:.3f} ms ({(end - without) / step:.2%})"
            print(f"{what}: {name}: step {step:.1f} ms, its end {end:.3f} ms, {cost}")


if __name__ == "__main__":
    main()
