"""Memory of a rank: weights, gradients, optimizer states, activations, and what surrounds them."""

from dataclasses import dataclass
from typing import Literal

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.software import Software
from deepspeed_compress.planner.traffic import largest_stage

OUTSIDE = 2.0e9
"""Bytes outside of the allocator: CUDA context, NCCL's buffers, libraries."""
SLACK = 0.08
"""Share of the allocated bytes that fragmentation adds to the reserved ones."""
MARGIN = 0.15
"""Relative error of the estimate that a layout must survive to be called "fits" (median error on published figures)."""

Verdict = Literal["fits", "tight", "does not fit"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank.

    Attributes:
        states: Weights, gradients, and optimizer states.
        activations: Activations that wait for backward.
        logits: Logits, and what the loss keeps.
        buffers: Buckets, residuals, and anchors.
    """

    states: float
    activations: float
    logits: float
    buffers: float

    @property
    def allocated(self) -> float:
        """Bytes that tensors need at the peak."""
        return self.states + self.activations + self.logits + self.buffers

    @property
    def total(self) -> float:
        """Bytes that the process occupies."""
        return self.allocated * (1 + SLACK) + OUTSIDE

    def verdict(self, size: float) -> Verdict:
        """Return whether a GPU with `size` bytes is large enough, for sure or perhaps."""
        if self.allocated * (1 + MARGIN + SLACK) + OUTSIDE <= size:
            return "fits"
        return "tight" if self.total <= size else "does not fit"


def needed_memory(model: Model, software: Software, seq: int, layout: Layout, per_node: int) -> Memory:
    """Return the memory of the first or the last stage, whichever needs more.

    The first stage keeps the activations of as many micro-batches as there are stages; the last one has the logits.
    """
    parameters = largest_stage(model, layout).parameters
    states, buffers = _states(software, layout, parameters), _buffers(model, layout, parameters, per_node)
    tokens = layout.micro * seq
    kept = tokens * kept_per_token(model, software, seq, layout) * -(-model.layers // layout.pipeline)
    # Backward computes one layer again, with all its activations.
    again = tokens * _everything_per_token(model, software, seq, layout) if layout.recompute == "full" else 0.0
    # bf16 logits, their fp32 copy, and its gradient; Megatron's loss works in place.
    logits = tokens * model.vocab / layout.tensor * (6 if software.name == "megatron" else 10)
    first = Memory(states, _waiting(layout) * kept + again, 0.0, buffers)
    last = Memory(states, kept, logits, buffers) if logits > again else Memory(states, kept + again, 0.0, buffers)
    return max(first, last, key=lambda stage: stage.allocated)


def _waiting(layout: Layout) -> float:
    """Return the micro-batches whose activations the first stage keeps (2205.05198, section 4.2.3)."""
    interleaving = 1 + (layout.pipeline - 1) / (layout.pipeline * layout.virtual) if layout.virtual > 1 else 1.0
    return min(layout.accumulation, layout.pipeline) * interleaving


def _states(software: Software, layout: Layout, parameters: float) -> float:
    """Return the bytes of weights, gradients and optimizer states."""
    shards, megatron = layout.shards, software.name == "megatron"
    owned = parameters / (shards if layout.zero else 1)
    weights = 2 * parameters / (shards if layout.zero == 3 else 1)
    gradients = (4 if megatron else 2) * parameters / (shards if layout.zero >= 2 else 1)
    # Master weights and two moments. DeepSpeed copies the gradients that it owns to fp32 in the optimizer step.
    return weights + gradients + (12 if megatron else 16) * owned


def _buffers(model: Model, layout: Layout, parameters: float, per_node: int) -> float:
    """Return the bytes of buckets, and of what compression and islands keep."""
    shards = layout.shards
    # Buckets hold an eighth of the model, or two gathered layers.
    bucket = min(parameters, 2 * model.layer_parameters / layout.tensor) if layout.zero == 3 else parameters / 8
    buffers = 0.0 if shards == 1 else 4 * min(bucket, 5e8)
    if layout.gradient_bits and layout.data > 1:
        node = per_node // layout.tensor
        # Error feedback in bf16 for what leaves the node, twice, because a step may be skipped (configuration page).
        buffers += 4 * parameters / (layout.shard_within or (node if layout.data > node else 1))
    if layout.islands > 1:
        # The anchor, and the residuals of exchanges.
        buffers += 8 * parameters / (shards if layout.zero else 1)
    return buffers


def kept_per_token(model: Model, software: Software, seq: int, layout: Layout) -> float:
    """Return the bytes per token of a layer's activations that wait for backward (2205.05198)."""
    if layout.recompute == "full":
        return 2.0 * model.hidden / (layout.tensor if layout.sequence_parallel else 1)
    return _everything_per_token(model, software, seq, layout)


def _everything_per_token(model: Model, software: Software, seq: int, layout: Layout) -> float:
    split = layout.tensor if layout.sequence_parallel else 1
    eager = software.name in ("deepspeed", "hf")
    # Inputs of two norms and of the two blocks; the eager norms of Llama also keep fp32 copies.
    norms = model.hidden * (8 + 2 * model.dropout + (8 if eager and model.gated else 0))
    attention = 2 * (model.qkv + model.heads * model.head_size) * (1.5 if eager and not model.positions else 1)
    mlp = model.ffn * model.active * ((8 if eager else 6) if model.gated else 4)
    inside = (attention + mlp) / layout.tensor
    flash = software.attention or layout.recompute == "selective"
    scores = 0.0 if flash else (5 if model.dropout else 2) * model.heads / layout.tensor * seq
    return norms / split + inside + scores
