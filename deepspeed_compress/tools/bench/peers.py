"""What PyTorch offers beside DeepSpeed, ready to take steps: DDP, its communication hooks, FSDP2, local SGD."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import lr_schedules
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.workload import Workload

__all__ = ["PEERS", "Optimizer", "Peer", "TorchStepper", "Wrapped", "alone", "bare_model"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
WARMED_UP = 2
"""The earliest optimizer step at which PowerSGD's hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""More than any model: with more than one bucket PowerSGD aborts on gloo."""


@dataclass(frozen=True)
class Optimizer:
    """`adamw`: keyword arguments of torch.optim.AdamW. `schedule`: of DeepSpeed (`type`, `params`), or None."""

    adamw: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"lr": 1e-3}))
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def of(cls, ds_config: Mapping[str, Any]) -> "Optimizer":
        """What DeepSpeed takes from `ds_config`, whose optimizer is AdamW with `torch_adam`."""
        params = {name: value for name, value in ds_config["optimizer"]["params"].items() if name != "torch_adam"}
        return cls(params, ds_config.get("scheduler"))


@dataclass(frozen=True)
class Wrapped:
    """A model whose gradients are summed in its backward.

    `synchronised(last)`: context of a micro-batch, which tells whether it is the last one of its step. `stepped`: to
    call after each optimizer step. `evaluating`: context in which all ranks have the weights that the method trains.
    """

    model: Any
    parameters_of: Any
    synchronised: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()
    stepped: Callable[[], object] = lambda: None
    evaluating: Callable[[], AbstractContextManager[object]] = nullcontext


class TorchStepper:
    """A loop of PyTorch as its tutorials have it: AdamW after clipping. The loss is this rank's own."""

    def __init__(self, wrapped: Wrapped, workload: Workload, optimizer: Optimizer) -> None:
        self.wrapped, self.clipping = wrapped, workload.clipping
        # FSDP2 cuts the parameters when it wraps, so that they are asked for here.
        self.parameters = list(wrapped.parameters_of.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **optimizer.adamw)
        self.schedule = _schedule(self.optimizer, optimizer.schedule)

    def train(self, batch: Tensor) -> Tensor:
        """One optimizer step on token windows (micro_batches, micro_size, length): the mean loss, ()."""
        self.wrapped.model.train()
        loss = torch.stack([self._accumulate(tokens, number, len(batch)) for number, tokens in enumerate(batch, 1)])
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clipping)
        self.optimizer.step()
        self.wrapped.stepped()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return loss.mean()

    def evaluate(self, batch: Tensor) -> Tensor:
        """Loss of the same without gradients."""
        self.wrapped.model.eval()
        with torch.no_grad(), self.wrapped.evaluating():
            return torch.stack([self._loss(tokens) for tokens in batch]).mean()

    def _accumulate(self, tokens: Tensor, number: int, count: int) -> Tensor:
        with self.wrapped.synchronised(number == count):
            loss = self._loss(tokens)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.wrapped.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def _schedule(optimizer: torch.optim.Optimizer, described: Mapping[str, Any] | None) -> Any:
    """DeepSpeed's own, so that peers have its rates to the last bit."""
    return getattr(lr_schedules, described["type"])(optimizer, **described["params"]) if described else None


def bare_model(workload: Workload) -> Any:
    """The model on this rank's device, in the precision of the workload."""
    path = Path(workload.model)
    model: Any = build_model(path, read_model_config(path), workload.seed)
    if workload.recompute:
        model.gradient_checkpointing_enable()
    return model.to(device(), DTYPES[workload.precision]).train()


def alone(model: Any, start: int) -> Wrapped:
    """Nothing is communicated."""
    return Wrapped(model, model)


def _ddp(model: Any, start: int) -> Wrapped:
    return _of_ddp(_distributed(model))


def _ddp_bf16(model: Any, start: int) -> Wrapped:
    ddp = _distributed(model)
    ddp.register_comm_hook(None, _compressed_to_bf16)
    return _of_ddp(ddp)


def _powersgd(model: Any, start: int, rank: int) -> Wrapped:
    """With error feedback and warm start, as by default."""
    ddp = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    ddp.register_comm_hook(state, powerSGD_hook)
    return _of_ddp(ddp)


def _post_local(model: Any, start: int, period: int) -> Wrapped:
    """Steps on this rank's own gradients, and every `period` of them the mean of all weights."""
    ddp = _distributed(model)
    state: Any = PostLocalSGDState(None, None, start, False)  # type: ignore[no-untyped-call]
    ddp.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(period, warmup_steps=start)

    def average() -> None:
        averager.average_parameters(ddp.parameters())

    return _of_ddp(ddp, average, partial(_averaged, ddp))


def _of_ddp(
    ddp: DistributedDataParallel,
    stepped: Callable[[], object] = lambda: None,
    evaluating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Wrapped:
    return Wrapped(ddp, ddp, partial(_ddp_synchronised, ddp), stepped, evaluating)


def _distributed(model: Any) -> DistributedDataParallel:
    ids = [device().index] if device().type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def _ddp_synchronised(model: DistributedDataParallel, last: bool) -> AbstractContextManager[object]:
    return nullcontext() if last else model.no_sync()


def _compressed_to_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    # By its own name DDP refuses this hook without CUDA, where gloo sums bf16 as well.
    return bf16_compress_hook(state, bucket)


@contextmanager
def _averaged(model: Any) -> Iterator[None]:
    """The mean of all ranks' weights in the place of each rank's own."""
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    average_parameters(iter(parameters), dist.distributed_c10d._get_default_group())
    yield
    for parameter, kept in zip(parameters, own, strict=True):
        parameter.data.copy_(kept)


def _fsdp2(model: Any, start: int) -> Wrapped:
    """Every block that transformers says must not be split, and the rest."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Wrapped(model, model, partial(_fsdp2_synchronised, model))


def _blocks(model: Any) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def _fsdp2_synchronised(model: Any, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    yield


@dataclass(frozen=True)
class Peer:
    """`wrap(model, start)`: the model on this rank, whose first `start` optimizer steps are DDP's.

    `least_start`: the fewest of them; None for a method that begins at once, whatever `start` is. `period`: optimizer
    steps after which what is sent repeats.
    """

    wrap: Callable[..., Wrapped]
    least_start: int | None = None
    period: int = 1


PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "ddp": Peer(_ddp),
        "ddp-bf16": Peer(_ddp_bf16),
        **{f"ddp-powersgd{rank}": Peer(partial(_powersgd, rank=rank), WARMED_UP) for rank in (1, 2, 4, 8)},
        **{f"ddp-post-local{steps}": Peer(partial(_post_local, period=steps), 0, steps) for steps in (4, 8)},
        "fsdp2": Peer(_fsdp2),
    }
)
"""By name, as `bench step --peers` and the studies take it."""
