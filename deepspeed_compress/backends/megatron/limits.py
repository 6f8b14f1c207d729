"""Checks of what cannot work with Megatron. Problems are reported by name before anything is attached."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import megatron.core
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer import ChainedOptimizer, DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, FP32Optimizer
from packaging.version import Version

from deepspeed_compress.backends.limits import find_common_limits
from deepspeed_compress.backends.megatron.activations import find_activation_limits, find_changed_seams
from deepspeed_compress.backends.megatron.weights import has_masters
from deepspeed_compress.config import SECTION, CompressConfig, CompressedWeights
from deepspeed_compress.errors import SeamError

OLDEST, NEWEST = Version("0.16.0"), Version("0.17")
"""Supported versions: from the first, up to and excluding the second."""
SUPPORTED = f"megatron-core >={OLDEST},<{NEWEST}"

_SEAMS: Mapping[str, tuple[str, ...]] = {
    "start_grad_sync": ("force_all_reduce",),
    "finish_grad_sync": ("force_all_reduce",),
    "start_param_sync": ("force_sync",),
    "finish_param_sync": ("skip_next_bucket_dispatch",),
    "check_grads": ("check_for_nan_or_inf", "check_for_large"),
}
"""Methods of a bucket group, and their parameters."""
_OPTIMIZERS = (DistributedOptimizer, Float16OptimizerWithFloat16Params, FP32Optimizer)


def check_version(chunks: Sequence[Any], config: CompressConfig) -> None:
    """Check that Megatron's version is supported, and that what `config` replaces has the expected parameters.

    Raises:
        SeamError: they do not.
    """
    found = megatron.core.__version__
    if not OLDEST <= Version(found) < NEWEST:
        raise SeamError(
            f"megatron-core {found} is installed, but deepspeed_compress attaches to internals that it knows in "
            f'{SUPPORTED} only; install one of these: pip install "megatron-core>={OLDEST},<{NEWEST}"'
        )
    for changed in find_changed_seams() if config.activations is not None else ():
        raise SeamError(f"{changed} takes other arguments in megatron-core {found}; supported: {SUPPORTED}")
    for group, (name, parameters) in product(_bucket_groups(chunks), _SEAMS.items()):
        takes = tuple(inspect.signature(getattr(group, name)).parameters)
        if takes != parameters and not hasattr(getattr(group, name), "__wrapped__"):
            changed = f"{type(group).__name__}.{name} takes {takes}, not {parameters}, in megatron-core {found}"
            raise SeamError(f"{changed}; supported: {SUPPORTED}")


def find_limits(chunks: Sequence[Any], optimizer: Any, config: CompressConfig) -> Iterator[str]:
    """Yield what is wrong with these model chunks and this optimizer, or with the section for them."""
    if any(type(chunk) is not DistributedDataParallel for chunk in chunks) or not chunks:
        kinds = ", ".join(sorted({type(chunk).__name__ for chunk in chunks})) or "nothing"
        yield f"it is {kinds} (allowed: DistributedDataParallel of megatron.core.distributed, one or a list)"
        return
    device = next(chunks[0].parameters()).device
    yield from find_common_limits(config, optimizer, device, supported=("activations",))
    yield from find_activation_limits(chunks, config.activations)
    for chunk in chunks:
        yield from (f"{key} {why}; write False" for key, why in _OPTIONS.items() if getattr(chunk.ddp_config, key))
        if chunk.ddp_config.num_distributed_optimizer_instances > 1:
            remedy = "write 1 (gradients.hierarchy saves bytes between nodes)"
            yield f"num_distributed_optimizer_instances reduces over two groups; {remedy}"
        if getattr(chunk.config, "cuda_graph_impl", "none") != "none":
            yield 'cuda_graph_impl captures work that is decided in every step; write "none"'
    yield from _limits_of_optimizer(chunks, optimizer)
    yield from _limits_of_weights(chunks, optimizer, config)
    if any(vars(group).keys() & {"start_grad_sync", "finish_grad_sync"} for group in _bucket_groups(chunks)):
        yield "it is already attached; call attach once"


_OPTIONS: Mapping[str, str] = {
    "use_megatron_fsdp": "shards parameters, and reduces with other code",
    "use_custom_fsdp": "shards parameters, and reduces with other code",
    "reuse_grad_buf_for_mxfp8_param_ag": "stores weights in the gradient buffer",
    "nccl_ub": "registers buffers that compressed messages do not use",
}
"""Options of Megatron's data parallelism that do not work with compression, and why."""


def _bucket_groups(chunks: Sequence[Any]) -> list[Any]:
    return [group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups)]


def _limits_of_optimizer(chunks: Sequence[Any], optimizer: Any) -> Iterator[str]:
    parts = optimizer.chained_optimizers if type(optimizer) is ChainedOptimizer else [optimizer]
    others = {type(part).__name__ for part in parts if type(part) not in _OPTIMIZERS}
    if others:
        allowed = ", ".join(known.__name__ for known in _OPTIMIZERS)
        found = ", ".join(sorted(others))
        yield f"its optimizer is {found} (allowed: {allowed}); use get_megatron_optimizer with Adam or SGD"
        return
    distributed = {type(part) is DistributedOptimizer for part in parts}
    if distributed and distributed != {chunk.ddp_config.use_distributed_optimizer for chunk in chunks}:
        yield "use_distributed_optimizer differs between DistributedDataParallelConfig and OptimizerConfig; write one"


def _limits_of_weights(chunks: Sequence[Any], optimizer: Any, config: CompressConfig) -> Iterator[str]:
    if not isinstance(config.weights, CompressedWeights):
        return
    where = f'/{SECTION}/weights/method: "{config.weights.method}"'
    remedy = 'Write "method": "none", or remove weights'
    if config.weights.overlap:
        yield (
            f"/{SECTION}/weights/overlap: true has no effect with Megatron (allowed: false); remove the key, and use "
            "overlap_param_gather"
        )
    if config.weights.frozen:
        yield (
            f"/{SECTION}/weights/frozen: true has no effect (allowed: false), since Megatron never sends frozen "
            "weights; remove the key"
        )
    if not all(chunk.ddp_config.use_distributed_optimizer for chunk in chunks):
        yield f"{where} has no effect without use_distributed_optimizer: no weights are sent. {remedy}, or use it"
    elif not any(map(has_masters, _bucket_groups(chunks))):
        yield f"{where}: fp32 weights have no separate master weights (allowed: bf16 and fp16 weights). {remedy}"
    if any(chunk.ddp_config.fp8_param_gather for chunk in chunks):
        yield f"{where} with fp8_param_gather (allowed: without). {remedy}"
    for option in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
        if getattr(getattr(optimizer, "config", None), option, False):
            yield f"{where} with {option}, which hides the fp32 master weights (allowed: without). {remedy}"
