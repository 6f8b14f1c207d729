"""Seconds that a rank computes: matrix products, attention, elementwise kernels, starts of kernels, the optimizer."""

from dataclasses import dataclass, fields, replace

from deepspeed_compress.planner.gpus import Constants, Gpu
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.software import Elementwise, Software

HALF = 2
"""Bytes of an element in bf16."""


@dataclass(frozen=True, slots=True)
class Work:
    """Seconds of a piece of work, by what limits it.

    Attributes:
        matmul: Matrix products.
        attention: Scores, softmax, and their product with the values.
        elementwise: Kernels that are limited by memory bandwidth.
        kernels: Starts of kernels.
        cpu: Seconds in which the CPU issues this work, beside the GPU.
    """

    matmul: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    kernels: float = 0.0
    cpu: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*(getattr(self, part.name) + getattr(other, part.name) for part in fields(Work)))

    def times(self, factor: float) -> "Work":
        """Return `factor` times this work."""
        return Work(*(factor * getattr(self, part.name) for part in fields(Work)))

    @property
    def busy(self) -> float:
        """Seconds that the GPU works."""
        return self.matmul + self.attention + self.elementwise + self.kernels

    @property
    def seconds(self) -> float:
        """Seconds that the work takes."""
        return max(self.busy, self.cpu)


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU with its constants and the program that uses it."""

    gpu: Gpu
    constants: Constants
    software: Software

    def product(self, rows: float, columns: float, inner: float) -> float:
        """Return the seconds of a matrix product: of its operations, or to read and write its matrices (roofline)."""
        operations = 2 * rows * columns * inner / self.gpu.matmul_rate(self.constants)
        return max(operations, self.moved(self.gpu.element * (rows * inner + inner * columns + rows * columns)))

    @property
    def width(self) -> float:
        """Bytes of an element, relative to bf16."""
        return self.gpu.element / HALF

    @property
    def gradient(self) -> float:
        """Bytes of a gradient element on the network."""
        return self.software.gradient * self.width

    def moved(self, size: float) -> float:
        """Return the seconds in which a kernel reads and writes `size` bytes."""
        return size / (self.gpu.memory_rate * self.constants.memory)

    def coded(self, size: float) -> float:
        """Return the seconds in which the compression kernels read and write `size` bytes."""
        return self.moved(size) / self.constants.coding

    def issued(self, cost: float) -> float:
        """Return a cost of the CPU, in seconds or as a share, from that in the table of programs."""
        return cost * self.constants.cpu


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Forward and backward of one micro-batch in one decoder layer, or in the head."""

    forward: Work
    backward: Work


def layer_cost(device: Device, model: Model, seq: int, layout: Layout) -> LayerCost:
    """Return the cost of a decoder layer without recomputation. Tensor ranks share matrices and heads."""
    tokens, tensor, software = layout.micro * seq, layout.tensor, device.software
    products = matrix_products(model, tokens, tensor)
    once = sum(device.product(*sizes) * count for sizes, count in products)
    back = sum(device.product(rows, inner, columns) * count for (rows, columns, inner), count in products)
    if not model.rank:
        # Frozen weights have no gradients.
        back += sum(device.product(inner, columns, rows) * count for (rows, columns, inner), count in products)
    scores, scores_back = attention_cost(device, model, seq, layout)
    moved = _elementwise(model, software.elementwise, tensor, layout.sequence_parallel) * tokens * device.width
    accumulate = software.accumulate * device.width * model.trained_layer_parameters / tensor
    accumulate *= layout.accumulation > 1
    # Each pass unpacks frozen weights of few bits (QLoRA).
    unpacked = (model.base_bits / 8 + device.gpu.element) * model.layer_parameters / tensor if model.base_bits else 0.0
    # Without a flash kernel, attention takes four more: scale, softmax, dropout, and a transpose. LoRA takes four for
    # each matrix: two products, the scale and the sum.
    kernels = software.kernels + (0 if software.attention else 4) + (4 * len(model.adapted) if model.rank else 0)
    start, issue = device.constants.kernel, device.issued(software.dispatch * kernels)
    # ZeRO 3 gathers and releases the parts of a layer from hooks, which the CPU runs between the kernels.
    issue += device.issued(software.hooks) * (layout.zero == 3)
    forward = Work(once, scores, device.moved(moved + unpacked), kernels * start, issue)
    backward = Work(
        back,
        scores_back,
        device.moved(software.elementwise.backward * moved + accumulate + unpacked),
        2 * kernels * start,
        # There are twice as many kernels, but autograd issues each in half the time, because it runs without Python.
        issue,
    )
    return LayerCost(forward, backward)


