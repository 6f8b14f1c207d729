"""Messages of a layout: between tensor ranks, pipeline stages, replicas, and islands."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.links import Links, Message
from deepspeed_compress.planner.model import Model

Window = Literal["nothing", "last backward", "backward", "first forward", "all"]

BUCKETS = 8.0
"""Messages that a model's gradients are sent in (configuration page: buckets of an eighth of the model)."""
SCALE_BITS = 0.125
"""Bits of the scales of method `blockwise` per element: 32 for each block of 256."""
ENCODE, DECODE = 18, 6
"""Bytes per element that the kernels move: gradient, residual and payload; a decoded payload added to a sum."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one kind in a step.

    Attributes:
        name: Name of what is sent.
        message: Cost of all of them.
        window: Computation behind which they may hide.
        coding: Seconds of the kernels that compress and decompress.
        formula: Figures of the messages.
    """

    name: str
    message: Message
    window: Window
    coding: float
    formula: str


@dataclass(frozen=True, slots=True)
class Stage:
    """Share of a model on a rank of the largest pipeline stage.

    Attributes:
        layers: Decoder layers.
        parameters: Parameters of the rank.
    """

    layers: float
    parameters: float


def largest_stage(model: Model, layout: Layout) -> Stage:
    """Return the share of the rank with most parameters."""
    layers = -(-model.layers // layout.pipeline)
    ends = (model.embedding_parameters, model.head_parameters or model.vocab * model.hidden)
    extra = model.embedding_parameters + model.head_parameters if layout.pipeline == 1 else max(ends)
    return Stage(layers, (layers * model.layer_parameters + extra) / layout.tensor)


@dataclass(frozen=True, slots=True)
class TensorTraffic:
    """All-reduces of hidden states of a layer and a micro-batch (1909.08053): two forward, two backward.

    Attributes:
        message: Cost of all of them.
        hidden: Share that hides behind the products of weight gradients.
    """

    message: Message
    hidden: float


def tensor_traffic(links: Links, device: Device, model: Model, seq: int, layout: Layout) -> TensorTraffic:
    """Return the traffic between the ranks that share a layer. What is computed again is sent again."""
    size = layout.micro * seq * model.hidden * links.cluster.gpu.element
    count = 6 if layout.recompute == "full" else 4
    message = links.reduce(size, links.group(layout.tensor, 1)).times(count)
    return TensorTraffic(message, 2 / count if device.software.tensor_overlaps else 0.0)


def stage_message(links: Links, model: Model, seq: int, layout: Layout) -> Message:
    """Return the cost of the messages of a micro-batch between stages, forward and backward.

    Megatron sends each tensor rank's part, gathers the parts inside the node, and sends while it receives. DeepSpeed
    sends everything from every tensor rank, and waits for each of the four messages that a stage sends or receives.
    """
    megatron = layout.engine == "megatron"
    size = layout.micro * seq * model.hidden * links.cluster.gpu.element / (layout.tensor if megatron else 1)
    sent = links.send(size, links.cluster.nodes > 1)
    both = sent.times(2 * layout.virtual)
    return both if megatron else replace(both, seconds=2 * both.seconds)


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Messages between replicas."""

    links: Links
    device: Device
    model: Model
    layout: Layout

    def all(self) -> Iterator[Traffic]:
        """Yield the messages of each kind in a step."""
        layout = self.layout
        if layout.shards > 1:
            yield self._gradients()
            if layout.zero:
                yield self._gathered() if layout.zero == 3 else self._updated()
        if layout.shard_within and layout.island_size > layout.shard_within:
            yield self._between_nodes()
        if layout.islands > 1:
            yield self._between_islands()

    @property
    def _parameters(self) -> float:
        return largest_stage(self.model, self.layout).parameters

    def _gradients(self) -> Traffic:
        layout, parameters = self.layout, self._parameters
        group = self.links.group(layout.shards, layout.tensor)
        repeated = layout.accumulation if self._reduces_often else 1
        pieces = self._layers if layout.zero == 3 else BUCKETS
        bits = 0 if layout.shard_within else layout.gradient_bits
        if bits:
            message = self._compressed(parameters / pieces, bits, group.local, group.nodes, zero=layout.zero)
        elif layout.zero:
            message = self.links.gather(parameters * self.device.gradient / pieces, group)
        else:
            message = self.links.reduce(parameters * self.device.gradient / pieces, group)
        inside = group.local if group.nodes > 1 else 1
        coding = self.device.coded((ENCODE + DECODE) * parameters / inside) if bits else 0.0
        size = f"{parameters:.3g} elements of {bits + SCALE_BITS if bits else 8 * self.device.gradient:g} bits"
        formula = f"{size}, {repeated:g} times, among {group.local} x {group.nodes} ranks in {pieces:g} messages"
        return Traffic("gradients", message.times(pieces * repeated), self._gradient_window, coding * repeated, formula)

    @property
    def _layers(self) -> float:
        return largest_stage(self.model, self.layout).layers

    @property
    def _reduces_often(self) -> bool:
        return self.layout.zero >= 2 and self.device.software.every_micro_batch

    @property
    def _gradient_window(self) -> Window:
        if self._reduces_often:
            return "backward"
        return "last backward" if self.device.software.overlaps or self.layout.zero >= 2 else "nothing"

    def _compressed(self, elements: float, bits: int, local: int, nodes: int, zero: int) -> Message:
        """Return the cost of reducing: uncompressed inside nodes, then compressed between them (`hierarchy`)."""
        stride = self.layout.tensor
        inside = local if nodes > 1 else 1
        between = self.links.group(nodes if nodes > 1 else local, stride * inside)
        payload = elements / inside * (bits + SCALE_BITS) / 8
        message = self.links.exchange(payload, between)
        if zero == 0:
            message = message.then(self.links.gather(payload, between))
        if inside == 1:
            return message
        summed = self.links.gather(elements * self.device.gradient, self.links.group(local, stride))
        return message.then(summed.times(1 if zero else 2))

    def _updated(self) -> Traffic:
        """Return the gather of updated weights under ZeRO 1 and 2."""
        layout, parameters = self.layout, self._parameters
        bits = layout.weight_bits
        size = parameters * (bits + SCALE_BITS if bits else 8 * self.device.gpu.element) / 8
        message = self.links.gather(size / BUCKETS, self.links.group(layout.shards, layout.tensor)).times(BUCKETS)
        hides = (bits and layout.pipeline == 1) or self.device.software.overlaps
        coding = self.device.coded(DECODE * parameters) if bits else 0.0
        formula = f"{size / 1e9:.3g} GB gathered once"
        return Traffic("updated weights", message, "first forward" if hides else "nothing", coding, formula)

    def _gathered(self) -> Traffic:
        """Return the gathers of ZeRO 3, for forward and for backward of every micro-batch, layer by layer."""
        layout, parameters = self.layout, self._parameters
        bits, count = layout.weight_bits, 2 * layout.accumulation
        size = parameters * (bits + SCALE_BITS if bits else 8 * self.device.gpu.element) / 8
        group = self.links.group(layout.shards, layout.tensor)
        message = self.links.gather(size / self._layers, group).times(self._layers * count)
        coding = self.device.coded(DECODE * parameters * count) if bits else 0.0
        return Traffic("gathered weights", message, "all", coding, f"{size / 1e9:.3g} GB gathered {count} times")

    def _between_nodes(self) -> Traffic:
        """Return the mean of each shard's gradients over the nodes (hybrid sharding)."""
        layout, elements = self.layout, self._parameters / self.layout.shards
        count = layout.island_size // layout.shards
        group = self.links.group(count, layout.tensor * layout.shards)
        bits = layout.gradient_bits
        if bits:
            payload = elements * (bits + SCALE_BITS) / 8
            message = self.links.exchange(payload, group).then(self.links.gather(payload, group))
        else:
            message = self.links.reduce(elements * self.device.gradient, group)
        coding = self.device.coded((ENCODE + DECODE) * elements) if bits else 0.0
        formula = f"{elements:.3g} elements of {bits + SCALE_BITS if bits else 16:g} bits among {count} nodes"
        return Traffic("gradients between nodes", message, "nothing", coding, formula)

    def _between_islands(self) -> Traffic:
        """Return the exchanges of changed weights in 4 bits, spread over the steps between them."""
        layout, elements = self.layout, self._parameters / (self.layout.shards if self.layout.zero else 1)
        group = self.links.group(layout.islands, layout.tensor * layout.island_size)
        payload = elements * (4 + SCALE_BITS) / 8
        message = self.links.exchange(payload, group).then(self.links.gather(payload, group))
        coding = self.device.coded((ENCODE + DECODE) * elements) / layout.sync_every
        formula = f"{payload / 1e9:.3g} GB among {layout.islands} islands, every {layout.sync_every} steps"
        return Traffic("islands", message.times(1 / layout.sync_every), "nothing", coding, formula)
