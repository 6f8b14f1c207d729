"""A prediction: the step, its interval, and the memory of one layout."""

from dataclasses import dataclass
from typing import Literal

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.gpus import CALIBRATED_GPU, Constants
from deepspeed_compress.planner.layout import Layout, Stage, stages
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.schedule import Term
from deepspeed_compress.planner.software import Software
from deepspeed_compress.planner.traffic import bucket_size

OUTSIDE = 2.0e9
"""Bytes outside of the allocator: CUDA context, NCCL's buffers, libraries."""
SLACK = 0.08
"""Share of the allocated bytes that fragmentation adds to the reserved ones."""
MARGIN = 0.15
"""Relative error of the estimate that a layout must survive to be called "fits". The calibration counts wrong verdicts
about published runs (`launch/studies/planner_calibration.py`)."""

HOST_MEMORY = 250e9
"""Bytes of a host's memory for each of its GPUs, as nodes of eight with 2 TB have. Larger needs do not fit."""
FULL = 4
"""Bytes of an fp32 element."""
SUB_GROUP = 1e9
"""Elements that ZeRO 3 updates at a time (`sub_group_size`)."""

Verdict = Literal["fits", "tight", "does not fit"]
VERDICTS: tuple[Verdict, ...] = ("fits", "tight", "does not fit")


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the fullest rank.

    Attributes:
        states: Weights, gradients, and optimizer states.
        activations: Activations that wait for backward.
        logits: Logits, and what the loss keeps.
        buffers: Buckets, residuals, and anchors.
        host: States, and perhaps weights, in the memory of the host.
    """

    states: float
    activations: float
    logits: float
    buffers: float
    host: float = 0.0

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
        if self.host > HOST_MEMORY:
            return "does not fit"
        if self.allocated * (1 + MARGIN + SLACK) + OUTSIDE <= size:
            return "fits"
        return "tight" if self.total <= size else "does not fit"


@dataclass(frozen=True, slots=True)
class Needs:
    """Memory that a job needs in the precision of its GPUs.

    Attributes:
        cluster: GPUs.
        model: Model to train.
        software: Program.
        seq: Tokens of a sequence.
        layout: Division of the job.
    """

    cluster: Cluster
    model: Model
    software: Software
    seq: int
    layout: Layout

    def fullest(self) -> Memory:
        """Return the memory of the pipeline stage that needs most."""
        return max(map(self._stage, stages(self.model, self.layout)), key=lambda memory: memory.allocated)

    def _stage(self, stage: Stage) -> Memory:
        tokens, layout = self.layout.micro * self.seq, self.layout
        kept = tokens * self._kept * stage.layers * _waiting(layout, stage.behind)
        # Backward computes one layer again, with all its activations.
        again = tokens * self._everything if self._repeats else 0.0
        logits = tokens * self.model.vocab / layout.tensor * self._logit * stage.has_head
        activations, logits = (kept, logits) if logits > again else (kept + again, 0.0)
        states, host = self._states(stage)
        # The optimizer works in memory that activations have left.
        buffers = self._buffers(stage) + max(0.0, self._of_step(stage) - activations - logits)
        return Memory(states, activations, logits, buffers, host)

    def _of_step(self, stage: Stage) -> float:
        """Return the bytes that the optimizer needs for a moment, in DeepSpeed's ZeRO 3 for a part at a time."""
        layout = self.layout
        if layout.offload != "none":
            return 0.0
        owned = stage.trained / (layout.shards if layout.zero else 1)
        if self._is_deepspeed and layout.zero == 3:
            owned = min(owned, SUB_GROUP)
        return max(0, self.software.update - self._full_gradients) * owned

    @property
    def _full_gradients(self) -> int:
        """Bytes per parameter of the fp32 gradients that DeepSpeed keeps without ZeRO."""
        keeps_fp32_weights = self.software.states > 2 * FULL
        return FULL * (self._is_deepspeed and not self.layout.zero and keeps_fp32_weights)

    @property
    def _is_deepspeed(self) -> bool:
        return self.software.name in ("deepspeed", "hf", "megatron-deepspeed")

    @property
    def _logit(self) -> float:
        if self.cluster.gpu.element == FULL:
            return 2 * FULL
        # The loss of transformers' GPT-2 is computed in two bytes.
        return 8 if self.software.name == "hf" and not self.model.gated else self.software.logit

    @property
    def _repeats(self) -> bool:
        """True if backward computes most of a layer again."""
        return self.layout.recompute == "full" or (self.layout.recompute == "selective" and self.software.selective > 0)

    def _states(self, stage: Stage) -> tuple[float, float]:
        """Return the bytes of weights, gradients and optimizer states of a GPU, and those on its host."""
        layout, element = self.layout, self.cluster.gpu.element
        owned = stage.trained / (layout.shards if layout.zero else 1)
        frozen = (self.model.base_bits / 8 or element) * (stage.parameters - stage.trained)
        weights = (element * stage.trained + frozen) / (layout.shards if layout.zero == 3 else 1)
        gradient = max(self.software.held, element)
        gradients = gradient * stage.trained / (layout.shards if layout.zero >= 2 else 1)
        optimizer = self._optimizer * owned
        if layout.offload == "none":
            return weights + gradients + optimizer, 0.0
        if layout.zero >= 2:
            # The host adds up the gradients of micro-batches, too.
            gradients, optimizer = 0.0, optimizer + FULL * owned
        if layout.offload == "all":
            weights, optimizer = 0.0, optimizer + weights
        return weights + gradients, optimizer

    @property
    def _optimizer(self) -> int:
        """Bytes per parameter of two moments, fp32 master weights, and without ZeRO DeepSpeed's fp32 gradients."""
        if self.cluster.gpu.element == FULL and not self.layout.zero:
            return 8
        return self.software.states + self._full_gradients

    def _buffers(self, stage: Stage) -> float:
        """Return the bytes of two buckets, or of one and gathered layers, and what compression and islands keep."""
        layout, per_node, software, parameters = self.layout, self.cluster.per_node, self.software, stage.trained
        bucket = min(parameters, bucket_size(parameters, layout.gradient_bits, software.bucket))
        layers = min(stage.parameters, max(2 * self.model.layer_parameters / layout.tensor, software.reused))
        # Megatron sends from the gradients themselves.
        sends = layout.shards > 1 and software.name not in ("megatron", "nanotron")
        buffers = self.cluster.gpu.element * (bucket + (layers if layout.zero == 3 else bucket)) * sends
        if layout.gradient_bits and layout.data > 1:
            node = per_node // layout.tensor
            # Error feedback in bf16 for what leaves the node, twice, because a step may be skipped.
            buffers += 4 * parameters / (layout.shard_within or (node if layout.data > node else 1))
        if layout.islands > 1:
            # The anchor, and the residuals of exchanges.
            buffers += 8 * parameters / (layout.shards if layout.zero else 1)
        return buffers

    @property
    def _kept(self) -> float:
        """Bytes per token of a layer's activations that wait for backward (2205.05198).

        Selective recomputation keeps the inputs of layer and attention's product, and every second matrix product.
        """
        layout, model, element = self.layout, self.model, self.cluster.gpu.element
        whole = element * model.hidden / (layout.tensor if layout.sequence_parallel else 1)
        if layout.recompute == "full":
            return self.software.checkpoints * whole
        if not self._repeats:
            return self._everything
        width = model.heads * model.head_size
        products = model.qkv + 2 * model.hidden + (1 + model.gated) * model.ffn * model.active
        return whole + element * (width + (1 - self.software.selective) * products) / layout.tensor

    @property
    def _widths(self) -> int:
        """Matrices of the MLP's width that backward needs. The GELU of transformers' GPT-2 has separate kernels."""
        if self.model.gated:
            return 4 if self.software.eager else 3
        return 5 if self.software.name == "hf" else 2

    @property
    def _everything(self) -> float:
        """Bytes per token of a layer's activations without recomputation."""
        model, layout, software, element = self.model, self.layout, self.software, self.cluster.gpu.element
        # Inputs of two norms and of the two blocks; the eager norms of Llama also keep fp32 copies.
        copies = 8 if software.eager == 2 and model.gated and element < FULL else 0
        norms = model.hidden * (4 * element + 2 * model.dropout + copies)
        attention = (model.qkv + model.heads * model.head_size) * (1.5 if software.eager and not model.positions else 1)
        mlp = model.ffn * model.active * self._widths
        flash = software.attention or layout.recompute == "selective"
        scores = 0.0 if flash else (2.5 if model.dropout else 1) * model.heads * self.seq
        inside = element * (attention + mlp + scores) / layout.tensor
        return norms / (layout.tensor if layout.sequence_parallel else 1) + inside


