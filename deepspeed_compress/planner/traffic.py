"""Messages of a layout: between tensor ranks, pipeline stages, replicas, and islands."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

from deepspeed_compress.planner.cluster import Group, Links, Message
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.layout import Layout, Stage
from deepspeed_compress.planner.model import Model

Window = Literal["nothing", "last backward", "backward", "first forward", "all"]

BUCKETS, SMALLEST_BUCKET, LARGEST_BUCKET = 8, 1e6, 5e7
"""Number of compressed buckets that gradients are sent in, and the least and most elements of each."""
SCALE_BITS = 0.125
"""Bits of the scales of method `blockwise` per element: 32 for each block of 256."""
ENCODE, DECODE = 18, 6
"""Bytes per element that the kernels move: gradient, residual and payload; a decoded payload added to a sum."""
ISSUE = 3e-4
"""Seconds that the CPU takes to issue a compressed bucket among any number of ranks: 20 calls of kernels of 15 us.

An estimate. On an H200, two ranks took 0.2 ms when each message had its own calls (docs/gpu.md).
"""

HOST, HOST_LINK = "host", 20e9
"""Link between a GPU and the memory of its host, and its bytes per second in one direction: PCIe 4.0 with 16 lanes."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Messages of one kind in a step.

    Attributes:
        name: Name of what is sent.
        message: Cost of all of them.
        window: Computation behind which all but the last may hide.
        pieces: Number of messages that follow each other.
        coding: Seconds of the kernels that compress and decompress.
        formula: Figures of the messages.
        issue: Seconds that the CPU takes to issue compressed buckets.
    """

    name: str
    message: Message
    window: Window
    pieces: float
    coding: float
    formula: str
    issue: float = 0.0


def tensor_traffic(links: Links, device: Device, model: Model, seq: int, layout: Layout) -> tuple[Message, float]:
    """Return the cost of the all-reduces of hidden states of a layer and a micro-batch, and the share that hides.

    There are two forward and two backward (1909.08053), but DeepSpeed's backward has one for each matrix that reads the
    same states: queries, keys, values, gate and up. What is computed again is sent again. The last two may hide behind
    the products of weight gradients.
    """
    size = layout.micro * seq * model.hidden * links.cluster.gpu.element
    backward = 5 if layout.engine == "deepspeed" and model.reads_separately else 2
    count = (4 if layout.recompute == "full" else 2) + backward
    message = links.reduce(size, links.group(layout.tensor, 1)).times(count)
    return message, 2 / count if device.software.tensor_overlaps else 0.0


def stage_message(links: Links, model: Model, seq: int, layout: Layout) -> Message:
    """Return the cost of the messages of a micro-batch that a stage sends to its one or two neighbors.

    Megatron sends each tensor rank's part, gathers the parts inside the node, and sends while it receives. DeepSpeed
    sends everything from every tensor rank, and waits for each message that a stage sends or receives.
    """
    megatron = layout.engine == "megatron"
    size = layout.micro * seq * model.hidden * links.cluster.gpu.element / (layout.tensor if megatron else 1)
    sent = links.send(size, layout.data * layout.tensor)
    both = sent.times(layout.virtual * (2 if layout.pipeline > 2 or layout.virtual > 1 else 1))
    return both if megatron else replace(both, seconds=2 * both.seconds)


def bucket_size(parameters: float, bits: int, theirs: float) -> float:
    """Return the elements of a bucket of `parameters`: ours if compressed to `bits` bits, else `theirs`."""
    return min(max(parameters / BUCKETS, SMALLEST_BUCKET), LARGEST_BUCKET) if bits else theirs


@dataclass(frozen=True, slots=True)
class DataParallel:
    """Messages between the replicas of a stage, and between the copies of a tied embedding."""

    links: Links
    device: Device
    model: Model
    layout: Layout
    stage: Stage

    def all(self) -> Iterator[Traffic]:
        """Yield the messages of each kind in a step."""
        layout = self.layout
        if layout.shards > 1:
            yield self._gradients()
        if layout.shards > 1 and layout.zero:
            yield from self._gathered() if layout.zero == 3 else [self._updated()]
        if self.stage.tied:
            yield self._tied()
        if layout.shard_within and layout.island_size > layout.shard_within:
            yield self._between_nodes()
        if layout.islands > 1:
            yield self._between_islands()
        if layout.offload != "none":
            yield from self._with_host()

    def _with_host(self) -> Iterator[Traffic]:
        """Yield what moves between GPU and host: gradients and updated weights, and all weights for each pass."""
        layout, stage = self.layout, self.stage
        owned, micro_batches = self.device.gradient * stage.trained / layout.shards, layout.accumulation
        yield _copied("gradients to the host", owned, micro_batches, "backward")
        if layout.offload == "all":
            size = self.links.cluster.gpu.element * stage.parameters / layout.shards
            yield _copied("weights from the host", size, 2 * micro_batches, "all")
        else:
            yield _copied("updated weights from the host", owned, 1, "nothing")

    def _gradients(self) -> Traffic:
        layout, parameters = self.layout, self.stage.trained
        group = self._replicas
        repeated = layout.accumulation if self._reduces_often else 1
        bits = 0 if layout.shard_within else layout.gradient_bits
        pieces = self._pieces(bits, self.device.software.bucket)
        mean, worst = self._widths(bits, 8 * self.device.gradient)
        if bits:
            message = self._compressed(parameters / pieces, mean, group)
            message = replace(message, seconds=self._compressed(parameters / pieces, worst, group).seconds)
        elif layout.zero >= self.device.software.owners_from:
            message = self.links.scatter(parameters * self.device.gradient / pieces, group)
        else:
            message = self.links.reduce(parameters * self.device.gradient / pieces, group)
        inside = group.local if group.nodes > 1 else 1
        coding = self.device.coded((ENCODE + DECODE) * parameters / inside) if bits else 0.0
        size = f"{parameters:.3g} elements of {mean:g} bits"
        formula = f"{size}, {repeated:g} times, among {group.local} x {group.nodes} ranks in {pieces:g} messages"
        whole, window = message.times(pieces * repeated), self._gradient_window(bits)
        issue = self.device.issued(ISSUE) * pieces * repeated if bits else 0.0
        return Traffic("gradients", whole, window, pieces, coding * repeated, formula, issue)

    def _widths(self, bits: int, plain: float) -> tuple[float, float]:
        """Return the bits of an element: the mean, and that of the rank which owns most of a tied embedding.

        Embeddings that two stages share are never compressed. ZeRO gives each rank a part of the elements, so few
        ranks own them.
        """
        if not bits:
            return plain, plain
        tied, narrow = self.stage.tied / self.stage.trained, bits + SCALE_BITS
        most = min(1.0, self.layout.shards * tied) if self.layout.zero else tied
        return narrow + tied * (plain - narrow), narrow + most * (plain - narrow)

    @property
    def _reduces_often(self) -> bool:
        return self.layout.zero >= 2 and self.device.software.every_micro_batch

    def _pieces(self, bits: int, theirs: float) -> int:
        """Return the number of messages of all parameters, of `theirs` elements if they are not compressed."""
        size = bucket_size(self.stage.trained, bits, theirs)
        return math.ceil(self.stage.trained / size)

    def _gradient_window(self, bits: int) -> Window:
        """Return where gradients of `bits` bits hide. DeepSpeed waits for gloo, whose own threads we use."""
        layout, is_gloo = self.layout, self.links.is_gloo
        if is_gloo and not bits:
            return "nothing"
        if self._reduces_often:
            return "backward" if layout.zero < 3 or self.device.software.hides else "nothing"
        early = is_gloo and layout.pipeline == 1
        return "last backward" if early or layout.zero >= 2 or self.device.software.overlaps else "nothing"

    def _compressed(self, elements: float, width: float, group: Group) -> Message:
        """Return the cost of reducing: uncompressed inside nodes, then compressed between them (`hierarchy`).

        Without ZeRO, owners send the means back.
        """
        stride, local, nodes, ways = self.layout.tensor, group.local, group.nodes, 1 if self.layout.zero else 2
        inside = local if nodes > 1 else 1
        between = self.links.group(nodes if nodes > 1 else local, stride * inside)
        message = self.links.exchange(elements / inside * width / 8, between).times(ways)
        if inside == 1:
            return message
        summed = self.links.exchange(elements * self.device.gradient, self.links.group(local, stride))
        return message.then(summed.times(ways))

    @property
    def _replicas(self) -> Group:
        return self.links.group(self.layout.shards, self.layout.tensor)

    def _delivered(self, elements: float, plain: float) -> Message:
        """Return the cost of giving all ranks each other's parts of weights, of `plain` bits if not compressed.

        The cost is that of a ring, except for compressed weights with gloo, which go straight to every rank.
        """
        bits = self.layout.weight_bits
        mean, worst = (elements * width / 8 for width in self._widths(bits, plain))
        if not bits or not self.links.is_gloo:
            return self.links.gather(mean, self._replicas)
        slowest = self.links.exchange(worst, self._replicas)
        return replace(self.links.exchange(mean, self._replicas), seconds=slowest.seconds)

    def _updated(self) -> Traffic:
        """Return the gather of updated weights under ZeRO 1 and 2."""
        layout, parameters, bits = self.layout, self.stage.trained, self.layout.weight_bits
        pieces = self._pieces(bits, self.device.software.bucket)
        message = self._delivered(parameters / pieces, 8 * self.device.gpu.element).times(pieces)
        hides = (bits and layout.pipeline == 1) or self.device.software.overlaps
        coding = self.device.coded(DECODE * parameters) if bits else 0.0
        formula = f"{parameters:.3g} elements gathered once"
        return Traffic("updated weights", message, "first forward" if hides else "nothing", pieces, coding, formula)

    def _gathered(self) -> Iterator[Traffic]:
        """Yield the gathers of ZeRO 3: layer by layer for forward and backward of micro-batches; small tensors once."""
        layout, stage, software = self.layout, self.stage, self.device.software
        bits = layout.weight_bits
        small = stage.layers * self.model.small_parameters(software.persistent) / layout.tensor
        table = self.model.positions * self.model.hidden
        small += table * (table <= software.persistent)
        parameters = stage.parameters - small
        # What the end of forward used is still there when backward begins.
        count = layout.accumulation * (2 - min(1.0, software.reused / 2 / parameters))
        prefetched = bucket_size(stage.parameters, bits, LARGEST_BUCKET)
        pieces = min(stage.layers, math.ceil(stage.parameters / prefetched))
        # With LoRA, nearly all elements are frozen.
        plain = self.model.base_bits or 8 * self.device.gpu.element
        message = self._delivered(parameters / pieces, plain).times(pieces * count)
        coding = self.device.coded(DECODE * parameters * count) if bits else 0.0
        formula = f"{parameters:.3g} elements gathered {count:.3g} times"
        window: Window = "all" if software.hides else "nothing"
        yield Traffic("gathered weights", message, window, pieces, coding, formula)
        if small:
            once = self.links.gather(small * self.device.gpu.element, self._replicas)
            formula = f"{small:.3g} elements gathered once"
            yield Traffic("persistent weights", once, "nothing", 1, 0.0, formula)

    def _tied(self) -> Traffic:
        """Return the sum of both gradients of an embedding that the first and the last stage share."""
        size = self.stage.tied * self.device.gradient
        message = self.links.reduce(size, Group(2, 1 if self.links.cluster.nodes > 1 else 2))
        return Traffic("tied embedding", message, "nothing", 1, 0.0, f"{size / 1e9:.3g} GB between two stages")

    def _between_nodes(self) -> Traffic:
        """Return the mean of each shard's gradients over the nodes (hybrid sharding)."""
        layout, elements = self.layout, self.stage.trained / self.layout.shards
        count = layout.island_size // layout.shards
        group = self.links.group(count, layout.tensor * layout.shards)
        bits = layout.gradient_bits
        width, _ = self._widths(bits, 8 * self.device.gradient)
        if bits:
            message = self.links.exchange(elements * width / 8, group).times(2)
        else:
            message = self.links.reduce(elements * self.device.gradient, group)
        coding = self.device.coded((ENCODE + DECODE) * elements) if bits else 0.0
        formula = f"{elements:.3g} elements of {width:g} bits among {count} nodes"
        issue = self.device.issued(ISSUE) if bits else 0.0
        # FSDP sends each unit's gradients on as soon as its node has their sum.
        early = self.device.software.overlaps and not bits
        pieces = self._pieces(0, self.device.software.bucket) if early else 1
        window: Window = "last backward" if early else "nothing"
        return Traffic("gradients between nodes", message, window, pieces, coding, formula, issue)

    def _between_islands(self) -> Traffic:
        """Return the exchanges of changed weights in 4 bits, spread over the steps between them."""
        layout, elements = self.layout, self.stage.trained / (self.layout.shards if self.layout.zero else 1)
        group = self.links.group(layout.islands, layout.tensor * layout.island_size)
        payload = elements * (4 + SCALE_BITS) / 8
        message = self.links.exchange(payload, group).times(2)
        coding = self.device.coded((ENCODE + DECODE) * elements) / layout.sync_every
        formula = f"{payload / 1e9:.3g} GB among {layout.islands} islands, every {layout.sync_every} steps"
        message, issue = message.times(1 / layout.sync_every), self.device.issued(ISSUE) / layout.sync_every
        return Traffic("islands", message, "nothing", 1, coding, formula, issue)


def _copied(name: str, size: float, times: int, window: Window) -> Traffic:
    """Return the traffic of copies of `size` bytes between a GPU and its host."""
    message = Message(times * size / HOST_LINK, 0.0, 0.0, HOST)
    return Traffic(name, message, window, 8 * times, 0.0, f"{times} x {size / 1e9:.3g} GB at {HOST_LINK / 1e9:g} GB/s")
