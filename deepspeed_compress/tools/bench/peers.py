"""PyTorch's own methods to compare with: DDP, its communication hooks, FSDP2 and local SGD."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

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

from deepspeed_compress import ddp, fsdp2
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import Stepper

__all__ = ["DTYPES", "PEERS", "Optimizer", "Peer", "TorchStepper", "Wrapped", "alone", "bare_model"]

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
)
WARMED_UP = 2
"""First optimizer step at which PowerSGD's hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""Bucket size in MB, larger than any model. With more than one bucket, PowerSGD aborts on gloo."""


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
    def of(cls, ds_config: Mapping[str, Any]) -> "Optimizer":
        """Return the settings that DeepSpeed uses for `ds_config`, whose optimizer is AdamW with `torch_adam`."""
        params = {name: value for name, value in ds_config["optimizer"]["params"].items() if name != "torch_adam"}
        return cls(params, ds_config.get("scheduler"))

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return DeepSpeed's own schedule for `optimizer`, so that learning rates are bit-identical, or None."""
        found = self.schedule
        return getattr(lr_schedules, found["type"])(optimizer, **found["params"]) if found else None


@dataclass(frozen=True)
class Wrapped:
    """Model whose gradients are averaged during its backward pass.

    Attributes:
        model: Model to call.
        parameters_of: Module whose parameters are trained.
        synchronised: Function that returns the context of a micro-batch. Its argument states whether the micro-batch is
            the last one of the step.
        stepped: Function to call after each optimizer step.
        evaluating: Function that returns a context in which all ranks have the weights that the method trains.
        attach: Function to call with the optimizer before the first step. Its result has a session, or is None.
    """

    model: Any
    parameters_of: Any
    synchronised: Callable[[bool], AbstractContextManager[object]] = lambda last: nullcontext()
    stepped: Callable[[], object] = lambda: None
    evaluating: Callable[[], AbstractContextManager[object]] = nullcontext
    attach: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: None


class PeerStepper(Stepper, Protocol):
    """Stepper of a peer. `session` is the package's session if the peer uses it, else None."""

    session: Any

    def close(self) -> None:
        """Release everything that the stepper holds in this process, so that the next one can start."""


class TorchStepper:
    """Plain PyTorch training loop: gradient clipping and AdamW. The loss is this rank's own."""

    def __init__(self, wrapped: Wrapped, workload: Workload, optimizer: Optimizer) -> None:
        self.wrapped, self.clipping = wrapped, workload.clipping
        # FSDP2 replaces the parameters when it wraps the model, so they are collected afterwards.
        self.parameters = list(wrapped.parameters_of.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **optimizer.adamw)
        attached = wrapped.attach(self.optimizer)
        self.session: Any = None if attached is None else attached.session
        self.schedule = optimizer.scheduled(self.optimizer)

    def train(self, batch: Tensor) -> Tensor:
        """Run one optimizer step and return the mean loss, of shape ().

        `batch` holds token windows of shape (micro_batches, micro_size, length).
        """
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
        """Return the mean loss on `batch` without computing gradients."""
        self.wrapped.model.eval()
        with torch.no_grad(), self.wrapped.evaluating():
            return torch.stack([self._loss(tokens) for tokens in batch]).mean()

    def close(self) -> None: ...

    def _accumulate(self, tokens: Tensor, number: int, count: int) -> Tensor:
        with self.wrapped.synchronised(number == count):
            loss = self._loss(tokens)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.wrapped.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def bare_model(workload: Workload) -> Any:
    """Return the model on this rank's device, in the precision of the workload."""
    path = Path(workload.model)
    model: Any = build_model(path, read_model_config(path), workload.seed)
    if workload.recompute:
        model.gradient_checkpointing_enable()
    return model.to(device(), DTYPES[workload.precision]).train()


def alone(model: Any, start: int) -> Wrapped:
    """Return the model without any communication."""
    return Wrapped(model, model)


def _ddp(model: Any, start: int) -> Wrapped:
    return _of_ddp(_distributed(model))


def _ddp_compressed(model: Any, start: int, section: Mapping[str, Any]) -> Wrapped:
    """Return the model in DDP, with gradients compressed by this package."""
    wrapped, document = _ddp(model, start), {SECTION: dict(section)}
    return replace(wrapped, attach=lambda optimizer: ddp.attach(wrapped.model, document, optimizer))


def _ddp_bf16(model: Any, start: int) -> Wrapped:
    wrapped = _distributed(model)
    wrapped.register_comm_hook(None, _compressed_to_bf16)
    return _of_ddp(wrapped)


