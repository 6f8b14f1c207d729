"""Training of a small model with DeepSpeed, with and without compression, for tests of the engine."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.pipe import PipelineModule, TiedLayerSpec
from deepspeed.runtime.pipe.engine import PipelineEngine
from torch import nn

import deepspeed_compress
from deepspeed_compress.backends.deepspeed.weights.master_weights import find_master_weights
from deepspeed_compress.config import SECTION
from tests.support.messages import caught_warnings

WIDTH = 12
BATCH = 3
MUON: Mapping[str, Any] = {"optimizer": {"type": "Muon", "params": {"lr": 1e-2}}}
"""Configuration with Muon. DeepSpeed uses it for matrices, and Adam for biases."""

CHOSEN: Mapping[str, Any] = {"gradient_clipping": 1.0}
"""Keys of the ds_config whose values differ from DeepSpeed's, so that clipping is tested."""
CHOSEN_OF_ZERO: Mapping[str, Any] = {"reduce_bucket_size": 600, "stage3_param_persistence_threshold": 0}
"""Keys of `zero_optimization` whose values differ from DeepSpeed's, so that the small model has several buckets."""


@dataclass(frozen=True)
class Job:
    """One training run. If `section` is None, DeepSpeed runs alone. `extra` is merged into the ds_config."""

    stage: int = 0
    section: Mapping[str, Any] | None = None
    zero: Mapping[str, Any] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 4
    accumulation: int = 1
    stages: int = 1
    poison: tuple[int, int] | None = None
    """(step, rank) of a batch that contains a NaN."""
    skip: tuple[int, ...] = ()
    """Steps whose batches are omitted."""
    seed: int = 0
    """Seed of the data and, unless the model is a pipeline, of its first weights."""
    defaults: bool = False
    """True for DeepSpeed's own values of the keys in `CHOSEN` and `CHOSEN_OF_ZERO`."""

    def config(self) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "gradient_accumulation_steps": self.accumulation,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            **({} if self.defaults else CHOSEN),
            "zero_optimization": {"stage": self.stage, **({} if self.defaults else CHOSEN_OF_ZERO), **self.zero},
            **self.extra,
        }
        return config if self.section is None else {**config, SECTION: dict(self.section)}


@dataclass(frozen=True)
class Outcome:
    """Result of a rank: the loss of every micro-step, and all parameters at the end, as lists of floats."""

    losses: list[float]
    parameters: dict[str, list[float]]
    skipped: int = 0


def network(seed: int = 0) -> nn.Sequential:
    """Return a model with sizes that are not divisible by 2 or block sizes, and some with fewer elements than ranks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(WIDTH, 31), nn.ReLU(), nn.Linear(31, 17), nn.ReLU(), nn.Linear(17, 3), nn.Linear(3, 1, bias=False)
    )


def data(rank: int, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a rank."""
    generator = torch.Generator().manual_seed(100 + rank + 1000 * job.seed)
    batches = []
    for step in range(job.steps):
        for _ in range(job.accumulation):
            x = torch.randn(BATCH, WIDTH, generator=generator)
            y = x[:, :3].sum(dim=1, keepdim=True)
            if job.poison == (step, rank):
                x[0, 0] = float("nan")
            if step not in job.skip:
                batches.append((x, y))
    return batches


