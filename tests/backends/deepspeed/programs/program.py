"""Definition of a program: a small training script that does not know of the package."""

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
"""Records of a rank in order: losses, norms, and all weights at the end, each with a label."""


@dataclass(frozen=True, eq=False)
class Program:
    """Program that is compared with and without the package.

    `train` is called on every rank, and its records are compared. `config` is merged into the DeepSpeed configuration.
    `alone` programs change state of DeepSpeed that outlives an engine, so they get their own processes. `fails` holds
    the ZeRO stages at which DeepSpeed itself cannot run the program, with a part of the message. `refused` holds the
    stages at which compressed gradients (`refused_weights`: compressed weights) are refused before the first step, with
    a part of the message. `rounded` is True if DeepSpeed rounds gradients before it adds them and our sums do not, or
    add them in another order.
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
    """Run of a program on one rank. If `section` is None, DeepSpeed runs without the package."""

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
        """Return the DeepSpeed configuration, merged with that of the program and `extra`.

        Keys with the value None are left out.
        """
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

    def start(
        self, model: nn.Module, extra: Mapping[str, Any] | None = None, has_section: bool = True, **options: Any
    ) -> Any:
        """Return an engine for `model`. `options` are passed to `deepspeed.initialize`.

        Without `has_section`, the configuration of this engine never has the section.
        """
        if "optimizer" not in options:
            options.setdefault("model_parameters", list(model.parameters()))
        config = self.config(**(extra or {}))
        if not has_section:
            config.pop(SECTION, None)
        engine = deepspeed.initialize(model=model, config=config, **options)[0]
        self.engines.append(engine)
        self.steps = 0
        return engine

    def batch(self, size: int = BATCH) -> tuple[Tensor, Tensor]:
        """Return the next micro-batch of this rank: inputs (size, WIDTH) and targets (size, 1)."""
        x = torch.randn(size, WIDTH, generator=self._generator)
        return x, x[:, :3].sum(dim=1, keepdim=True)

    def loss(self, model: Any, size: int = BATCH, **options: Any) -> Tensor:
        """Return and record the loss of an engine or a module on the next micro-batch.

        `options` are passed to forward.
        """
        x, y = self.batch(size)
        dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        loss = (model(x.to(dtype), **options).float() - y).square().mean()
        self.keep("loss", loss)
        return loss

    def learn(self, engine: Any, steps: int = 3, **options: Any) -> None:
        """Train as most scripts do: forward, backward, step."""
        for _ in range(steps):
            engine.backward(self.loss(engine, **options))
            self.step(engine)

    def step(self, engine: Any) -> None:
        """Call `step` and record the gradient norm. `steps` counts the calls since the newest engine was created."""
        engine.step()
        self.steps += 1
        if engine.get_global_grad_norm() is not None:
            self.keep("gradient norm", engine.get_global_grad_norm())

    def keep(self, label: str, value: Any) -> None:
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        self.records.append((f"{len(self.records)} {label}", value.clone()))

    def finish(self) -> None:
        """Record the weights of all engines and destroy the engines."""
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
