"""Peers to compare with: PyTorch's DDP, its communication hooks, and FSDP2.

All share one plain PyTorch training loop and the settings of its optimizer.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_compress import ddp, fsdp2
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.tools.bench.gauges import device, ranks_of_host
from deepspeed_compress.tools.bench.workload import Workload

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Optimizer:
    """Optimizer of the peers.

    Attributes:
        adamw: Keyword arguments of torch.optim.AdamW.
        schedule: Learning rate schedule of DeepSpeed (`type` and `params`), or None.
    """

    adamw: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"lr": 1e-3}))
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any]) -> "Optimizer":
        """Return the settings that DeepSpeed uses for `ds_config`, whose optimizer is AdamW with `torch_adam`."""
        params = {name: value for name, value in ds_config["optimizer"]["params"].items() if name != "torch_adam"}
        return cls(params, ds_config.get("scheduler"))

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return DeepSpeed's own schedule for `optimizer`, so that learning rates are bit-identical, or None."""
        found = self.schedule
        return getattr(lr_schedules, found["type"])(optimizer, **found["params"]) if found else None


class TorchStepper:
    """Plain PyTorch training loop: gradient clipping and AdamW. The loss is this rank's own.

    Subclasses say how gradients are averaged during the backward pass.
    """

    session: Any = None

    def __init__(self, model: Any, workload: Workload, optimizer: Optimizer) -> None:
        self.model, self.clipping = model, workload.clipping
        # FSDP2 replaces the parameters when it wraps the model, so they are collected afterwards.
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **optimizer.adamw)
        self.schedule = optimizer.scheduled(self.optimizer)

    def train(self, batch: Tensor) -> Tensor:
        """Run one optimizer step and return the mean loss, of shape ().

        `batch` holds token windows of shape (micro_batches, micro_size, length).
        """
        self.model.train()
        loss = torch.stack([self._accumulate(tokens, number, len(batch)) for number, tokens in enumerate(batch, 1)])
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return loss.mean()

    def evaluate(self, batch: Tensor) -> Tensor:
        """Return the mean loss on `batch` without computing gradients."""
        self.model.eval()
        with torch.no_grad():
            return torch.stack([self._loss(tokens) for tokens in batch]).mean()

    def synchronised(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch. `last` is True for the last one of a step."""
        return nullcontext()

    def close(self) -> None:
        """Release everything that the stepper holds in this process, so that the next one can start."""

    def _accumulate(self, tokens: Tensor, number: int, count: int) -> Tensor:
        with self.synchronised(number == count):
            loss = self._loss(tokens)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def bare_model(workload: Workload) -> Any:
    """Return the model on this rank's device, in the precision of the workload."""
    path = Path(workload.model)
    model: Any = build_model(path, read_model_config(path), workload.seed)
    add_adapters(model, workload.lora_rank)
    if workload.recompute:
        model.gradient_checkpointing_enable()
    return model.to(device(), DTYPES[workload.precision]).train()


def add_adapters(model: nn.Module, rank: int) -> None:
    """Give every matrix of the layers of a model of transformers an adapter, and freeze the rest. No rank: do nothing.

    Source: LoRA (2106.09685), as PEFT implements it.
    """
    if rank:
        from peft import LoraConfig, inject_adapter_in_model

        inject_adapter_in_model(LoraConfig(r=rank, target_modules="all-linear"), model)


POWERSGD_START = 2
"""First optimizer step at which PowerSGD's hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""Bucket size in MB, larger than any model. With more than one bucket, PowerSGD aborts on gloo."""


class DdpStepper(TorchStepper):
    """Training loop with DDP. Gradients are compressed by this package if there is a `section`."""

    def __init__(
        self,
        workload: Workload,
        optimizer: Optimizer,
        start: int,
        section: Mapping[str, Any] | None = None,
        bucket_mb: int | None = None,
    ) -> None:
        ids = [device().index] if device().type == "cuda" else None
        model = DistributedDataParallel(bare_model(workload), device_ids=ids, bucket_cap_mb=bucket_mb)
        super().__init__(model, workload, optimizer)
        if section is not None:
            self.session = ddp.attach(model, {SECTION: dict(section)}, self.optimizer).session

    def synchronised(self, last: bool) -> AbstractContextManager[object]:
        return nullcontext() if last else self.model.no_sync()


class PowerSgdStepper(DdpStepper):
    """Training loop with DDP and PowerSGD's hook, which uses error feedback and warm start by default."""

    def __init__(self, workload: Workload, optimizer: Optimizer, start: int, rank: int) -> None:
        super().__init__(workload, optimizer, start, bucket_mb=ONE_BUCKET_MB)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
        self.model.register_comm_hook(state, powerSGD_hook)


class Fsdp2Stepper(TorchStepper):
    """Training loop with FSDP2, with one unit per block that transformers must not split and one for the rest.

    The model is sharded over all ranks, or over those of a host if `by_host` (HSDP). Communication is compressed by
    this package if there is a `section`.
    """

    def __init__(
        self,
        workload: Workload,
        optimizer: Optimizer,
        start: int,
        by_host: bool = False,
        section: Mapping[str, Any] | None = None,
    ) -> None:
        model, ranks = bare_model(workload), dist.get_world_size()
        shape = (ranks // ranks_of_host(), ranks_of_host()) if by_host else (ranks,)
        mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
        names = set(model._no_split_modules or ())
        for block in [module for module in model.modules() if type(module).__name__ in names]:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        super().__init__(model, workload, optimizer)
        if section is not None:
            self.session = fsdp2.attach(model, {SECTION: dict(section)}, self.optimizer).session

    def synchronised(self, last: bool) -> AbstractContextManager[object]:
        self.model.set_requires_gradient_sync(last)
        return nullcontext()


@dataclass(frozen=True)
class Peer:
    """Peer to compare with.

    Attributes:
        make: Function of the workload, the optimizer and `start` that returns the stepper of this rank: a `Stepper`
            with the package's `session` or None, and `close`. The first `start` steps are those of plain DDP.
        least_start: Minimum of `start`, or None for a method that takes effect at once and ignores `start`.
    """

    make: Callable[[Workload, Optimizer, int], Any]
    least_start: int | None = None


INT4: Mapping[str, Any] = {"gradients": {"method": "blockwise", "bits": 4}, "monitor": {"every": 1}}
_INT4_WEIGHTS: Mapping[str, Any] = {**INT4, "weights": {"bits": 4}}
PEERS: Mapping[str, Peer] = {
    "ddp": Peer(DdpStepper),
    "ddp-int4": Peer(partial(DdpStepper, section=INT4)),
    **{f"ddp-powersgd{rank}": Peer(partial(PowerSgdStepper, rank=rank), POWERSGD_START) for rank in (1, 4)},
    "fsdp2": Peer(Fsdp2Stepper),
    "fsdp2-hsdp": Peer(partial(Fsdp2Stepper, by_host=True)),
    "fsdp2-int4": Peer(partial(Fsdp2Stepper, section=INT4)),
    "fsdp2-int4-weights": Peer(partial(Fsdp2Stepper, section=_INT4_WEIGHTS)),
}
"""Peers by name, as `bench step --peers` accepts it."""
