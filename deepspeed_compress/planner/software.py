"""Costs that a training program adds to the arithmetic of a model: memory traffic, kernels, and work of the CPU."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Elementwise:
    """Bytes per element that the elementwise kernels of a program move in forward.

    Attributes:
        norm: Bytes per element of hidden states, for each of the two norms of a layer.
        residual: Bytes per element of hidden states, for each of the two additions; dropout takes 3 more.
        activation: Bytes per element of the MLP's width without a gate.
        gated: Bytes per element of the MLP's width with a gate.
        rotary: Bytes per element of queries and keys, for rotary positions.
        scores: Bytes per pair of tokens and head for mask and softmax, without a flash kernel.
        backward: Bytes of backward relative to those of forward.
    """

    norm: float
    residual: float
    activation: float
    gated: float
    rotary: float
    scores: float
    backward: float


@dataclass(frozen=True, slots=True)
class Software:
    """Costs of a program. Those that most programs do not have are 0 by default.

    Attributes:
        name: Name to print.
        elementwise: Bytes that elementwise kernels move.
        loss: Bytes per logit, forward and backward together.
        kernels: Kernels of a layer's forward; backward has twice as many.
        dispatch: Seconds of the CPU per kernel. Below them, the GPU waits for the CPU.
        hooks: Seconds of the CPU per layer and pass to gather and release parts of the model (ZeRO 3).
        idle: Share of the computation in which the GPU is idle: data, logging, the allocator, synchronization.
        optimizer: Bytes per parameter that the rank updates.
        accumulate: Bytes per parameter and micro-batch to add gradients.
        gradient: Bytes of a gradient element on the network.
        owners_from: Lowest ZeRO stage that sends gradients only to their owners. Others all-reduce them: DeepSpeed's
            ZeRO 1 and 2 do (`use_multi_rank_bucket_allreduce`).
        bucket: Elements of a message of gradients or updated weights (`reduce_bucket_size`).
        persistent: Elements of the largest tensors that ZeRO 3 gathers only once in a step
            (`stage3_param_persistence_threshold`).
        reused: Elements between two uses of a tensor up to which ZeRO 3 keeps it (`stage3_max_reuse_distance`).
        overlaps: Whether data-parallel messages of every ZeRO stage overlap with computation.
        tensor_overlaps: Whether all-reduces of tensor-parallel backward overlap with weight gradients.
        hides: Whether messages of ZeRO 3 hide behind computation.
        every_micro_batch: Whether ZeRO 2 reduces after every micro-batch.
        selective: Share of the matrix products that selective recomputation repeats; 0 if it repeats only attention.
        held: Bytes of an element of the gradients that a rank keeps.
        states: Bytes per parameter of moments and fp32 weights.
        update: Bytes per updated parameter of what the optimizer makes for a moment: fp32 gradients, denominators of
            PyTorch's Adam.
        logit: Bytes of a logit with its copies and its gradient at the peak.
        eager: 0 if a layer's elementwise kernels are fused, 1 if those of gates and rotary positions are separate, and
            keep what they read, 2 if those of norms are, too, with fp32 copies.
        checkpoints: Share of the checkpointed activations that stay on the GPU.
        attention: Generation of the flash-attention kernel; 0 for separate kernels.
    """

    name: str
    elementwise: Elementwise
    loss: float
    kernels: int
    dispatch: float
    optimizer: float
    accumulate: float
    gradient: float
    owners_from: int
    bucket: float
    held: int
    logit: int
    overlaps: bool = False
    tensor_overlaps: bool = False
    every_micro_batch: bool = False
    hooks: float = 0.0
    idle: float = 0.0
    persistent: float = 0.0
    reused: float = 0.0
    selective: float = 0.0
    update: int = 0
    eager: int = 0
    states: int = 12
    hides: bool = True
    checkpoints: float = 1.0
    attention: int = 2


_FUSED = Elementwise(norm=4, residual=4, activation=4, gated=6, rotary=4, scores=4, backward=1.6)
"""One kernel for each: two-byte elements, read once and written once."""
_PLAIN = Elementwise(norm=8, residual=6, activation=8, gated=10, rotary=16, scores=8, backward=1.8)
"""PyTorch's own fused norms and activations, and separate kernels for everything else."""
_EAGER = Elementwise(norm=26, residual=6, activation=12, gated=10, rotary=22, scores=14, backward=2.0)
"""Separate kernels: norms and softmax in fp32 take up to five, rotary positions take six."""
_GELU = 38
"""Bytes of the eight kernels of transformers' GELU."""

_MEGATRON = Software(
    name="megatron",
    elementwise=_FUSED,
    loss=36,
    kernels=20,
    dispatch=7e-6,
    optimizer=42,
    accumulate=8,
    gradient=4,
    owners_from=1,
    bucket=4e7,
    overlaps=True,
    tensor_overlaps=True,
    held=4,
    logit=6,
)
_DEEPSPEED = Software(
    name="deepspeed",
    elementwise=_EAGER,
    loss=40,
    kernels=45,
    dispatch=1.2e-5,
    hooks=2.5e-3,
    idle=0.08,
    optimizer=56,
    accumulate=6,
    gradient=2,
    owners_from=3,
    bucket=5e8,
    persistent=1e5,
    reused=1e9,
    every_micro_batch=True,
    held=2,
    update=4,
    logit=10,
    eager=2,
)
_FSDP = replace(
    _DEEPSPEED,
    name="fsdp",
    elementwise=_PLAIN,
    loss=30,
    kernels=30,
    dispatch=8e-6,
    hooks=2e-4,
    idle=0.05,
    optimizer=50,
    owners_from=1,
    bucket=2e8,
    persistent=0,
    reused=0,
    overlaps=True,
    selective=0.5,
    logit=14,
    eager=1,
)
_PROGRAMS = (
    _MEGATRON,
    _DEEPSPEED,
    _FSDP,
    replace(
        _MEGATRON,
        name="nanotron",
        elementwise=_PLAIN,
        kernels=30,
        dispatch=8e-6,
        idle=0.05,
        optimizer=50,
        held=6,
        logit=10,
        eager=1,
    ),
    replace(
        _DEEPSPEED,
        name="hf",
        elementwise=replace(_EAGER, activation=_GELU),
        loss=52,
        kernels=48,
        dispatch=1.6e-5,
        idle=0.1,
        update=12,
        logit=14,
    ),
    replace(
        _DEEPSPEED,
        name="megatron-deepspeed",
        elementwise=_FUSED,
        loss=36,
        kernels=20,
        dispatch=7e-6,
        idle=0.05,
        accumulate=12,
        eager=0,
    ),
)

SOFTWARE: Mapping[str, Software] = {program.name: program for program in _PROGRAMS}
"""Costs by program. Bytes and kernels are counted from its operators; times of the CPU and idle shares are typical.

Megatron's idle share is in the fitted constants.
"""
