"""Training of one model in a layout and in a single process, with the same weights and global batches."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config
from deepspeed_compress.models.export import whole_weights
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, Share, Stepper, mean_over_ranks, share_of
from tests.models.families import random_tokens

SEED = 3
ROWS = 2
"""Sequences in a micro-batch."""
ADAM: Mapping[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Run:
    """Training run of one model.

    Attributes:
        model: config file or pretrained directory.
        layout: layout of the model.
        stage: ZeRO stage.
        steps: number of steps.
        accumulation: gradient accumulation steps.
        data: number of data-parallel replicas.
        clip: largest gradient norm; 0 for no clipping.
        extra: other keys of the DeepSpeed configuration.
    """

    model: Path
    layout: Layout
    stage: int = 0
    steps: int = 3
    accumulation: int = 1
    data: int = 1
    clip: float = 1.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    @property
    def ranks(self) -> int:
        return self.layout.tensor * self.layout.pipeline * self.data

    @property
    def batch_size(self) -> int:
        return self.data * self.accumulation * ROWS

    def ds_config(self) -> dict[str, Any]:
        parallelism = {"zero_stage": self.stage, "tensor": self.layout.tensor, "pipeline": self.layout.pipeline}
        return {
            "train_micro_batch_size_per_gpu": ROWS,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "steps_per_print": 10**9,
            "optimizer": {"type": "AdamW", "params": {**ADAM, "torch_adam": True}},
            "zero_optimization": {"stage3_param_persistence_threshold": 0},
            SECTION: {"parallelism": parallelism, "gradients": {"method": "none"}},
            **self.extra,
        }

    def batches(self) -> Iterator[Tensor]:
        """Yield the tokens (batch_size, length) of each global batch. Four batches repeat, so that losses fall."""
        return (random_tokens(self.batch_size, seed=step % 4) for step in range(self.steps))


def start(run: Run) -> Any:
    """Return this rank's engine for the model of `run`."""
    deepspeed.init_distributed("gloo")
    module = build_parallel(run.model, read_model_config(run.model), SEED, run.layout)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed_compress.initialize(model=module, model_parameters=parameters, config=run.ds_config())
    return engine


def stepper_of(engine: Any, run: Run) -> Stepper:
    return PipelineStepper(engine) if run.layout.pipeline > 1 else PlainStepper(engine)


def own_part(batch: Tensor, share: Share) -> Tensor:
    """Return this rank's part of a global batch: (micro_batches, ROWS, length)."""
    return batch[torch.from_numpy(share.of(np.arange(len(batch))))]


def train(engine: Any, run: Run) -> list[float]:
    """Train, and return the mean loss over the global batch at each step."""
    stepper, share = stepper_of(engine, run), share_of(engine)
    return [mean_over_ranks([stepper.train(own_part(batch, share))], share) for batch in run.batches()]


def train_alone(run: Run, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[float]]:
    """Train in a single process without DeepSpeed, a global batch at a time; return the losses and gradient norms."""
    model: Any = build_model(run.model, read_model_config(run.model), SEED).to(dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAM)
    losses, norms = [], []
    for batch in run.batches():
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), run.clip or math.inf)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def weight_names(engine: Any, run: Run) -> tuple[set[str], set[str]]:
    """Return the names of this rank's weights, and of those that differ from a single process's initial weights."""
    alone = build_model(run.model, read_model_config(run.model), SEED).state_dict()
    found = dict(whole_weights(engine.module))
    return set(found), {name for name, value in found.items() if not torch.equal(value, alone[name])}


def expected_names(run: Run) -> set[str]:
    """Return the names of all weights of the model, each tied weight once."""
    model = build_model(run.model, read_model_config(run.model), SEED)
    return {name for name, _ in model.named_parameters()}


def finish(engine: Any) -> None:
    """Destroy the engine, so that another run in this process can make its own groups."""
    dist.barrier()
    engine.destroy()
