"""Ranking of all layouts by the days that a training run takes."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.constants import CALIBRATED, Constants
from deepspeed_compress.planner.gpus import CALIBRATED_GPU
from deepspeed_compress.planner.layout import Engine, Layout
from deepspeed_compress.planner.layouts import Layouts
from deepspeed_compress.planner.learning import extra_tokens, loss_gap, outside
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.predict import Prediction, Predictor, Verdict
from deepspeed_compress.planner.software import SOFTWARE, Software

TIE = 0.05
"""Relative difference of days within which layouts should be measured: most of the error is common to all of them."""
HOPELESS = 1.5
"""Factor of the best days above which a layout's computation alone rules it out."""
GAIN = 0.01
"""Relative gain below which compression of gradients, of weights, or islands are not worth their settings."""
TOO_LARGE = "does not fit into memory"
"""Reason why a layout is refused."""
_DAY = 86400.0


@dataclass(frozen=True, slots=True)
class Candidate:
    """A ranked layout.

    Attributes:
        prediction: Its step.
        extra: Share of additional tokens for what compression and islands cost in loss.
        days: Days of the whole run.
        verdict: Whether it fits into memory.
    """

    prediction: Prediction
    extra: float
    days: float
    verdict: Verdict

    @property
    def layout(self) -> Layout:
        """The layout."""
        return self.prediction.layout


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of a search.

    Attributes:
        candidates: The best layout of each kind that the program can start, without islands, fastest first.
        islands: The same with islands, which train in another way.
        others: The same for layouts that only Megatron can start.
        fitting: All candidates that the program can start and that fit into memory, in no order.
        considered: Number of predicted layouts.
        refused: Number of refused layouts by reason.
    """

    candidates: tuple[Candidate, ...]
    islands: tuple[Candidate, ...]
    others: tuple[Candidate, ...]
    fitting: tuple[Candidate, ...]
    considered: int
    refused: Counter[str]

    @property
    def recommended(self) -> Candidate:
        """The first of the fastest that surely fits into memory; the fastest if none does."""
        tied = (one for one in self.candidates if self.is_tied(one) and one.verdict == "fits")
        return next(tied, self.candidates[0])

    def is_tied(self, candidate: Candidate) -> bool:
        """Return True if the prediction cannot tell this candidate from the fastest."""
        return candidate.days <= self.candidates[0].days * (1 + TIE)


@dataclass(frozen=True, slots=True)
class Job:
    """Job that is planned: a model, a cluster, a batch of sequences, and the tokens of the run.

    `constants` are those of the prediction, fitted to published runs or to measurements on this cluster.
    """

    cluster: Cluster
    model: Model
    software: Software
    seq: int
    batch: int
    tokens: float
    constants: Constants = field(default_factory=Constants)

    @property
    def engine(self) -> Engine:
        """Program that starts the job."""
        return "megatron" if self.software.name == "megatron" else "deepspeed"

    def predictor(self, layout: Layout) -> Predictor:
        """Return the predictor of the program that starts `layout`."""
        software = self.software if layout.engine == self.engine else _megatron(self.software)
        return Predictor(self.cluster, self.model, software, self.seq, self.constants)

    def candidate(self, prediction: Prediction) -> Candidate:
        """Return the days of a predicted layout."""
        gap = loss_gap(prediction.layout, self.model.parameters)
        extra = extra_tokens(gap, self.model.parameters, self.tokens)
        days = self.tokens * (1 + extra) / prediction.rate / _DAY
        return Candidate(prediction, extra, days, prediction.memory.verdict(self.cluster.gpu.memory))

    def outside(self, layout: Layout) -> Iterator[str]:
        """Yield what of this job lies outside of the runs that the model was fitted to."""
        if self.constants == Constants():
            yield from self._outside_of_published()
        yield from outside(layout, self.model.parameters)

    def _outside_of_published(self) -> Iterator[str]:
        if self.cluster.gpu.name != CALIBRATED_GPU:
            yield f"{self.cluster.gpu.name}: scaled from {CALIBRATED_GPU}"
        if self.software.name != CALIBRATED.software:
            yield f"steps of {self.software.name} (fitted: those of {CALIBRATED.software})"
        if self.model.experts > 1:
            yield "experts (fitted: dense models)"
        low, high = CALIBRATED.parameters
        if not low <= self.model.parameters <= high:
            yield f"{self.model.parameters / 1e9:.3g}B parameters (fitted: {low / 1e9:g}B to {high / 1e9:g}B)"
        if self.cluster.gpus > CALIBRATED.gpus:
            yield f"{self.cluster.gpus:,} GPUs (fitted: up to {CALIBRATED.gpus:,})"
        if self.cluster.nodes > 1 and self.cluster.network < CALIBRATED.network:
            yield f"network below {CALIBRATED.network * 8e-9:,.0f} Gbit/s per node"


def _megatron(software: Software) -> Software:
    return replace(SOFTWARE["megatron"], attention=software.attention)


def search(job: Job) -> Plan:
    """Return the best layouts for a job: first all without compression, then the variants of the promising ones."""
    layouts = Layouts(job.cluster, job.model, job.batch, job.engine, job.software.name == "hf")
    predictors: dict[str, Predictor] = {}
    found = [job.candidate(predictors[plain.engine].predict(plain)) for plain in _fitting(job, layouts, predictors)]
    considered = len(found)
    limit = HOPELESS * min((one.days for one in found if one.layout.engine == job.engine), default=0.0)
    for one in [one for one in found if _computing_days(one) <= limit]:
        variants = [job.candidate(predictors[job.engine].predict(layout)) for layout in layouts.compressed(one.layout)]
        considered += len(variants)
        found += [variant for variant in variants if variant.verdict != "does not fit"]
    best = _best_of_each_kind(found)
    startable, others = _startable(best, job), tuple(one for one in best if one.layout.engine != job.engine)
    alike, islands = (tuple(one for one in startable if (one.layout.islands > 1) == apart) for apart in (False, True))
    return Plan(alike, islands, others, _startable(found, job), considered, layouts.refused)


def _startable(found: Iterable[Candidate], job: Job) -> tuple[Candidate, ...]:
    return tuple(one for one in found if one.layout.engine == job.engine)


def _fitting(job: Job, layouts: Layouts, predictors: dict[str, Predictor]) -> Iterator[Layout]:
    """Yield the layouts that fit into memory without compression, and count the others."""
    for layout in layouts.plain():
        if layout.engine not in predictors:
            predictors[layout.engine] = job.predictor(layout)
        memory = predictors[layout.engine].memory(layout)
        if memory.verdict(job.cluster.gpu.memory) == "does not fit":
            layouts.refused[TOO_LARGE] += 1
        else:
            yield layout


def _computing_days(candidate: Candidate) -> float:
    """Return the days of a layout if all its messages between replicas took no time."""
    kinds = ("compute", "memory", "launch", "bubble")
    return candidate.days * sum(candidate.prediction.share(kind) for kind in kinds)


def _best_of_each_kind(found: Iterable[Candidate]) -> list[Candidate]:
    """Return the fastest candidate of each kind, sorted. Kinds differ in what one would have to start differently.

    Variants with compression or islands are left out unless they gain `GAIN` for each thing that they compress.
    """
    best: dict[tuple[object, ...], Candidate] = {}
    for one in found:
        kind = (*_division(one.layout), one.layout.islands, one.layout.compressed)
        if kind not in best or _handicapped(one) < _handicapped(best[kind]):
            best[kind] = one
    plain = {_division(one.layout): one for one in best.values() if not one.layout.compressed}
    worth = (one for one in best.values() if _handicapped(one) <= plain[_division(one.layout)].days)
    return sorted(worth, key=lambda one: one.days)


def _division(layout: Layout) -> tuple[object, ...]:
    return (layout.engine, layout.tensor, layout.pipeline, layout.zero, layout.shard_within)


def _handicapped(candidate: Candidate) -> float:
    layout = candidate.layout
    return candidate.days * (1 + GAIN * sum((layout.gradient_bits > 0, layout.weight_bits > 0, layout.islands > 1)))


@dataclass(frozen=True, slots=True)
class Turn:
    """Change of the cluster from which on another layout wins.

    Attributes:
        what: Description of the change.
        factor: Factor by which it must change.
    """

    what: str
    factor: float


_CHANGES: Mapping[str, Callable[[Cluster, float], Cluster]] = {
    "the network": lambda cluster, factor: replace(cluster, network=cluster.network * factor),
    "links inside nodes": lambda cluster, factor: _with_gpu(cluster, link_rate=factor),
    "matrix products": lambda cluster, factor: _with_gpu(cluster, peak=factor),
    "memory": lambda cluster, factor: _with_gpu(cluster, memory_rate=factor),
}


def _with_gpu(cluster: Cluster, link_rate: float = 1.0, peak: float = 1.0, memory_rate: float = 1.0) -> Cluster:
    """Return `cluster` with the rates of its GPUs multiplied by these factors."""
    gpu = cluster.gpu
    faster = replace(
        gpu, link_rate=gpu.link_rate * link_rate, peak=gpu.peak * peak, memory_rate=gpu.memory_rate * memory_rate
    )
    return replace(cluster, gpu=faster)


def turns(job: Job, first: Layout, second: Layout) -> Iterator[Turn]:
    """Yield the smallest changes of a rate, up to 4 times, from which on `second` is faster than `first`."""
    for what, change in _CHANGES.items():
        for direction in (2.0, 0.5):
            factor = _crossing(Race(job, change, first, second), direction)
            if factor is not None:
                yield Turn(what, factor)


@dataclass(frozen=True, slots=True)
class Race:
    """Two layouts on clusters that differ by one rate."""

    job: Job
    change: Callable[[Cluster, float], Cluster]
    first: Layout
    second: Layout

    def lead(self, factor: float) -> float:
        """Return the days by which the first is ahead if the rate is `factor` times as high."""
        job = replace(self.job, cluster=self.change(self.job.cluster, factor))
        one, two = (job.candidate(job.predictor(layout).predict(layout)) for layout in (self.first, self.second))
        return two.days - one.days


def _crossing(race: Race, direction: float) -> float | None:
    """Return the factor at which the lead ends, between 1 and the square of `direction`, or None."""
    near, far = 1.0, direction
    while race.lead(far) > 0:
        if far == direction**2:
            return None
        near, far = far, far * direction
    for _ in range(10):
        middle = (near * far) ** 0.5
        near, far = (middle, far) if race.lead(middle) > 0 else (near, middle)
    return far
