"""Features that two ranks try on a GPU, and the settings of those that only need settings. Loads no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

INT4: Mapping[str, Any] = {"method": "blockwise", "bits": 4, "block_size": 64}
INT8: Mapping[str, Any] = {"method": "blockwise", "bits": 8, "block_size": 64}
SIGN: Mapping[str, Any] = {"method": "sign", "block_size": 64}
NO_MOMENTUM: Mapping[str, Any] = {
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.0, 0.95], "torch_adam": True}}
}
MUON: Mapping[str, Any] = {
    "optimizer": {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95, "torch_adam": True}},
    "gradient_clipping": 0,
}
FP32_SUMS: Mapping[str, Any] = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}


@dataclass(frozen=True)
class Training:
    """Training of a small network. Two runs must have the same bits unless decisions depend on measured times.

    Attributes:
        stage: ZeRO stage.
        section: section of the package.
        extra: keys of the ds_config that replace the usual ones.
        accumulation: micro-steps per optimizer step.
        steps: optimizer steps.
        repeats: whether a second run must have the same bits.
    """

    stage: int
    section: Mapping[str, Any]
    extra: Mapping[str, Any] = field(default_factory=dict)
    accumulation: int = 1
    steps: int = 6
    repeats: bool = True


def _method(stage: int, extra: Mapping[str, Any] = MappingProxyType({}), **gradients: Any) -> Training:
    return Training(stage, {"gradients": gradients}, extra)


def _offloaded(stage: int) -> Mapping[str, Any]:
    """Return keys that keep the optimizer on the host. That of torch needs no compiler."""
    offload = {"device": "cpu", "pin_memory": True}
    return {
        "zero_optimization": {"stage": stage, "offload_optimizer": offload},
        "zero_force_ds_cpu_optimizer": False,
    }


METHODS: Mapping[str, Training] = {
    "topk": _method(2, method="topk", density=0.1, block_size=64, values={"bits": 4}),
    "sign": _method(1, **SIGN),
    "sign with 3 levels, rotated": _method(
        1, **SIGN, levels=3, rotation={"method": "hadamard", "block_size": 64}, scale_dtype="bf16"
    ),
    "demo": _method(1, NO_MOMENTUM, method="demo", density=0.1, tile=16, momentum=0.9),
    "dgc": _method(1, NO_MOMENTUM, method="dgc", density=0.2, block_size=64, momentum=0.5),
    "powersgd": _method(2, method="powersgd", rank=2),
    "3 bits": _method(2, method="blockwise", bits=3, block_size=64, scale_dtype="bf16"),
    "2 bits": _method(1, method="blockwise", bits=2, block_size=64),
    "stochastic 4 bits": _method(2, **INT4, rounding="stochastic"),
    "fp8": _method(2, method="fp8_e4m3", block_size=64),
    "qsgd": _method(1, method="qsgd", levels=7, block_size=64),
    "linear": _method(1, method="linear", bits=4, block_size=64),
    "percentile": _method(2, method="percentile", percentile=90.0, block_size=64),
    "topk of a tensor": _method(1, method="topk", density=0.1, scope="tensor"),
    "randomk": _method(2, method="randomk", density=0.2, block_size=64),
    "block_topk": _method(1, method="block_topk", density=0.2, block_size=64, group=8),
    "dct": _method(1, method="topk", density=0.1, block_size=64, rotation={"method": "dct", "tile": 16}),
    "bf16": _method(2, method="bf16"),
}
"""Methods of gradients that `steps` does not try."""

TRAININGS: Mapping[str, Training] = {
    "weights of 4 bits, overlapped": Training(1, {"gradients": INT4, "weights": {**INT4, "overlap": True}}),
    "weights of 4 bits, balanced": Training(2, {"gradients": INT4, "weights": INT4, "ownership": "balanced"}),
    "weights of 3 levels": Training(1, {"gradients": INT4, "weights": {**SIGN, "levels": 3}}),
    "ZeRO 3, weights of 8 bits": Training(3, {"gradients": INT4, "weights": INT8}),
    "muon": Training(1, {"gradients": INT4, "weights": {**INT4, "overlap": True}}, MUON),
    **METHODS,
    "residuals of 8 bits": _method(2, **INT4, error_feedback={"dtype": "int8", "decay": 0.9}),
    "residuals on the host": _method(2, **INT4, error_feedback={"device": "cpu"}),
    "offload under ZeRO 2": Training(2, {"gradients": INT4, "weights": INT4}, _offloaded(2)),
    "offload under ZeRO 3": Training(3, {"gradients": INT4}, _offloaded(3)),
    "overrides": _method(
        2,
        **INT4,
        overrides=[
            {"parameters": "bias", "method": "none"},
            {"parameters": r"stack\.0", "method": "sign", "every": 2, "spread": True},
        ],
    ),
    "chunks": _method(1, **INT4, chunk_bytes=65536),
    "fp32 sums of gradients": Training(1, {"gradients": INT4}, FP32_SUMS),
    "accumulation": Training(2, {"gradients": INT4}, accumulation=2),
    "schedule": Training(
        1,
        {
            "gradients": {"method": "topk", "density": 0.1, "block_size": 64},
            "schedule": {"warmup_steps": 2, "ramp": {"steps": 2}},
        },
    ),
    "adaptive": Training(2, {"gradients": INT8, "adaptive": {"probe_every": 3}}, steps=10, repeats=False),
}
"""Features that need no program of their own."""

NODES: Mapping[str, Training] = {
    f"two levels under ZeRO {stage}": _method(stage, **INT4, hierarchy={"ranks_per_node": 2, "inside": INT8})
    for stage in (1, 2, 3)
}
"""Features of two nodes of two ranks."""

PROGRAMS: Mapping[str, str] = {
    "preset auto": "feature_programs:auto",
    "no_sync": "feature_programs:accumulate_without_sync",
    "guard": "feature_programs:survive_nan",
    "fp16 with a loss scale": "feature_programs:scale_losses",
    "checkpoint in the background": "feature_programs:resume",
    "monitor": "feature_programs:write_statistics",
    "rollout": "feature_programs:publish",
    "islands": "feature_programs:train_islands",
    "elastic islands": "feature_programs:train_elastic",
    "asynchronous islands": "feature_programs:train_asynchronous",
    "DDP": "feature_layouts:train_ddp",
    "FSDP2": "feature_layouts:train_fsdp2",
    "tensor parallelism": "feature_layouts:split_layers",
    "experts": "feature_layouts:spread_experts",
    "pipeline": "feature_layouts:train_pipeline",
}
"""Modules of this directory and their functions, by feature."""

FIRST, LAST = ("preset auto",), ("DDP", "FSDP2", "experts", "tensor parallelism", "pipeline")
"""Most important feature, and those that are tried last since they use further process groups."""
FEATURES = (
    *FIRST,
    *TRAININGS,
    *(name for name in PROGRAMS if name not in (*FIRST, *LAST)),
    *LAST,
)
"""All features of two ranks in the order in which they are tried."""
