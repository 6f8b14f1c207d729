"""Ranking of all layouts by the days that a training run takes, with the additional tokens that it needs.

A gap in loss by compression or islands becomes a share of additional tokens by the slope of the loss curve of
2203.15556 (Chinchilla, approach 3), at the run's own sizes: at 20 tokens per parameter, 0.1 % of the loss are about
2.5 % of the tokens.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from deepspeed_compress.planner.cluster import Cluster, Links
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.gpus import CALIBRATED_GPU, Constants
from deepspeed_compress.planner.layout import Engine, Layout, Layouts, with_offload
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.predict import Memory, Needs, Prediction, Verdict, common_error
from deepspeed_compress.planner.schedule import MicroBatch, micro_batch, step_terms
from deepspeed_compress.planner.software import Software

TIE = 0.05
"""Relative difference of days within which layouts should be measured: most of the error is common to all of them."""
HOPELESS = 1.5
"""Factor of the best days above which a layout's computation alone rules it out."""
GAIN = 0.01
"""Relative gain below which compression of gradients, of weights, or islands are not worth their settings."""
TOO_LARGE = "does not fit into memory"
"""Reason why a layout is refused."""
_DAY = 86400.0


FITTED_PARAMETERS, FITTED_GPUS, FITTED_NETWORK = (1.6e9, 1.02e12), 3072, 200e9
"""Range of the 18 runs of `launch/studies/published_steps.csv`, whose nodes have eight cards of 200 Gbit/s."""


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
        candidates: The best layout of each kind without islands, fastest first.
        islands: The same with islands, which train in another way.
        fitting: All candidates that fit into memory, in no order.
        refused: Number of refused layouts by reason.
    """

    candidates: tuple[Candidate, ...]
    islands: tuple[Candidate, ...]
    fitting: tuple[Candidate, ...]
    refused: Counter[str]

    @property
    def recommended(self) -> Candidate:
        """The first of the fastest that surely fits into memory; the fastest if none does."""
        tied = (candidate for candidate in self.candidates if self.is_tied(candidate) and candidate.verdict == "fits")
        return next(tied, self.candidates[0])

    def is_tied(self, candidate: Candidate) -> bool:
        """Return True if the prediction cannot tell this candidate from the fastest."""
        return candidate.days <= self.candidates[0].days * (1 + TIE)


@dataclass(frozen=True, slots=True)
class Job:
    """Job that is planned: a model, a cluster, a batch of sequences, and the tokens of the run.

    `constants` are those of the prediction, fitted to published runs or to measurements on this cluster, and
    `corrections` the factors of the seconds of layouts that are left for those of measured kinds. If documents are
    padded to `seq` tokens, `mean_length` is their mean length, else 0.
    """

    cluster: Cluster
    model: Model
    software: Software
    seq: int
    batch: int
    tokens: float
    constants: Constants = field(default_factory=Constants)
    corrections: Mapping[tuple[int, int, bool], float] = field(default_factory=dict)
    mean_length: int = 0
    _batches: dict[Layout, MicroBatch] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def links(self) -> Links:
        """Links of the cluster."""
        return Links(self.cluster, self.constants)

    @property
    def device(self) -> Device:
        """GPU with constants and program."""
        return Device(self.cluster.gpu, self.constants, self.software)

    @property
    def trained(self) -> float:
        """Share of the computed tokens that train; the others are padding."""
        return self.mean_length / self.seq if self.mean_length else 1.0

    @property
    def engine(self) -> Engine:
        """Program that starts the job."""
        return "megatron" if self.software.name == "megatron" else "deepspeed"

    def predict(self, layout: Layout) -> Prediction:
        """Return the prediction of a layout's step."""
        terms = step_terms(self.links, self.device, self.model, self.seq, layout, self._batch(layout))
        factor = self.corrections.get(layout.kind, 1.0)
        terms = [replace(term, seconds=factor * term.seconds) for term in terms]
        common = common_error(self.cluster.gpu.name, self.software.name, self.constants)
        return Prediction(layout, tuple(terms), self.memory(layout), layout.batch * self.seq, common)

    def memory(self, layout: Layout) -> Memory:
        """Return the memory that a layout needs."""
        return Needs(self.cluster, self.model, self.software, self.seq, layout).fullest()

    def _batch(self, layout: Layout) -> MicroBatch:
        """Return the work of a micro-batch, computed once for layouts that differ in messages between replicas."""
        key = replace(layout, data=1, zero=3 * (layout.zero == 3), accumulation=min(layout.accumulation, 2), virtual=1)
        key = replace(key, shard_within=0, gradient_bits=0, weight_bits=0, islands=1, sync_every=1)
        if key not in self._batches:
            self._batches[key] = micro_batch(self.device, self.model, self.seq, layout)
        return self._batches[key]

    def candidate(self, layout: Layout) -> Candidate:
        """Return the prediction of a layout with the days of the run."""
        prediction = self.predict(layout)
        gap = loss_gap(layout, self.model.parameters)
        extra = extra_tokens(gap, self.model.parameters, self.tokens)
        steps = MUON_STEPS if layout.optimizer == "Muon" else 1.0
        days = steps * self.tokens * (1 + extra) / (self.trained * prediction.rate) / _DAY
        return Candidate(prediction, extra, days, prediction.memory.verdict(self.cluster.gpu.memory))

    def outside(self, layout: Layout) -> Iterator[str]:
        """Yield what of this job lies outside of the runs that the model was fitted to."""
        if self.constants == Constants():
            yield from self._outside_of_published()
        parameters = self.model.parameters
        if (layout.gradient_bits or layout.weight_bits) and parameters > MEASURED:
            yield f"loss with compression: measured up to {MEASURED / 1e6:g}M parameters"
        if layout.islands > 1 and not DILOCO_RANGE[0] <= parameters <= DILOCO_RANGE[1]:
            yield "loss with islands: the law holds from 35M to 10B parameters"

    def _outside_of_published(self) -> Iterator[str]:
        if self.cluster.gpu.name != CALIBRATED_GPU:
            yield f"{self.cluster.gpu.name}: scaled from {CALIBRATED_GPU}"
        if self.software.name != "megatron":
            yield f"steps of {self.software.name} (fitted: those of megatron)"
        if self.model.experts > 1:
            yield "experts (fitted: dense models)"
        low, high = FITTED_PARAMETERS
        if not low <= self.model.parameters <= high:
            yield f"{self.model.parameters / 1e9:.3g}B parameters (fitted: {low / 1e9:g}B to {high / 1e9:g}B)"
        if self.cluster.gpus > FITTED_GPUS:
            yield f"{self.cluster.gpus:,} GPUs (fitted: up to {FITTED_GPUS:,})"
        if self.cluster.nodes > 1 and self.cluster.network < FITTED_NETWORK:
            yield f"network below {FITTED_NETWORK * 8e-9:,.0f} Gbit/s per node"


