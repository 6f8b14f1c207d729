"""Peers to compare with: PyTorch's DDP, its communication hooks, FSDP2 and local SGD, and Megatron."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
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
from deepspeed_compress.tools.bench.gauges import device, ranks_of_host
from deepspeed_compress.tools.bench.torch_loop import Optimizer, PeerStepper, TorchStepper, Wrapped, bare_model
from deepspeed_compress.tools.bench.workload import Workload

POWERSGD_START = 2
"""First optimizer step at which PowerSGD's hook accepts a warm start with error feedback."""
ONE_BUCKET_MB = 2**30
"""Bucket size in MB, larger than any model. With more than one bucket, PowerSGD aborts on gloo."""


def _ddp(model: Any, start: int) -> Wrapped:
    return _wrapped_ddp(_distributed(model))


def _ddp_compressed(model: Any, start: int, section: Mapping[str, Any]) -> Wrapped:
    """Return the model in DDP, with gradients compressed by this package."""
    wrapped, document = _ddp(model, start), {SECTION: dict(section)}
    return replace(wrapped, attach=lambda optimizer: ddp.attach(wrapped.model, document, optimizer))


def _ddp_bf16(model: Any, start: int) -> Wrapped:
    wrapped = _distributed(model)
    wrapped.register_comm_hook(None, _compressed_to_bf16)
    return _wrapped_ddp(wrapped)


def _powersgd(model: Any, start: int, rank: int) -> Wrapped:
    """Return the model in DDP with PowerSGD's hook, which uses error feedback and warm start by default."""
    wrapped = DistributedDataParallel(model, bucket_cap_mb=ONE_BUCKET_MB)
    state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=start)
    wrapped.register_comm_hook(state, powerSGD_hook)
    return _wrapped_ddp(wrapped)


def _post_local(model: Any, start: int, every: int) -> Wrapped:
    """Return the model with post-local SGD: local steps, and an average of all weights every `every` steps."""
    wrapped = _distributed(model)
    state: Any = PostLocalSGDState(None, None, start, False)  # type: ignore[no-untyped-call]
    wrapped.register_comm_hook(state, post_localSGD_hook)
    averager = PeriodicModelAverager(every, warmup_steps=start)

    def average() -> None:
        averager.average_parameters(wrapped.parameters())

    return _wrapped_ddp(wrapped, average, partial(_with_averaged_weights, wrapped))


def _wrapped_ddp(
    model: DistributedDataParallel,
    stepped: Callable[[], object] = lambda: None,
    evaluating: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> Wrapped:
    return Wrapped(model, partial(_ddp_synchronised, model), stepped, evaluating)


def _distributed(model: Any) -> DistributedDataParallel:
    ids = [device().index] if device().type == "cuda" else None
    return DistributedDataParallel(model, device_ids=ids)


def _ddp_synchronised(model: DistributedDataParallel, last: bool) -> AbstractContextManager[object]:
    return nullcontext() if last else model.no_sync()


def _compressed_to_bf16(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
    # Without CUDA, DDP rejects PyTorch's hook by its name, although gloo can sum bf16 too.
    return bf16_compress_hook(state, bucket)


@contextmanager
def _with_averaged_weights(model: Any) -> Iterator[None]:
    """Replace each rank's weights by their mean over all ranks within the context."""
    parameters = list(model.parameters())
    own = [parameter.detach().clone() for parameter in parameters]
    average_parameters(iter(parameters), dist.distributed_c10d._get_default_group())
    yield
    for parameter, kept in zip(parameters, own, strict=True):
        parameter.data.copy_(kept)


def _fsdp2(model: Any, start: int, within: int | None = None) -> Wrapped:
    """Return the model in FSDP2, with one unit per block that transformers must not split and one for the rest.

    It is sharded over `within` ranks and replicated over the others (HSDP), or sharded over all ranks if None.
    """
    ranks = dist.get_world_size()
    shape = (ranks,) if within is None else (ranks // within, within)
    mesh = init_device_mesh(device().type, shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in _blocks(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Wrapped(model, partial(_fsdp2_synchronised, model))


def _fsdp2_compressed(model: Any, start: int, section: Mapping[str, Any]) -> Wrapped:
    """Return the model in FSDP2, with its communication compressed by this package."""
    wrapped, document = _fsdp2(model, start), {SECTION: dict(section)}
    return replace(wrapped, attach=lambda optimizer: fsdp2.attach(model, document, optimizer))


def _hsdp(model: Any, start: int) -> Wrapped:
    """Return the model in FSDP2, sharded over the ranks of a host."""
    return _fsdp2(model, start, ranks_of_host())


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


def _torch_peer(wrap: Callable[..., Wrapped], least_start: int | None = None, period: int = 1, **options: Any) -> Peer:
    return Peer(partial(_torch, wrap=partial(wrap, **options)), least_start, period)


_INT4: Mapping[str, Any] = MappingProxyType({"gradients": {"method": "blockwise", "bits": 4}, "monitor": {"every": 1}})
_INT4_WEIGHTS: Mapping[str, Any] = MappingProxyType({**_INT4, "weights": {"bits": 4}})
PEERS: Mapping[str, Peer] = MappingProxyType(
    {
        "ddp": _torch_peer(_ddp),
        "ddp-int4": _torch_peer(_ddp_compressed, section=_INT4),
        "ddp-bf16": _torch_peer(_ddp_bf16),
        **{f"ddp-powersgd{rank}": _torch_peer(_powersgd, POWERSGD_START, rank=rank) for rank in (1, 2, 4, 8)},
        **{f"ddp-post-local{steps}": _torch_peer(_post_local, 0, steps, every=steps) for steps in (4, 8)},
        "fsdp2": _torch_peer(_fsdp2),
        "fsdp2-hsdp": _torch_peer(_hsdp),
        "fsdp2-int4": _torch_peer(_fsdp2_compressed, section=_INT4),
        "fsdp2-int4-weights": _torch_peer(_fsdp2_compressed, section=_INT4_WEIGHTS),
        "megatron": Peer(_megatron),
        "megatron-int4": Peer(partial(_megatron, section=_INT4)),
    }
)
"""Peers by name, as `bench step --peers` and the studies accept it."""
