"""Ways to train, made and ready to take steps: compute alone, DeepSpeed with and without the package, DDP and FSDP2."""

import copy
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, share_of

__all__ = ["DTYPES", "LEARNING_RATE", "PEERS", "System", "bare_model", "compute_only", "engine", "plain_step", "tokens"]

LEARNING_RATE = 1e-3
DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)


@dataclass(frozen=True)
class System:
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


def engine(workload: Workload, ds_config: Mapping[str, Any]) -> System:
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
    return System(lambda: stepper.train(batch), made.destroy, made.compression if compressed else None)


def compute_only(workload: Workload) -> System:
    """The whole model on one process with its share of the sequences, and nothing to communicate."""
    model = bare_model(workload)
    return System(plain_step(model, model, workload))


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


POWERSGD_STARTS = 2
"""The earliest optimizer step at which the hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""More than any model: with more than one bucket PowerSGD aborts on gloo."""

Hook = Callable[[Any, Any], Any]


def _ddp(workload: Workload, hook: Hook | None = None, state: Callable[[], object] = lambda: None) -> System:
    """DDP, whose gradients `hook(state, bucket)` sums."""
    ids = [device().index] if device().type == "cuda" else None
    model = DistributedDataParallel(bare_model(workload), device_ids=ids)
    if hook is not None:
        model.register_comm_hook(state(), hook)
    return System(plain_step(model, model, workload, partial(_ddp_synchronised, model)))


def _ddp_synchronised(model: DistributedDataParallel, last: bool) -> AbstractContextManager[object]:
    return nullcontext() if last else model.no_sync()


def _compressed_to_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    # By its own name DDP refuses this hook without CUDA, where gloo sums bf16 as well.
    return bf16_compress_hook(state, bucket)


def _powersgd(workload: Workload, rank: int) -> System:
    """PowerSGD of DDP, measured after it has begun: the first steps are dense."""
    model = DistributedDataParallel(bare_model(workload), bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_STARTS)
    model.register_comm_hook(state, powerSGD_hook)
    step = plain_step(model, model, workload, partial(_ddp_synchronised, model))
    return System(step, first_steps=POWERSGD_STARTS + 2)


def _fsdp2(workload: Workload) -> System:
    """FSDP2: every block that transformers says must not be split, and the rest."""
    model = bare_model(workload)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return System(plain_step(model, model, workload, partial(_fsdp2_synchronised, model)))


def _blocks(model: Any) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def _fsdp2_synchronised(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    yield


PEERS: Mapping[str, Callable[[Workload], System]] = MappingProxyType(
    {
        "ddp": _ddp,
        "ddp-bf16": partial(_ddp, hook=_compressed_to_bf16),
        "ddp-powersgd1": partial(_powersgd, rank=1),
        "ddp-powersgd4": partial(_powersgd, rank=4),
        "fsdp2": _fsdp2,
    }
)
"""By name: what makes it on this rank."""
