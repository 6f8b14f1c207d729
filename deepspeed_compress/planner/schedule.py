"""Terms of a step: from micro-batches to the pipeline's bubble, and messages that hide behind computation."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from deepspeed_compress.planner.cluster import SOURCE, Links, Message
from deepspeed_compress.planner.compute import Device, LayerCost, Work, head_cost, layer_cost, recomputed
from deepspeed_compress.planner.layout import Layout, Stage, largest_stage, stages
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.traffic import HOST, ISSUE, DataParallel, Traffic, Window, stage_message, tensor_traffic


@dataclass(frozen=True, slots=True)
class Term:
    """Part of the seconds of a step.

    Attributes:
        name: Name of the work or message.
        kind: Resource that limits it: "compute", "memory", "launch", "bubble", or the name of a link.
        seconds: Seconds that the step becomes longer by.
        busy: Seconds that the resource works, of which `busy - seconds` are hidden behind computation.
        inside: Bytes that a rank sends in a step to others in its node.
        outside: Bytes that a rank sends in a step to other nodes.
        formula: How `seconds` follow from the layout, with its figures.
        source: Origin of the constant that is used.
    """

    name: str
    kind: str
    seconds: float
    busy: float
    inside: float
    outside: float
    formula: str
    source: str


def local(name: str, kind: str, seconds: float, formula: str, source: str) -> Term:
    """Return a term that sends nothing and hides behind nothing."""
    return Term(name, kind, seconds, seconds, 0.0, 0.0, formula, source)


_NOTHING = 1e-9
"""Seconds below which a term is left out."""


@dataclass(frozen=True)
class MicroBatch:
    """Work of one micro-batch on the slowest stage, which many layouts share.

    Attributes:
        layer: Forward and backward of a layer.
        again: Work that backward repeats in a layer.
        head: Forward and backward of the head.
        layers: Layers of the stage.
        heads: 1 if the stage has the head, else 0.
    """

    layer: LayerCost
    again: Work
    head: LayerCost
    layers: int
    heads: int

    @cached_property
    def forward(self) -> float:
        """Seconds of forward."""
        return self.layers * self.layer.forward.seconds + self.heads * self.head.forward.seconds

    @cached_property
    def backward(self) -> float:
        """Seconds of backward, with what is computed again."""
        return self.layers * (self.layer.backward + self.again).seconds + self.heads * self.head.backward.seconds

    @cached_property
    def work(self) -> Work:
        """All work of the micro-batch."""
        layer = self.layer.forward + self.layer.backward + self.again
        return layer.times(self.layers) + (self.head.forward + self.head.backward).times(self.heads)


def micro_batch(device: Device, model: Model, seq: int, layout: Layout) -> MicroBatch:
    """Return the work of a micro-batch on the slowest stage."""
    cost, head = layer_cost(device, model, seq, layout), head_cost(device, model, seq, layout)
    again = recomputed(cost, device.software, layout)
    each = (MicroBatch(cost, again, head, stage.layers, stage.has_head) for stage in stages(model, layout))
    return max(each, key=lambda batch: batch.forward + batch.backward)


def step_terms(links: Links, device: Device, model: Model, seq: int, layout: Layout, batch: MicroBatch) -> list[Term]:
    """Return the terms whose seconds add up to those of a step."""
    stage = largest_stage(model, layout)
    traffic = list(DataParallel(links, device, model, layout, stage).all())
    # The CPU has issued a micro-batch before the GPU has done it.
    ahead = layout.accumulation * max(0.0, batch.work.busy - batch.work.cpu)
    terms = [
        *_computing(batch, layout, device),
        *_in_line(links, device, model, seq, layout, batch),
        _optimizer(links, device, stage, layout),
        _orthogonalization(device, model, stage, layout),
        *_overlapping(device, traffic, _windows(batch, layout.accumulation)),
        _issuing(traffic, ahead),
    ]
    return [term for term in terms if term.busy > _NOTHING]


def _in_line(links: Links, device: Device, model: Model, seq: int, layout: Layout, batch: MicroBatch) -> Iterator[Term]:
    """Yield the messages that micro-batches wait for, and the bubble of the pipeline."""
    sums, hidden = tensor_traffic(links, device, model, seq, layout)
    exposed = _exposed(device, hidden)
    yield _in_micro_batches("tensor-parallel all-reduces", sums.times(batch.layers), exposed, layout)
    if layout.pipeline > 1:
        between = stage_message(links, model, seq, layout)
        yield _in_micro_batches("messages between stages", between, 1.0, layout)
        yield _bubble(layout, model, batch, exposed * sums.seconds, between.seconds)


def _in_micro_batches(name: str, message: Message, exposed: float, layout: Layout) -> Term:
    formula = f"{layout.accumulation} micro-batches x {(message.inside + message.outside) / 1e9:.3g} GB"
    return _message_term(name, message.times(layout.accumulation), exposed, formula)


def _windows(batch: MicroBatch, count: int) -> dict[Window, float]:
    """Return the seconds of computation behind which messages may hide."""
    return {
        "nothing": 0.0,
        "last backward": batch.backward,
        "backward": count * batch.backward,
        "first forward": batch.forward,
        "all": count * (batch.forward + batch.backward),
    }


def _computing(batch: MicroBatch, layout: Layout, device: Device) -> Iterator[Term]:
    work, constants, count = batch.work, device.constants, layout.accumulation
    taken = batch.forward + batch.backward
    idle = device.issued(device.software.idle) * taken
    rate, bandwidth = device.gpu.matmul_rate(constants), device.gpu.memory_rate * constants.memory
    shares = f"{constants.matmul:.3f} and {constants.memory:.3f} of peak; {constants.origin}"
    program = f"{device.software.name}: software.py"
    issued = "with hooks of ZeRO 3" if layout.zero == 3 and device.software.hooks else "kernels"
    products = f"max(operations / {rate / 1e12:.0f} TFLOP/s, bytes / {bandwidth / 1e9:.0f} GB/s)"
    rows = (
        ("matrix products", "compute", work.matmul, products, shares),
        ("attention", "compute", work.attention, f"kernel of generation {device.software.attention}", "gpus.py"),
        ("elementwise kernels", "memory", work.elementwise, f"bytes / {bandwidth / 1e9:.0f} GB/s", program),
        ("starts of kernels", "launch", work.kernels, f"{constants.kernel * 1e6:.1f} us per kernel", constants.origin),
        ("waiting for the CPU", "launch", taken - work.busy, f"{1e3 * work.cpu:.3g} ms to issue, {issued}", program),
        ("idle GPU", "launch", idle, f"{device.issued(device.software.idle):g} of the computation", program),
    )
    for name, kind, seconds, formula, source in rows:
        figures = f"{formula}; {count} micro-batches x {1e3 * seconds:.4g} ms"
        yield local(name, kind, count * seconds, figures, source)


def _message_term(name: str, message: Message, exposed: float, formula: str) -> Term:
    busy, sizes = message.seconds, (message.inside, message.outside)
    source = "traffic.py" if message.link == HOST else SOURCE
    return Term(name, message.link, exposed * busy, busy, *sizes, formula, source)


def _bubble(layout: Layout, model: Model, batch: MicroBatch, tensor: float, between: float) -> Term:
    """Return the time in which a stage has nothing to do: while the pipeline fills and drains."""
    layers = model.layers / layout.pipeline
    layer = (batch.layer.forward.seconds + (batch.layer.backward + batch.again).seconds) + tensor
    head = (batch.head.forward + batch.head.backward).seconds
    mean = layers * layer + head / layout.pipeline + between
    seconds = (layout.pipeline - 1) * mean / layout.virtual
    formula = f"({layout.pipeline} - 1) stages x {1e3 * mean:.4g} ms / {layout.virtual}"
    return local("pipeline bubble", "bubble", seconds, formula, "2104.04473, section 2.2")


HOST_ADAM = 0.25e-9
"""Seconds in which the processors of a host update a parameter (ZeRO-Offload, 2101.06840, table 4: CPU-Adam)."""


def _optimizer(links: Links, device: Device, stage: Stage, layout: Layout) -> Term:
    owned = stage.trained / (layout.shards if layout.zero else 1)
    if layout.offload != "none":
        of_host = owned * min(layout.ranks, links.cluster.per_node)
        formula = f"{of_host:.3g} parameters of a host x {HOST_ADAM * 1e9:g} ns"
        return local("optimizer on the host", HOST, HOST_ADAM * of_host, formula, "2101.06840")
    formula = f"{owned:.3g} parameters x {device.software.optimizer:g} bytes"
    return local("optimizer", "memory", device.moved(device.software.optimizer * owned), formula, "software.py")


MUON_ITERATIONS = 5
"""Iterations of Newton and Schulz in a step (`deepspeed.runtime.zero.muon`, `ns_steps`)."""


def _orthogonalization(device: Device, model: Model, stage: Stage, layout: Layout) -> Term:
    """Return the products with which Muon makes matrices orthogonal: X X', its square, and that times X, repeatedly."""
    sizes = [sorted(matrix) for matrix in model.adapted] if layout.optimizer == "Muon" else []
    once = sum(2 * device.product(short, long, short) + device.product(short, short, short) for short, long in sizes)
    seconds = MUON_ITERATIONS * once * stage.layers / (layout.shards if layout.zero else 1)
    formula = f"{MUON_ITERATIONS} iterations for {len(sizes)} matrices of {stage.layers} layers, divided over ranks"
    return local("Muon", "compute", seconds, formula, "2502.16982, section 2")