def own_data(engine: Any, rank: int, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of a rank, which the other stages of its pipeline share."""
    return data(engine.grid.get_data_parallel_rank() if job.stages > 1 else rank, job)


def steady_data(rank: int, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return all of the rank's data for every micro-step, so that the order of batches does not matter."""
    batches = data(rank, job)
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    return [(x, y)] * len(batches)


def start(job: Job) -> Any:
    """Return an engine for the job's model."""
    if "fp16" in job.extra:
        # Every CPU supports fp16, but DeepSpeed accepts only those that are fast at it.
        get_accelerator().is_fp16_supported = lambda: True
    if job.stages > 1:
        deepspeed.init_distributed("gloo")
    return make_engine(pipeline(job.stages) if job.stages > 1 else network(job.seed), job.config())


def make_engine(model: nn.Module, config: Mapping[str, Any], parameters: Any = None, **options: Any) -> Any:
    """Return an engine for `model`, of DeepSpeed alone if `config` has no section of this package.

    Args:
        model: the model.
        config: configuration of DeepSpeed.
        parameters: parameters, or groups of them, to train; all of the model if None.
        options: further arguments of `deepspeed.initialize`.
    """
    given = list(model.parameters()) if parameters is None else parameters
    initialize = deepspeed_compress.initialize if SECTION in config else deepspeed.initialize
    return initialize(model=model, model_parameters=given, config=config, **options)[0]


def train_on(engine: Any, loss: torch.Tensor) -> float:
    """Take a step that reduces `loss`, and return its value."""
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


def run(engine: Any, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    """Train on `batches`, and return the losses, of steps if the model is a pipeline."""
    if isinstance(engine, PipelineEngine):
        return run_pipeline(engine, batches)
    losses = []
    for x, y in batches:
        output = engine(x.to(next(engine.module.parameters()).dtype))
        losses.append(train_on(engine, (output.float() - y).square().mean()))
    return losses


def run_pipeline(engine: Any, batches: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> list[float]:
    iterator = iter(batches)
    steps = len(batches) // engine.gradient_accumulation_steps()
    return [float(engine.train_batch(iterator)) for _ in range(steps)]


def moments(engine: Any) -> dict[str, list[float]]:
    """Return Adam's second moments of the elements that this rank updates, by name of the parameter."""
    states = [(one, engine.basic_optimizer.state.get(one.home, {})) for one in find_master_weights(engine).stepped]
    return {one.parameter: one.within(state["exp_avg_sq"]).tolist() for one, state in states if "exp_avg_sq" in state}


def weights(engine: Any) -> dict[str, list[float]]:
    """Return all parameters of the rank, gathered under ZeRO 3."""
    found = {}
    for name, parameter in engine.module.named_parameters():
        gathered = [parameter] if hasattr(parameter, "ds_id") else []
        with deepspeed.zero.GatheredParameters(gathered):
            found[name] = parameter.detach().float().flatten().tolist()
    return found


def warned(rank: int, job: Job) -> list[str]:
    """Return the package's warnings at the start of `job`."""
    with caught_warnings() as texts:
        start(job)
    return texts


def by_step(rank: int, job: Job, look: Callable[[Any], Any] = weights) -> list[Any]:
    """Train, and return what `look(engine)` returns after every step."""
    engine, seen = start(job), []
    for batch in data(rank, job):
        run(engine, [batch])
        seen.append(look(engine))
    engine.destroy()
    return seen


def figures_of(rank: int, job: Job, *names: str) -> list[tuple[Any, ...]]:
    """Train, and return the figures `names` of every step that this rank reports."""
    engine, seen = start(job), []
    engine.compression.subscribe(lambda figures: seen.append(tuple(getattr(figures, name) for name in names)))
    run(engine, data(rank, job))
    engine.destroy()
    return seen


def largest_difference(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    """Return the largest difference between two sets of weights."""
    return max(abs(a - b) for name in one for a, b in zip(one[name], other[name], strict=True))


def engines(*jobs: Job) -> Iterator[tuple[Job, Any]]:
    """Yield each of the jobs with its engine, which is destroyed before the next one is made."""
    for job in jobs:
        engine = start(job)
        yield job, engine
        engine.destroy()


def train(rank: int, *jobs: Job) -> list[Outcome]:
    """Run the jobs one after the other in this rank."""
    return [
        Outcome(run(engine, own_data(engine, rank, job)), weights(engine), engine.skipped_steps)
        for job, engine in engines(*jobs)
    ]


class Tied(nn.Module):
    """A matrix that the first and the last stage share."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def tied_output(module: Tied, x: torch.Tensor) -> torch.Tensor:
    return (x @ module.weight.t()).sum(dim=1, keepdim=True)


def pipeline(stages: int) -> PipelineModule:
    torch.manual_seed(0)
    layers = [
        TiedLayerSpec("matrix", Tied, tied_weight_attr="weight"),
        *(layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())),
        TiedLayerSpec("matrix", Tied, forward_fn=tied_output, tied_weight_attr="weight"),
    ]
    return PipelineModule(layers, num_stages=stages, loss_fn=nn.MSELoss(), partition_method="uniform")


def statistics_lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (directory / "compression.jsonl").read_text().splitlines()]