def search(job: Job) -> Plan:
    """Return the best layouts for a job: first all without compression, then the variants of the promising ones.

    States that are larger than a GPU are in the memory of the host, if they fit there.
    """
    layouts = Layouts(job.cluster, job.model, job.batch, job.engine, job.software.name == "hf")
    found = [job.candidate(plain) for plain in layouts.plain()]
    large = (one.layout for one in found if one.prediction.memory.states > job.cluster.gpu.memory)
    found += [job.candidate(layout) for layout in with_offload(large)]
    fitting = [one for one in found if one.verdict != "does not fit"]
    layouts.refused.update(TOO_LARGE for one in found if one.verdict == "does not fit")
    limit = HOPELESS * min((one.days for one in fitting), default=0.0)
    for one in list(fitting):
        # All its messages between replicas might take no time.
        computing = sum(map(one.prediction.share, ("compute", "memory", "launch", "bubble")))
        if one.days * computing > limit:
            continue
        variants = [job.candidate(layout) for layout in layouts.compressed(one.layout)]
        fitting += [variant for variant in variants if variant.verdict != "does not fit"]
    best = _best_of_each_kind(fitting)
    alike, islands = (tuple(one for one in best if (one.layout.islands > 1) == apart) for apart in (False, True))
    return Plan(alike, islands, tuple(fitting), layouts.refused)


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
    return (layout.tensor, layout.pipeline, layout.zero, layout.shard_within, layout.offload)


def _handicapped(candidate: Candidate) -> float:
    layout = candidate.layout
    return candidate.days * (1 + GAIN * sum((layout.gradient_bits > 0, layout.weight_bits > 0, layout.islands > 1)))


GRADIENT_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0004, 3: 0.0035}
"""Relative increase of the loss by bits of gradients (docs/methods.md, "Measured": at most 10.5M parameters)."""
DIFFERENCE_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0}
"""The same for updated weights, whose differences are sent (ZeRO 1 and 2)."""
WEIGHT_GAPS: Mapping[int, float] = {0: 0.0, 8: 0.0, 4: 0.0043}
"""The same for gathered weights, which are rounded (ZeRO 3; docs/results.md, "Loss")."""
DILOCO: Mapping[int, tuple[float, float]] = {
    1: (18.129, -0.0953),
    2: (18.768, -0.0969),
    4: (19.762, -0.0992),
    8: (21.051, -0.1018),
}
"""Factor and exponent of loss = factor x parameters ^ exponent, by islands (2503.09799, exchanges every 30 steps)."""
ISLANDS_LOST = "2 to 7 %"
"""Increase of the loss by islands that exchange every 30 steps in our own runs (docs/results.md, "Islands")."""
MUON_STEPS = 0.54
"""Share of AdamW's steps that Muon needs for the same loss (docs/results.md, "Muon": 10.5M parameters)."""
DILOCO_RANGE = (35e6, 10e9)
"""Parameters for which that law was measured or checked."""
MEASURED = 10.5e6
"""Parameters of the largest model whose gap by compression was measured here."""


def extra_tokens(gap: float, parameters: float, tokens: float) -> float:
    """Return the share of additional tokens that makes up for a relative increase `gap` of the loss."""
    of_size, of_data = 406.4 / parameters**0.34, 410.7 / tokens**0.28
    return math.expm1(gap * (1.69 + of_size + of_data) / (0.28 * of_data))


def loss_gap(layout: Layout, parameters: float) -> float:
    """Return the relative increase of the loss that compression and islands cause."""
    weights = (WEIGHT_GAPS if layout.zero == 3 else DIFFERENCE_GAPS)[layout.weight_bits]
    (factor, exponent), (alone, decay) = DILOCO[layout.islands], DILOCO[1]
    islands = factor / alone * math.pow(parameters, exponent - decay) - 1
    return GRADIENT_GAPS[layout.gradient_bits] + weights + max(0.0, islands)


def critical_batch(tokens: float) -> float:
    """Return the tokens of a step beyond which larger batches need many more tokens (2505.13738)."""
    return float(2048 * 0.0471 * tokens**0.462)