def _exposed(device: Device, hidden: float) -> float:
    """Return the share of a message that a step takes longer for, if the share `hidden` is behind computation."""
    return 1 - (1 - min(1.0, device.constants.contention)) * hidden


def _overlapping(device: Device, messages: Iterable[Traffic], free: dict[Window, float]) -> Iterator[Term]:
    """Yield the terms of messages. Each uses up some of the computation in `free`, behind which others could hide."""
    for traffic in messages:
        seconds = traffic.message.seconds
        hidden = (1 - 1 / traffic.pieces) * min(seconds, free[traffic.window])
        free = {window: max(0.0, left - hidden) for window, left in free.items()}
        exposed = _exposed(device, hidden / seconds) if seconds else 0.0
        yield _message_term(traffic.name, traffic.message, exposed, f"{traffic.formula}; {hidden:.3g} s hidden")
        if traffic.coding:
            yield local(f"coding of {traffic.name}", "memory", traffic.coding, traffic.formula, "traffic.py")


def _issuing(messages: Iterable[Traffic], ahead: float) -> Term:
    """Return the time that the GPU waits for the CPU to issue buckets, if the CPU is `ahead` seconds ahead of it."""
    issue = sum(traffic.issue for traffic in messages)
    waiting = max(0.0, issue - ahead)
    formula = f"{1e3 * ISSUE:g} ms per bucket, {issue:.3g} s; the CPU is {ahead:.3g} s ahead of the GPU"
    return Term("issuing compressed buckets", "launch", waiting, issue, 0.0, 0.0, formula, "traffic.py")