def matrix_products(model: Model, tokens: float, tensor: int) -> list[tuple[tuple[float, float, float], float]]:
    """Return rows, columns and inner size of the matrix products of a forward pass, and how often each occurs."""
    width, ffn = model.heads * model.head_size / tensor, model.ffn / tensor
    routed, used = tokens * model.active / model.experts, model.experts
    return [
        ((tokens, model.qkv / tensor, model.hidden), 1),
        ((tokens, model.hidden, width), 1),
        ((routed, ffn, model.hidden), used * (2 if model.gated else 1)),
        ((routed, model.hidden, ffn), used),
    ]


def attention_cost(device: Device, model: Model, seq: int, layout: Layout) -> tuple[float, float]:
    """Return the seconds of forward and of backward of the attention between queries, keys and values."""
    heads, size, generation = model.heads / layout.tensor, model.head_size, device.software.attention
    if generation:
        # Causal: half of the pairs. Backward has five products in place of two.
        operations = 2 * 2 * layout.micro * heads * seq * seq * size / 2
        seconds = operations / (device.gpu.matmul_rate(device.constants) * device.gpu.flash[generation])
        return seconds, 2.5 * seconds
    pairs = layout.micro * heads * seq * seq
    product = layout.micro * heads * (device.product(seq, seq, size) + device.product(seq, size, seq))
    # Dropout reads, and writes the result and a mask. Backward of the softmax reads two matrices in place of one.
    dropout, softmax = 5 if model.dropout else 0, device.software.elementwise.scores
    return product + device.moved((softmax + dropout) * pairs), 2 * product + device.moved(
        (softmax + 2 + dropout) * pairs
    )


def _elementwise(model: Model, bytes_of: Elementwise, tensor: int, sequence_parallel: bool) -> float:
    """Return the bytes per token that elementwise kernels move in a forward pass of a layer."""
    residual = bytes_of.residual + 3 * model.dropout
    # PyTorch has a kernel for the norms of GPT, but older programs have none for those of Llama.
    norm = bytes_of.norm if model.gated else min(bytes_of.norm, 8.0)
    whole = 2 * (norm + residual) * model.hidden / (tensor if sequence_parallel else 1)
    rotary = 0 if model.positions else bytes_of.rotary * (model.heads + model.kv_heads) * model.head_size
    # Queries, keys and values are brought into the order of heads, and back.
    reorder = 2 * HALF * (model.qkv + model.heads * model.head_size)
    activation = (bytes_of.gated if model.gated else bytes_of.activation) * model.ffn * model.active
    mixing = 4 * HALF * model.hidden * model.active if model.experts > 1 else 0
    return whole + (rotary + reorder + activation + mixing) / tensor


def head_cost(device: Device, model: Model, seq: int, layout: Layout) -> LayerCost:
    """Return the cost of the head and the loss of one micro-batch."""
    tokens, columns = layout.micro * seq, model.vocab / layout.tensor
    loss = device.moved(device.software.loss * tokens * columns / 2)
    forward = device.product(tokens, columns, model.hidden)
    backward = device.product(tokens, model.hidden, columns)
    if not model.rank:
        backward += device.product(columns, model.hidden, tokens)
    return LayerCost(Work(matmul=forward, elementwise=loss), Work(matmul=backward, elementwise=loss))


def recomputed(cost: LayerCost, software: Software, layout: Layout) -> Work:
    """Return what backward computes again in a layer.

    Selective recomputation repeats the attention in Megatron (2205.05198). In torchtitan it repeats every second matrix
    product and all elementwise kernels.
    """
    forward = cost.forward
    if layout.recompute == "full":
        return forward
    if layout.recompute == "none":
        return Work()
    if software.selective:
        return replace(forward.times(software.selective), attention=0.0, elementwise=forward.elementwise)
    return Work(attention=forward.attention)
