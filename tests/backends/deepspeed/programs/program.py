"""What a program is: a training script in miniature, which does not know whether the package is there."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from deepspeed_compress.config import SECTION

WIDTH = 12
BATCH = 3
Records = list[tuple[str, Tensor]]
"""What a rank saw, in order: losses and norms, and all weights at the end. Labels name what differs."""


@dataclass(frozen=True, eq=False)
class Program:
    """`train` is called on every rank; what it records is compared.

    `config` is merged into the ds_config. `alone`: it changes state of DeepSpeed that outlives an engine, so it gets
    processes of its own. `fails`: the ZeRO stages at which DeepSpeed itself cannot run it, and a
    part of its message. `refused`: stages at which compressed gradients (`refused_weights`: weights too) are refused
    by name before the first step, and a part of that message. `rounded`: DeepSpeed rounds
    gradients before it adds them, and ours do not (or adds them in another order).
    """

    name: str
    train: Callable[["Run"], None]
    stages: tuple[int, ...] = (0, 1, 2, 3)
    config: Mapping[str, Any] = field(default_factory=dict)
    ranks: int = 2
    alone: bool = False
    rounded: bool = False
    fails: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[int, str] = field(default_factory=dict)
    refused_weights: Mapping[int, str] = field(default_factory=dict)


class Run:
    """One run of a program on one rank. `section` None is DeepSpeed without the package."""

    def __init__(
        self, program: Program, stage: int, rank: int, section: Mapping[str, Any] | None, directory: Path
    ) -> None:
        self.program, self.stage, self.rank, self.section, self.directory = program, stage, rank, section, directory
        self.records: Records = []
        self.engines: list[Any] = []
        self.steps = 0
        self._generator = torch.Generator().manual_seed(100 + rank)
        torch.manual_seed(0)

    def config(self, **extra: Any) -> dict[str, Any]:
        """The ds_config, with `extra` and that of the program merged in; a key whose value is None is left out."""
        zero = {"stage": self.stage, "reduce_bucket_size": 600, "stage3_param_persistence_threshold": 0}
        config = {
            "train_micro_batch_size_per_gpu": BATCH,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
            "gradient_clipping": 1.0,
            "zero_optimization": zero,
        }
        config = merged(merged(config, self.program.config), extra)
        return config if self.section is None else {**config, SECTION: dict(self.section)}

    def start(self, model: nn.Module, extra: Mapping[str, Any] | None = None, **options: Any) -> Any:
        """An engine for `model`; `options` go to `deepspeed.initialize`."""
        if "optimizer" not in options:
            options.setdefault("model_parameters", list(model.parameters()))
        engine = deepspeed.initialize(model=model, config=self.config(**(extra or {})), **options)[0]
        self.engines.append(engine)
        self.steps = 0
        return engine

    def batch(self, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """The next micro-batch of this rank: inputs (size, WIDTH) and targets (size, 1)."""
        x = torch.randn(size, WIDTH, generator=self._generator)
        return x, x[:, :3].sum(dim=1, keepdim=True)

    def loss(self, model: Any, size: int = BATCH, **options: Any) -> Tensor:
        """Of an engine or a module, for the next micro-batch; `options` go to its forward. Recorded."""
        x, y = self.batch(size)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        loss = (model(x.to(dtype), **options).float() - y).square().mean()
        self.keep("loss", loss)
        return loss

    def learn(self, engine: Any, steps: int = 3, **options: Any) -> None:
        """As most scripts do: forward, backward, step."""
        for _ in range(steps):
            engine.backward(self.loss(engine, **options))
            self.step(engine)

    def step(self, engine: Any) -> None:
        """`steps` counts those since an engine was made."""
        engine.step()
        self.steps += 1
        if engine.get_global_grad_norm() is not None:
            self.keep("gradient norm", engine.get_global_grad_norm())

    def keep(self, label: str, value: Any) -> None:
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        self.records.append((f"{len(self.records)} {label}", value.clone()))

    def finish(self) -> None:
        """Record the weights of all engines, and end them."""
        for index, engine in enumerate(self.engines):
            for name, parameter in engine.module.named_parameters():
                gathered = [parameter] if hasattr(parameter, "ds_id") else []
                with deepspeed.zero.GatheredParameters(gathered):
                    self.keep(f"weights of engine {index}: {name}", parameter)
            self.end(engine)

    def end(self, engine: Any) -> None:
        self.keep("applied steps", engine.global_steps - engine.skipped_steps)
        engine.destroy()


def merged(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(config)
    for key, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return {key: value for key, value in result.items() if value is not None}
