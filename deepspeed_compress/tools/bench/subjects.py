"""Ways to train, made and ready to take steps: compute alone, and DeepSpeed with and without the package."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, share_of

__all__ = ["DTYPES", "LEARNING_RATE", "Subject", "bare_model", "compute_only", "engine", "plain_step", "tokens"]

LEARNING_RATE = 1e-3
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)


@dataclass(frozen=True)
class Subject:
    """`step` takes an optimizer step. `session`: of the package, if it is there.

    `first_steps` are not measured: ZeRO 3 records the order of layers, memory is allocated, methods begin late.
    """

    step: Callable[[], object]
    close: Callable[[], object] = lambda: None
    session: Any = None
    first_steps: int = 2


def tokens(workload: Workload, rank: int, count: int, size: int) -> Tensor:
    """Random tokens [count, size, seq_len], others on each `rank`."""
    vocabulary = read_model_config(Path(workload.model)).vocab_size
    generator = torch.Generator().manual_seed(workload.seed + 1 + rank)
    return torch.randint(vocabulary, (count, size, workload.seq_len), generator=generator).to(device())


def engine(workload: Workload, ds_config: Mapping[str, Any]) -> Subject:
    """An engine of DeepSpeed, of the package when `ds_config` has its section."""
    path, partition = Path(workload.model), workload.partition
    layout = Layout(
        workload.tensor,
        workload.pipeline,
        tuple(partition) if isinstance(partition, list) else partition,
        workload.recompute,
    )
    module: Any = build_parallel(path, read_model_config(path), workload.seed, layout)
    compressed = SECTION in ds_config
    initialize = deepspeed_compress.initialize if compressed else deepspeed.initialize
    # DeepSpeed may write into what it is given.
    made = initialize(model=module, model_parameters=list(module.parameters()), config=copy.deepcopy(dict(ds_config)))[
        0
    ]
    batch = tokens(workload, share_of(made).rank, workload.accumulation, workload.micro_batch)
    stepper = PipelineStepper(made) if workload.pipeline > 1 else PlainStepper(made)
    return Subject(lambda: stepper.train(batch), made.destroy, made.compression if compressed else None)


def compute_only(workload: Workload) -> Subject:
    """The whole model on one process with its share of the sequences, and nothing to communicate."""
    model = bare_model(workload)
    return Subject(plain_step(model, model, workload))


def bare_model(workload: Workload) -> Any:
    """The model on this rank's device, in the precision of the workload."""
    path = Path(workload.model)
    model: Any = build_model(path, read_model_config(path), workload.seed)
    if workload.recompute:
        model.gradient_checkpointing_enable()
    return model.to(device(), DTYPES[workload.precision]).train()


def plain_step(
    model: Any,
    parameters_of: Any,
    workload: Workload,
    synchronised: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext(),
) -> Callable[[], None]:
    """A step of `model` on the share of this process: clipping and AdamW of the parameters of `parameters_of`.

    `synchronised(last)` is the context of each micro-batch, which tells whether it is the last one of the step.
    """
    optimizer = torch.optim.AdamW(parameters_of.parameters(), lr=LEARNING_RATE)
    batch = tokens(workload, dist.get_rank(), *workload.share)

    def step() -> None:
        for number, part in enumerate(batch, 1):
            with synchronised(number == len(batch)):
                (model(input_ids=part, labels=part, use_cache=False).loss / len(batch)).backward()
        if workload.clipping:
            torch.nn.utils.clip_grad_norm_(parameters_of.parameters(), workload.clipping)
        optimizer.step()
        optimizer.zero_grad()

    return step
