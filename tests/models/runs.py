"""One model trained in a layout, and by a single process: the same weights, the same global batches."""

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
"""Sequences of a micro-batch."""
ADAM: Mapping[str, Any] = {"lr": 3e-3, "weight_decay": 0.1}


@dataclass(frozen=True)
class Run:
    """`model`: a config or a pretrained directory. `stage`: of ZeRO. `clip`: 0 is off. `extra`: of the ds_config."""

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
        """Tokens of a global batch, (batch_size, length), for each step; four of them in turn, so that losses fall."""
        return (random_tokens(self.batch_size, seed=step % 4) for step in range(self.steps))


def start(run: Run) -> Any:
    """An engine of this rank for the model of `run`."""
    deepspeed.init_distributed("gloo")
    module = build_parallel(run.model, read_model_config(run.model), SEED, run.layout)
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    engine, *_ = deepspeed_compress.initialize(model=module, model_parameters=parameters, config=run.ds_config())
    return engine


def stepper_of(engine: Any, run: Run) -> Stepper:
    return PipelineStepper(engine) if run.layout.pipeline > 1 else PlainStepper(engine)


def own_part(batch: Tensor, share: Share) -> Tensor:
    """Of a global batch, what this rank reads: (micro_batches, ROWS, length)."""
    return batch[torch.from_numpy(share.of(np.arange(len(batch))))]


def train(engine: Any, run: Run) -> list[float]:
    """Mean loss over the global batch, at each step."""
    stepper, share = stepper_of(engine, run), share_of(engine)
    return [mean_over_ranks([stepper.train(own_part(batch, share))], share) for batch in run.batches()]


def train_alone(run: Run, dtype: torch.dtype = torch.float32) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a single process, without DeepSpeed, that takes each global batch at once."""
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


def differences(engine: Any, run: Run) -> tuple[set[str], set[str]]:
    """Names of the weights that this rank has a part of, and of those that differ from a single process' new ones."""
    alone = build_model(run.model, read_model_config(run.model), SEED).state_dict()
    found = dict(whole_weights(engine.module))
    return set(found), {name for name, value in found.items() if not torch.equal(value, alone[name])}


def expected_names(run: Run) -> set[str]:
    """Of all weights of the model, tied ones once."""
    model = build_model(run.model, read_model_config(run.model), SEED)
    return {name for name, _ in model.named_parameters()}


def finish(engine: Any) -> None:
    """Of several runs in one process, each must leave its groups."""
    dist.barrier()
    engine.destroy()
