"""Short trainings of a small network in a rank, and what programs of features use of them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.gpu.feature_settings import Training
from tests.gpu.training import digest, network, train_step

SIZES = {"cuda": (256, 4), "cpu": (48, 3)}
"""Width and number of layers by device."""
Found = dict[str, Any]


class Skipped(Exception):  # noqa: N818 - no error, but a feature that cannot be tried here
    """Reason why a feature cannot be tried here."""


@dataclass(frozen=True)
class Place:
    """Place of a rank: its device and backend, and a directory that all ranks share."""

    device: str
    backend: str
    directory: str

    def path(self, name: str) -> Path:
        return Path(self.directory) / name


def train(training: Training, place: Place) -> Found:
    """Return the losses and weights of a training that needs only settings."""
    found = _run(training, place)
    if training.repeats and (again := _run(training, place)) != found:
        raise AssertionError(f"a second run has other bits: {again} instead of {found}")
    return found


def _run(training: Training, place: Place) -> Found:
    with engine_of(training, place) as (engine, batch):
        return describe(engine, take_steps(engine, batch, training.steps * training.accumulation))


def take_steps(engine: Any, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    """Return the losses of `steps` micro-steps."""
    return [float(train_step(engine, *batch)) for _ in range(steps)]


def describe(engine: Any, losses: list[float], figure: str = "") -> Found:
    """Return the result of a program that has trained `engine`."""
    return {"losses": losses, "weights": digest(engine), "figure": figure}


@contextmanager
def engine_of(training: Training, place: Place) -> Iterator[tuple[Any, tuple[Tensor, Tensor]]]:
    """Return an engine for a small network, and this rank's batch in the type of its weights."""
    width, layers = SIZES[place.device]
    model, batch = network(width, layers)
    engine = make_engine(model, config_of(training, place))
    try:
        kind = next(engine.module.parameters()).dtype
        yield engine, (batch[0].to(kind), batch[1].to(kind))
    finally:
        engine.destroy()


def make_engine(model: nn.Module, config: Mapping[str, Any], parameters: Any = None) -> Any:
    """Return an engine of DeepSpeed that is compressed. It trains all parameters of `model` if none are given."""
    given = list(model.parameters()) if parameters is None else parameters
    return deepspeed_compress.initialize(model=model, model_parameters=given, config=config)[0]


def config_of(training: Training, place: Place) -> dict[str, Any]:
    """Return the ds_config of a training."""
    width, _ = SIZES[place.device]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.accumulation,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": training.stage, "reduce_bucket_size": 2 * width * width},
        SECTION: {"monitor": {"announce": False}, **training.section},
        **training.extra,
    }


def check(holds: bool, problem: str) -> None:
    """Raise an AssertionError with `problem` unless it `holds`."""
    if not holds:
        raise AssertionError(problem)