def _powersgd(model: Any, start: int, rank: int) -> Wrapped:
    """Return the model in DDP with PowerSGD's hook, which uses error feedback and warm start by default."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return _of_ddp(wrapped)


def _post_local(model: Any, start: int, every: int) -> Wrapped:
    """Return the model with post-local SGD: local steps, and an average of all weights every `every` steps."""
    wrapped = _distributed(model)
    state: Any = PostLocalSGDState(None, None, start, False)  # type: ignore[no-untyped-call]
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(every, warmup_steps=start)

    def average() -> None:
        averager.average_parameters(wrapped.parameters())

    return _of_ddp(wrapped, average, partial(_averaged, wrapped))


def _of_ddp(
    model: DistributedDataParallel,
    stepped: Callable[[], object] = lambda: None,
    evaluating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Wrapped:
    return Wrapped(model, model, partial(_ddp_synchronised, model), stepped, evaluating)


def _distributed(model: Any) -> DistributedDataParallel:
    ids = [device().index] if device().type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def _ddp_synchronised(model: DistributedDataParallel, last: bool) -> AbstractContextManager[object]:
    return nullcontext() if last else model.no_sync()


def _compressed_to_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    # Without CUDA, DDP rejects PyTorch's hook by its name, although gloo can sum bf16 too.
    return bf16_compress_hook(state, bucket)


@contextmanager
def _averaged(model: Any) -> Iterator[None]:
    """Replace each rank's weights by their mean over all ranks within the context."""
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    average_parameters(iter(parameters), dist.distributed_c10d._get_default_group())
    yield
    for parameter, kept in zip(parameters, own, strict=True):
        parameter.data.copy_(kept)


def _fsdp2(model: Any, start: int) -> Wrapped:
    """Return the model in FSDP2, with one unit per block that transformers must not split and one for the rest."""
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Wrapped(model, model, partial(_fsdp2_synchronised, model))


def _fsdp2_compressed(model: Any, start: int, section: Mapping[str, Any]) -> Wrapped:
    """Return the model in FSDP2, with its communication compressed by this package."""
    wrapped, document = _fsdp2(model, start), {SECTION: dict(section)}
    return replace(wrapped, attach=lambda optimizer: fsdp2.attach(model, document, optimizer))


def _blocks(model: Any) -> list[torch.nn.Module]:
    names = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in names]


@contextmanager
def _fsdp2_synchronised(model: Any, last: bool) -> Iterator[None]:
    model.set_requires_gradient_sync(last)
    yield


def _torch(workload: Workload, optimizer: Optimizer, start: int, wrap: Callable[..., Wrapped]) -> TorchStepper:
    return TorchStepper(wrap(bare_model(workload), start), workload, optimizer)


def _megatron(
    workload: Workload, optimizer: Optimizer, start: int, section: Mapping[str, Any] | None = None
) -> PeerStepper:
    # Megatron belongs to a separate extra, which other peers do not need.
    from deepspeed_compress.tools.bench.megatron import MegatronStepper

    return MegatronStepper(workload, optimizer, section)


@dataclass(frozen=True)
class Peer:
    """Peer to compare with.

    Attributes:
        make: Function of the workload, the optimizer and `start` that returns the stepper of this rank. The first
            `start` steps are those of plain DDP.
        least_start: Minimum of `start`, or None for a method that takes effect at once and ignores `start`.
        period: Number of optimizer steps after which the traffic pattern repeats.
    """

    make: Callable[[Workload, Optimizer, int], PeerStepper]
    least_start: int | None = None
    period: int = 1


def _of_torch(wrap: Callable[..., Wrapped], least_start: int | None = None, period: int = 1, **options: Any) -> Peer:
    return Peer(partial(_torch, wrap=partial(wrap, **options)), least_start, period)


_INT4: Mapping[str, Any] = MappingProxyType({"gradients": {"method": "blockwise", "bits": 4}, "monitor": {"every": 1}})
_INT4_WEIGHTS: Mapping[str, Any] = MappingProxyType({**_INT4, "weights": {"bits": 4}})
PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "ddp": _of_torch(_ddp),
        "ddp-int4": _of_torch(_ddp_compressed, section=_INT4),
        "ddp-bf16": _of_torch(_ddp_bf16),
        **{f"ddp-powersgd{rank}": _of_torch(_powersgd, WARMED_UP, rank=rank) for rank in (1, 2, 4, 8)},
        **{f"ddp-post-local{steps}": _of_torch(_post_local, 0, steps, every=steps) for steps in (4, 8)},
        "fsdp2": _of_torch(_fsdp2),
        "fsdp2-int4": _of_torch(_fsdp2_compressed, section=_INT4),
        "fsdp2-int4-weights": _of_torch(_fsdp2_compressed, section=_INT4_WEIGHTS),
        "megatron": Peer(_megatron),
        "megatron-int4": Peer(partial(_megatron, section=_INT4)),
    }
)
"""Peers by name, as `bench step --peers` and the studies accept it."""
