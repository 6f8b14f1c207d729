"""PyTorch's own ways to train data-parallel: DDP with its communication hooks, and FSDP2."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.subjects import Subject, bare_model, plain_step
from deepspeed_compress.tools.bench.workload import Workload

__all__ = ["PEERS"]

POWERSGD_STARTS = 2
"""The earliest optimizer step at which the hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""More than any model: with more than one bucket PowerSGD aborts on gloo."""

Hook = Callable[[Any, Any], Any]


def _ddp(workload: Workload, hook: Hook | None = None, state: Callable[[], object] = lambda: None) -> Subject:
    """DDP, whose gradients `hook(state, bucket)` sums."""
    ids = [device().index] if device().type == "cuda" else None
    model = DistributedDataParallel(bare_model(workload), device_ids=ids)
    if hook is not None:
        model.register_comm_hook(state(), hook)
    return Subject(plain_step(model, model, workload, partial(_ddp_synchronised, model)))


def _ddp_synchronised(model: DistributedDataParallel, last: bool) -> AbstractContextManager[object]:
    return nullcontext() if last else model.no_sync()


def _compressed_to_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    # By its own name DDP refuses this hook without CUDA, where gloo sums bf16 as well.
    return bf16_compress_hook(state, bucket)


def _powersgd(workload: Workload, rank: int) -> Subject:
    """PowerSGD of DDP, measured after it has begun: the first steps are dense."""
    model = DistributedDataParallel(bare_model(workload), bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=POWERSGD_STARTS)
    model.register_comm_hook(state, powerSGD_hook)
    step = plain_step(model, model, workload, partial(_ddp_synchronised, model))
    return Subject(step, first_steps=POWERSGD_STARTS + 2)


def _fsdp2(workload: Workload) -> Subject:
    """FSDP2: every block that transformers says must not be split, and the rest."""
    model = bare_model(workload)
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Subject(plain_step(model, model, workload, partial(_fsdp2_synchronised, model)))


def _blocks(model: Any) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def _fsdp2_synchronised(model: Any, last: bool) -> Any:
    model.set_requires_gradient_sync(last)
    yield


PEERS: Mapping[str, Callable[[Workload], Subject]] = MappingProxyType(
    {
        "ddp": _ddp,
        "ddp-bf16": partial(_ddp, hook=_compressed_to_bf16),
        "ddp-powersgd1": partial(_powersgd, rank=1),
        "ddp-powersgd4": partial(_powersgd, rank=4),
        "fsdp2": _fsdp2,
    }
)
"""By name: what makes it on this rank."""
