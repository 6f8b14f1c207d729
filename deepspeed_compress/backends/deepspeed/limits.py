"""Checks that refuse, with the reason, an engine that cannot be compressed correctly."""

from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from deepspeed_compress.backends.deepspeed import versions
from deepspeed_compress.backends.deepspeed.engine_facts import (
    engine_kind,
    has_optimizer,
    shares_layers,
    stage_count,
    tensor_size,
)
from deepspeed_compress.backends.deepspeed.groups import partition_groups
from deepspeed_compress.backends.deepspeed.units import RankUnit, node_unit
from deepspeed_compress.backends.groups import ranks_per_node
from deepspeed_compress.backends.limits import find_second_momentum
from deepspeed_compress.compression.kernels import FASTEST
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import UnsupportedError


def refuse_unsupported(engine: Any, config: CompressConfig) -> None:
    """Check that the section can work correctly with `engine`.

    A section that neither compresses nor divides anything changes nothing, so it works with every engine.

    Raises:
        UnsupportedError: the section cannot; names every reason.
    """
    problems = [
        *_mismatches(engine, config),
        *(find_second_momentum(engine.optimizer.param_groups, config) if has_optimizer(engine) else ()),
        *_too_old(engine, config),
        *_unsharded(engine),
        *_shared_layers(engine, config),
        *_experts(engine, config),
    ]
    if compresses(config) or node_unit(engine) is not None:
        problems += find_limits(engine)
    elif config.islands is not None:
        problems += find_limits(engine, of_gradients=False)
    if problems:
        raise UnsupportedError(
            "this engine cannot be compressed:\n" + "\n".join(f"- {problem}" for problem in problems)
        )


def compresses(config: CompressConfig) -> bool:
    """Return True if gradients or weights are compressed at all."""
    return config.gradients.method != "none" or config.weights.method != "none"


def _subclassed(engine: Any) -> bool:
    known = (DeepSpeedZeroOptimizer, DeepSpeedZeroOptimizer_Stage3)
    return isinstance(engine.optimizer, known) and type(engine.optimizer) not in known


def _divides_for_older_muon(engine: Any) -> bool:
    """Return True if Muon steps parts of matrices in a version of DeepSpeed that orthogonalizes while it reduces."""
    return _uses_muon(engine) and int(engine.zero_optimization_stage()) > 0 and not versions.orthogonalizes_in_step()


def _uses_muon(engine: Any) -> bool:
    return any(getattr(parameter, "use_muon", False) for parameter in engine.module.parameters())


def _scales_apart(engine: Any) -> bool:
    """Return True if ranks that hold different parameters each have a gradient scaler of torch, without ZeRO."""
    if engine.torch_autocast_z0_gradscaler is None:
        return False
    return isinstance(engine, PipelineEngine) or tensor_size(engine) > 1


def _stops_in_backward(engine: Any) -> bool:
    """Return True if DeepSpeed itself stops in the first backward pass of a pipeline without a ZeRO optimizer."""
    pipeline = isinstance(engine, PipelineEngine) and engine_kind(engine) == "zero_0"
    return pipeline and not versions.runs_pipelines_without_zero()


_Limits = tuple[tuple[Callable[[Any], bool], str], ...]
_LIMITS_OF_GRADIENTS: _Limits = (
    (
        lambda engine: engine_kind(engine) == "zero_12" and not engine.optimizer.contiguous_gradients,
        "zero_optimization.contiguous_gradients is false, with which gradients are in no flat bucket; write true",
    ),
    (
        _divides_for_older_muon,
        "the Muon optimizer with ZeRO 1 to 3 needs deepspeed>=0.19.8; install it, or use stage 0, Adam or SGD, or "
        'islands with "gradients": {"method": "none"}',
    ),
)
_LIMITS: _Limits = (
    (
        lambda engine: not has_optimizer(engine),
        'it has no optimizer: there are no gradients to reduce; add "optimizer" or pass one',
    ),
    (
        lambda engine: engine.has_moe_layers and shares_layers(engine),
        "mixture-of-experts layers with pipeline, tensor or sequence parallelism are not available in this version; "
        "use data and expert parallelism alone, or remove the section deepspeed_compress",
    ),
    (
        _subclassed,
        "ZenFlow and SuperOffload reduce gradients on paths of their own; remove zero_optimization.zenflow or "
        "offload_optimizer.super_offload",
    ),
    (
        lambda engine: torch.device(engine.device).type not in FASTEST,
        f"it is on a device without kernels; available: {', '.join(FASTEST)}",
    ),
    (
        _scales_apart,
        "torch_autocast in fp16 without ZeRO gives each stage and tensor-parallel rank its own loss scale, so some "
        'may skip a step that others take; use ZeRO 1 to 3, or torch_autocast with "dtype": "bfloat16"',
    ),
    (
        _stops_in_backward,
        "a pipeline without a ZeRO optimizer needs deepspeed>=0.18.5; install it, or use ZeRO stage 1 and no "
        "data_types.grad_accum_dtype",
    ),
    (
        lambda engine: engine.is_deepcompile_active() or engine._config.compile_config.deepcompile,
        "DeepCompile reduces gradients inside the compiled graph; set compile.deepcompile to false",
    ),
    (
        lambda engine: len(partition_groups(engine)) > 1,
        "ZeRO 3 divides its parameters over several groups of ranks; make all of them in one deepspeed.zero.Init",
    ),
    (
        lambda engine: bool(engine._config.zero_config.zero_quantized_gradients),
        "ZeRO++ quantizes gradients itself; remove zero_optimization.zero_quantized_gradients",
    ),
    (
        # hpZ divides consecutive ranks of the job.
        lambda engine: engine._config.zero_config.zero_hpz_partition_size > 1 and isinstance(engine.mpu, RankUnit),
        "zero_optimization.zero_hpz_partition_size would gather weights across islands or nodes; remove it, or islands "
        "or shard_within",
    ),
)


