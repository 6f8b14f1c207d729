"""Choices of a user: the layout that runs now, and layouts that send less, in the order in which one would try them.

Next to these: what round batches and packed documents would gain, and, with GPUs of several kinds, a division of the
batch for their rates, and the best kind alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from deepspeed_compress.choice_names import AS_NOW, NOW, in_bits, inside_nodes, islands
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.gpus import Gpu
from deepspeed_compress.planner.layout import MICRO_BATCHES, Layout, Layouts, Offload
from deepspeed_compress.planner.schedule import micro_batch
from deepspeed_compress.planner.search import ISLANDS_LOST, MUON_STEPS, TIE, Candidate, Job, Plan, loss_gap, search

FASTER = 0.9
"""Share of the seconds of all other choices that another layout must stay below to be a choice, too."""
ROUND, WORTH = 8, 0.05
"""Sequences for each GPU that a round batch is a multiple of, and the gain in rate that makes one worth a note."""
TRIED = 10
"""Layouts that are predicted with such a batch."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A way to train.

    Attributes:
        name: What differs from what runs now.
        candidate: The predicted layout.
        loss: Change of the loss, as a text.
    """

    name: str
    candidate: Candidate
    loss: str = AS_NOW

    @property
    def seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.candidate.prediction.seconds


@dataclass(frozen=True, slots=True)
class Setup:
    """Layout that a configuration describes, in the terms of `Layout`. A micro-batch of 0 is left open."""

    zero: int
    tensor: int = 1
    pipeline: int = 1
    micro: int = 0
    shard_within: int = 0
    gradient_bits: int = 0
    weight_bits: int = 0
    offload: Offload = "none"

    def allows(self, layout: Layout) -> bool:
        """Return True if the configuration without its compression has the sizes of `layout`."""
        written = (self.zero, self.tensor, self.pipeline, self.shard_within)
        sizes = (layout.zero, layout.tensor, layout.pipeline, layout.shard_within)
        return sizes == written and self.micro in (0, layout.micro)


def choices(job: Job, plan: Plan, setup: Setup | None) -> tuple[Choice, ...]:
    """Return what trains as now: first what runs now (`setup`, or DeepSpeed as most use it), then what sends less."""
    now = _now(job, plan, setup)
    inside = () if now.candidate.layout.shard_within else tuple(_inside_nodes(job, plan, now.candidate.layout.zero))
    found = (now, *_with_fewer_bits(job, now.candidate.layout, (8, 4) if inside else (8, 4, 3)), *inside)
    fastest = plan.candidates[0]
    if fastest.prediction.seconds < FASTER * min(one.seconds for one in found):
        found = (*found, Choice(f"the fastest: {fastest.layout}", fastest))
    gaps = [loss_gap(one.candidate.layout, job.model.parameters) for one in found]
    lost = [AS_NOW if gap == gaps[0] else f"{100 * (gap - gaps[0]):+.2f} %" for gap in gaps]
    return tuple(replace(one, loss=loss) for one, loss in zip(found, lost, strict=True))


def others(job: Job, plan: Plan, now: Choice) -> Iterator[Choice]:
    """Yield what trains in another way: Muon in the layout that runs now, and the fastest layout with islands.

    Under ZeRO 3, Muon's gathers are not predicted.
    """
    layout, is_plain = now.candidate.layout, not job.model.rank and job.model.experts == 1 and job.engine == "deepspeed"
    if layout.zero < 3 and is_plain and not layout.shard_within and layout.data > 1:
        bits = layout.gradient_bits or 4
        weights = (layout.weight_bits or max(bits, 4)) if layout.zero else 0
        muon = replace(layout, optimizer="Muon", gradient_bits=bits, weight_bits=weights)
        yield Choice(f"Muon, {bits} bits", job.candidate(muon), f"{AS_NOW}, in {MUON_STEPS:.0%} of the steps")
    if plan.islands:
        layout = plan.islands[0].layout
        yield Choice(islands(layout.islands, layout.sync_every), plan.islands[0], f"+{ISLANDS_LOST}")


def _now(job: Job, plan: Plan, setup: Setup | None) -> Choice:
    """Return what runs now. Sizes that the configuration leaves open are those that are fastest.

    Raises:
        ConfigError: The configuration does not fit the job.
    """
    if setup is None:
        plain = [one for one in plan.fitting if not (one.layout.compressed or one.layout.shard_within)]
        whole = [one for one in plain if one.layout.tensor == one.layout.pipeline == 1]
        best = min(whole or plain or plan.candidates, key=lambda one: one.days)
        return Choice(f"{NOW}: ZeRO {best.layout.zero}, uncompressed", best)
    micros = (setup.micro,) if setup.micro else MICRO_BATCHES
    layouts = Layouts(job.cluster, job.model, job.batch, job.engine, job.software.name == "hf", micros).plain()
    more: dict[str, Any] = {name: getattr(setup, name) for name in ("gradient_bits", "weight_bits", "offload")}
    found = [job.candidate(replace(layout, **more)) for layout in layouts if setup.allows(layout)]
    if not found:
        sizes = f"{job.cluster.gpus} GPUs with {job.batch} sequences per step"
        keys = "parallelism and train_micro_batch_size_per_gpu, or --gpus and --batch"
        raise ConfigError(f"--config: has no layout of {sizes}; correct its {keys}")
    return Choice(NOW, min(found, key=lambda one: (one.verdict == "does not fit", one.days)))


def _with_fewer_bits(job: Job, layout: Layout, widths: tuple[int, ...]) -> Iterator[Choice]:
    """Yield the same layout with gradients, and weights if they are sent as well, in fewer bits than now."""
    sends_weights = layout.zero and not layout.shard_within and not job.model.rank
    for bits in widths:
        # ZeRO 3 rounds the weights themselves, the others only their changes.
        weights = (8 if layout.zero == 3 else max(bits, 4)) if sends_weights else 0
        smaller = replace(layout, gradient_bits=bits, weight_bits=weights)
        more = bits > (layout.gradient_bits or bits) or weights > (layout.weight_bits or weights)
        if layout.data > 1 and smaller != layout and not more:
            yield Choice(in_bits(bits), job.candidate(smaller))


def _inside_nodes(job: Job, plan: Plan, zero: int) -> Iterator[Choice]:
    """Yield the fastest layouts that shard inside nodes, with fewer and fewer bits between them.

    A layout that surely fits into memory is preferred to one that is slightly faster. Names have the ZeRO stage if it
    is another one than `zero`, that of now.
    """
    for bits in (0, 4, 3):
        fits = (one for one in plan.fitting if one.layout.shard_within and one.layout.gradient_bits == bits)
        best = min(fits, key=lambda fit: fit.days * (1 if fit.verdict == "fits" else 1 + TIE), default=None)
        if best is not None:
            stage = f"ZeRO {best.layout.zero}, " * (best.layout.zero != zero)
            yield Choice(stage + inside_nodes(bits), best)


def packing_gain(job: Job, candidate: Candidate) -> float:
    """Return how many times as many tokens per second would train if documents were packed in place of padded.

    Each micro-batch computes as many tokens as before, in sequences of the documents' length for attention.
    """
    layout, length = candidate.layout, job.mean_length
    packed = replace(layout, micro=max(1, round(layout.micro * job.seq / length)))
    rate = replace(job, seq=length, mean_length=0).candidate(packed).prediction.rate
    return rate / (job.trained * candidate.prediction.rate)


def better_batch(job: Job, plan: Plan) -> tuple[int, float] | None:
    """Return the better of the two round batches next to that of the job, and its gain in tokens per second.

    None if the batch is round, or neither gains `WORTH`. Only the fastest layouts are predicted again.
    """
    unit = ROUND * job.cluster.gpus
    below = job.batch // unit * unit
    nearby = [batch for batch in (below, below + unit) if 0.5 <= batch / job.batch <= 2]
    if below == job.batch or not nearby:
        return None
    rates = {batch: max(_rates(job, plan, batch), default=0.0) for batch in nearby}
    best = max(rates, key=rates.__getitem__)
    gain = rates[best] / plan.candidates[0].prediction.rate - 1
    return (best, gain) if gain > WORTH else None


def _rates(job: Job, plan: Plan, batch: int) -> Iterator[float]:
    """Yield the tokens per second of the fastest layouts with another batch, in all micro-batches that fit."""
    fastest = [candidate.layout for candidate in plan.candidates[:TRIED]]
    for layout, micro in product(fastest, MICRO_BATCHES):
        count, left = divmod(batch, layout.data * micro)
        if left or count < layout.pipeline or (layout.virtual > 1 and count % layout.pipeline):
            continue
        found = job.candidate(replace(layout, micro=micro, accumulation=count))
        if found.verdict != "does not fit":
            yield found.prediction.rate


@dataclass(frozen=True, slots=True)
class Kind:
    """GPUs of one kind in a job.

    Attributes:
        gpu: Type of the GPUs.
        seconds: Seconds in which a replica of these GPUs computes one sequence.
        sequences: Sequences of a step for a replica with which all kinds compute for the same time.
    """

    gpu: Gpu
    seconds: float
    sequences: float


def divide(job: Job, candidate: Candidate) -> tuple[list[Kind], float]:
    """Divide the batch of a layout without a pipeline so that all replicas compute for the same time.

    Returns:
        The kinds of GPUs, the slowest first, and the largest factor by which a step becomes shorter, if no message gets
        in the way.
    """
    layout, replicas = candidate.layout, []
    for gpu, count in job.cluster.kinds:
        device = replace(job, cluster=replace(job.cluster, gpu=gpu)).device
        batch = micro_batch(device, job.model, job.seq, layout)
        replicas.append(((batch.forward + batch.backward) / layout.micro, count, gpu))
    replicas.sort(key=lambda replica: -replica[0])
    together = layout.tensor * job.batch / sum(count / seconds for seconds, count, _ in replicas)
    idle = 1 + job.device.issued(job.software.idle)
    saved = idle * (replicas[0][0] * job.batch / layout.data - together)
    step = candidate.prediction.seconds
    return [Kind(gpu, seconds, together / seconds) for seconds, _, gpu in replicas], step / (step - saved)


def fastest_alone(job: Job, plan: Plan) -> tuple[float, Cluster] | None:
    """Return how many times as fast the best kind trains without the others, and its GPUs.

    None if the model fits into the memory of no kind alone.
    """
    parts = [replace(job.cluster, gpu=gpu, gpus=count, kinds=()) for gpu, count in job.cluster.kinds]
    found = ((search(replace(job, cluster=part)).candidates, part) for part in parts)
    gains = [(plan.candidates[0].days / candidates[0].days, part) for candidates, part in found if candidates]
    return max(gains, key=lambda gain: gain[0], default=None)
