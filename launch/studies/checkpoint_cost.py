"""Measure what a checkpoint costs training: the blocking time of the call, and the slowdown of the next steps.

    torchrun --nproc_per_node 2 -m launch.studies.checkpoint_cost --model configs/models/gpt_10m.json

Windows of steps that start with a checkpoint alternate with windows without one. Each saver has its own engine: this
package on disk and in memory, DeepSpeed's own `save_checkpoint`, its decoupled writer (which needs its AIO operation),
and `async_save` of torch.distributed.checkpoint with the same tensors. The results are medians over windows. Ranks
synchronize before the clock starts, and wait for the end of writing after it stops.
"""

import argparse
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import deepspeed
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import async_save

import deepspeed_compress
from deepspeed_compress.models import build_model, read_model_config
from launch.studies.harness import new_parser

SEQUENCES, TOKENS, WARM_UP = 4, 64, 3


class DeepSpeed:
    """DeepSpeed's own saver, which blocks all ranks."""

    section: ClassVar[dict[str, Any]] = {}
    native: ClassVar[dict[str, Any]] = {}

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def save(self, directory: Path) -> None:
        """Save a checkpoint into `directory`."""
        self.engine.save_checkpoint(str(directory))

    def finish(self) -> None:
        """Wait until the checkpoint is written."""


class Ours(DeepSpeed):
    """This package, which writes in the background."""

    section: ClassVar[dict[str, Any]] = {"checkpointing": {}}

    def finish(self) -> None:
        self.engine.compression.saving.wait()


class InMemory(Ours):
    """This package in host memory. Checkpoints are made by call, so that the windows match those of the others."""

    section: ClassVar[dict[str, Any]] = {
        "checkpointing": {"directory": tempfile.gettempdir() + "/checkpoint_cost", "memory": {"every": "1000 h"}}
    }

    def save(self, directory: Path) -> None:
        self.engine.save_checkpoint(str(self.engine.compression.saving.memory_directory), save_latest=False)


class Decoupled(DeepSpeed):
    """DeepSpeed's writer process, which it waits for before the next step."""

    native: ClassVar[dict[str, Any]] = {
        "checkpoint": {"writer": {"type": "fast", "decoupled": True, "data_parallel": "replica"}}
    }


class AsyncSave(DeepSpeed):
    """torch.distributed.checkpoint with the master weights, optimizer states and weights of this rank."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._group = dist.new_group(backend="gloo")
        self._saved: Any = None

    def save(self, directory: Path) -> None:
        own = self.engine.optimizer.state_dict()
        state: dict[str, Any] = {"optimizer": {str(dist.get_rank()): own}}
        if dist.get_rank() == 0:
            state["module"] = self.engine.module.state_dict()
        self._saved = async_save(state, checkpoint_id=str(directory), process_group=self._group)

    def finish(self) -> None:
        self._saved.result()


SAVERS: dict[str, type[DeepSpeed]] = {
    "this package": Ours,
    "this package, in memory": InMemory,
    "DeepSpeed": DeepSpeed,
    "torch.distributed.checkpoint async_save": AsyncSave,
    "DeepSpeed, decoupled": Decoupled,
}


def make(saver: type[DeepSpeed], model_file: Path, stage: int) -> DeepSpeed:
    """Make a saver with an engine of its own."""
    model = build_model(model_file, read_model_config(model_file), seed=0)
    ds_config = {
        "train_micro_batch_size_per_gpu": SEQUENCES,
        "steps_per_print": 10**9,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        **saver.native,
    }
    initialize: Callable[..., Any] = deepspeed.initialize
    if not saver.native:
        ds_config["deepspeed_compress"] = {"gradients": {"bits": 4}, "monitor": {"announce": False}, **saver.section}
        initialize = deepspeed_compress.initialize
    return saver(initialize(model=model, model_parameters=list(model.parameters()), config=ds_config)[0])


def steps(one: DeepSpeed, count: int, tokens: torch.Tensor) -> list[float]:
    """Train `count` steps and return the seconds of each."""
    found: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        one.engine.backward(one.engine(input_ids=tokens, labels=tokens).loss)
        one.engine.step()
        found.append(time.perf_counter() - begin)
    return found


def measure(one: DeepSpeed, options: argparse.Namespace, tokens: torch.Tensor, directory: Path) -> dict[str, float]:
    """Return medians over windows: seconds per plain step, per call, and the added seconds per window."""
    steps(one, WARM_UP, tokens)
    calls, plain, saved = list[float](), list[float](), list[float]()
    for window in range(options.windows + 1):
        dist.barrier()
        plain.append(sum(steps(one, options.every, tokens)))
        dist.barrier()
        begin = time.perf_counter()
        one.save(directory / str(window))
        calls.append(time.perf_counter() - begin)
        saved.append(calls[-1] + sum(steps(one, options.every, tokens)))
        one.finish()
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(directory / str(window), ignore_errors=True)
    # The first window allocates memory.
    without = statistics.median(plain[1:])
    return {
        "step": without / options.every,
        "call": statistics.median(calls[1:]),
        "longer": statistics.median(saved[1:]) - without,
    }


def main() -> None:
    """Measure all savers and print a line for each."""
    parser = new_parser(__doc__)
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"), help="model config")
    parser.add_argument("--stage", type=int, default=1, help="ZeRO stage (default: 1)")
    parser.add_argument("--every", type=int, default=10, help="steps per window (default: 10)")
    parser.add_argument("--windows", type=int, default=7, help="windows of each kind (default: 7)")
    options = parser.parse_args()
    deepspeed.init_distributed("gloo")
    shared = [tempfile.mkdtemp()]
    dist.broadcast_object_list(shared, src=0)
    for name, saver in SAVERS.items():
        try:
            one = make(saver, options.model, options.stage)
        except Exception as error:  # report a writer that cannot be built on this machine
            show(name, f"not available: {str(error).splitlines()[0]}")
            continue
        words = read_model_config(options.model).vocab_size
        found = measure(one, options, torch.randint(words, (SEQUENCES, TOKENS)), Path(shared[0]))
        step = found["step"]
        show(
            name,
            f"step {1e3 * step:.0f} ms; the call {1e3 * found['call']:.1f} ms ({found['call'] / step:.1%} of a step); "
            f"{options.every} steps with a checkpoint take {1e3 * found['longer']:.1f} ms longer "
            f"({found['longer'] / step / options.every:.2%})",
        )
        one.engine.destroy()
    dist.destroy_process_group()


def show(name: str, text: str) -> None:
    """Print a line on rank 0."""
    if dist.get_rank() == 0:
        print(f"{name}: {text}", flush=True)


if __name__ == "__main__":
    main()