def find_limits(engine: Any, of_gradients: bool = True) -> list[str]:
    """Return the reasons why the traffic of `engine` can be neither compressed nor counted; empty if it can.

    Islands may leave gradients to DeepSpeed, so that its limits do not matter.
    """
    limits = (*_LIMITS, *(_LIMITS_OF_GRADIENTS if of_gradients else ()))
    return [problem for applies, problem in limits if applies(engine)]


def _mismatches(engine: Any, config: CompressConfig) -> Iterator[str]:
    """Yield the differences between the section's `parallelism` and an engine that was made elsewhere."""
    asked = config.parallelism
    if asked is None:
        return
    stage = int(engine.zero_optimization_stage())
    if asked.zero_stage is not None and asked.zero_stage != stage:
        yield (
            f"/deepspeed_compress/parallelism/zero_stage is {asked.zero_stage}, but the engine was made with ZeRO "
            f"stage {stage}; use deepspeed_compress.initialize, or write {asked.zero_stage} as zero_optimization.stage"
        )
    for key, wanted, found, remedy in (
        ("pipeline", asked.pipeline, stage_count(engine), "pass a PipelineModule with that many stages"),
        ("tensor", asked.tensor, tensor_size(engine), "use deepspeed_compress.initialize"),
    ):
        if wanted != found and key in asked.model_fields_set:
            yield (
                f"/deepspeed_compress/parallelism/{key} is {wanted}, but the engine was made with {found}; {remedy}, "
                f"or write {found}"
            )


def _shared_layers(engine: Any, config: CompressConfig) -> Iterator[str]:
    """Yield the problems of elastic islands with ranks that share layers.

    The configuration file does not show them if `tp_model_init` was called, or a pipeline has a topology of its own.
    """
    elastic = None if config.islands is None else config.islands.elastic
    if elastic is None or tensor_size(engine) == 1:
        return
    if isinstance(engine, PipelineEngine):
        axes = engine.grid.topology().get_axis_names()
        if axes[-1] != "model":
            yield (
                f"/deepspeed_compress/islands/elastic: the axes of the pipeline's topology are {axes} (allowed: model "
                "last, so that consecutive ranks share layers); use PipeModelDataParallelTopology"
            )
    if elastic.parameter_server is not None:
        yield (
            "/deepspeed_compress/islands/elastic/parameter_server knows one shape of each parameter, but "
            f"{tensor_size(engine)} ranks share each layer (allowed: 1); train without tp_model_init, or write "
            '"parameter_server": null'
        )


def _experts(engine: Any, config: CompressConfig) -> Iterator[str]:
    """Yield the keys of the section that cannot be combined with experts that have reduction groups of their own."""
    if not engine.has_moe_layers:
        return
    unit = node_unit(engine)
    if unit is not None:
        yield f"{unit.pointer}: the model has mixture-of-experts layers with groups of their own; remove the key"
    if compresses(config) and _uses_muon(engine) and engine_kind(engine) == "zero_12":
        yield "the Muon optimizer would have to complete matrices of experts, which other ranks hold; use AdamW or SGD"
    pointer, layers = "/deepspeed_compress/", "the model has mixture-of-experts layers"
    if config.islands is not None:
        yield f"{pointer}islands: {layers}, which islands do not exchange; remove the key"
    if config.ownership == "balanced" and compresses(config):
        yield f'{pointer}ownership is "balanced", but {layers} with partitions of their own; write "contiguous"'
    if ranks_per_node(config) is not None:
        yield f"{pointer}gradients/hierarchy: {layers}, which are not averaged over all ranks of a node; remove the key"


def _unsharded(engine: Any) -> Iterator[str]:
    """Yield a problem if nodes should shard a model whose optimizer works with whole gradients."""
    unit = node_unit(engine)
    if unit is not None and engine_kind(engine) == "zero_12" and _uses_muon(engine):
        yield (
            f"{unit.pointer}: DeepSpeed orthogonalizes Muon's gradients under ZeRO 1 and 2 before they are averaged "
            "over the nodes; use ZeRO stage 3, AdamW or SGD"
        )
    if unit is not None and engine_kind(engine) == "zero_0":
        yield (
            f"{unit.pointer} needs gradient shards, but {type(engine.optimizer).__name__} clips whole gradients; "
            "remove /data_types/grad_accum_dtype, or use ZeRO stage 2 or 3"
        )


def _too_old(engine: Any, config: CompressConfig) -> Iterator[str]:
    """Yield the settings of which the installed version of DeepSpeed is not capable."""
    own = engine_kind(engine) != "zero_0" or isinstance(engine.optimizer, BF16_Optimizer)
    if own and config.guard is not None and config.guard.skip_steps and not versions.skips_invalid_norms():
        yield (
            "/deepspeed_compress/guard/skip_steps is true, but the optimizers of DeepSpeed "
            f"{deepspeed.__version__} apply every step; install deepspeed>=0.19.8, or write false"
        )
    if config.checkpointing is not None and not versions.saves_without_copies():
        yield "/deepspeed_compress/checkpointing needs deepspeed>=0.18.4; install it, or remove the key"