def _waiting(layout: Layout, behind: int) -> float:
    """Return the micro-batches whose activations a stage with `behind` stages after it keeps (2104.04473, 2.2)."""
    stages, virtual = layout.pipeline, layout.virtual
    waiting = behind + 1 if virtual == 1 else ((virtual - 1) * stages + 1 + 2 * behind) / virtual
    return min(waiting, layout.accumulation * max(1.0, waiting / stages))


SPREAD = {"compute": 0.05, "memory": 0.10, "launch": 0.4, "bubble": 0.10, "network": 0.25}
"""Relative standard error of a term by its kind; other links have that of `LINK_SPREAD`."""
LINK_SPREAD = 0.15
FITTED_GPU, SCALED_GPU, MEASURED_HERE = 0.07, 0.09, 0.1
"""Relative standard error of a whole step on the GPU of the fit, on one whose constants are scaled from it, and with
constants that were measured on the cluster (docs/planning.md, "How exact it is")."""
PROGRAMS = {"megatron": 0.10, "nanotron": 0.24, "megatron-deepspeed": 0.02, "fsdp": 0.10, "deepspeed": 0.23, "hf": 0.21}
"""The same by program, with which 80 % of the intervals hold (`launch/studies/planner_calibration.py`).

That of Megatron is the difference of two papers on equal layouts.
"""
QUANTILE = 1.28
"""Standard errors on each side of an interval that holds in 80 % of the cases."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step of a layout.

    Attributes:
        layout: The layout.
        terms: Parts of the step.
        memory: Memory of the fullest rank.
        tokens: Tokens of a step.
        common: Relative standard error that all layouts share.
    """

    layout: Layout
    terms: tuple[Term, ...]
    memory: Memory
    tokens: int
    common: float

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(term.seconds for term in self.terms)

    @property
    def error(self) -> float:
        """Relative standard error: a part that all layouts share, and that of each term."""
        each = sum((SPREAD.get(term.kind, LINK_SPREAD) * term.seconds) ** 2 for term in self.terms)
        return float((self.common**2 + each / self.seconds**2) ** 0.5)

    @property
    def interval(self) -> tuple[float, float]:
        """Seconds between which a step lies in 80 % of the cases."""
        factor = 1 + QUANTILE * self.error
        return self.seconds / factor, self.seconds * factor

    @property
    def rate(self) -> float:
        """Tokens per second of the job."""
        return self.tokens / self.seconds

    def share(self, kind: str) -> float:
        """Return the share of the step that terms of a kind take."""
        return sum(term.seconds for term in self.terms if term.kind == kind) / self.seconds


def common_error(gpu: str, program: str, constants: Constants) -> float:
    """Return the relative standard error that all layouts share."""
    if constants != Constants():
        return MEASURED_HERE
    scaled = FITTED_GPU if gpu == CALIBRATED_GPU else SCALED_GPU
    return float((scaled**2 + PROGRAMS[program] ** 2) ** 0.5)
