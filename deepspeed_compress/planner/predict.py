"""A prediction: the step, its interval, and the memory of one layout."""

from dataclasses import dataclass, field, replace

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.gpus import CALIBRATED_GPU
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.links import Links
from deepspeed_compress.planner.memory import Memory, Needs
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.schedule import MicroBatch, micro_batch, step_terms
from deepspeed_compress.planner.software import Software
from deepspeed_compress.planner.term import Term

SPREAD = {"compute": 0.05, "memory": 0.10, "launch": 0.4, "bubble": 0.10, "network": 0.25}
"""Relative standard error of a term by its kind; other links have that of `LINK_SPREAD`."""
LINK_SPREAD = 0.15
FITTED_GPU, SCALED_GPU = 0.07, 0.09
"""Relative standard error of a whole step on the GPU of the fit, and on one whose constants are scaled from it."""
PROGRAMS = {"megatron": 0.0, "megatron-deepspeed": 0.08, "fsdp": 0.08, "deepspeed": 0.12, "hf": 0.15}
"""The same by program. None but Megatron was in the fit."""
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


@dataclass(frozen=True, slots=True)
class Predictor:
    """Predicts layouts of one model on one cluster. Work that layouts share is computed once."""

    cluster: Cluster
    model: Model
    software: Software
    seq: int
    constants: Constants = field(default_factory=Constants)
    _batches: dict[Layout, MicroBatch] = field(default_factory=dict)

    def predict(self, layout: Layout) -> Prediction:
        """Return the prediction of a layout."""
        terms = step_terms(self.links, self.device, self.model, self.seq, layout, self._batch(layout))
        return Prediction(layout, tuple(terms), self.memory(layout), layout.batch * self.seq, self._common)

    @property
    def _common(self) -> float:
        gpu = FITTED_GPU if self.cluster.gpu.name == CALIBRATED_GPU else SCALED_GPU
        return float((gpu**2 + PROGRAMS[self.software.name] ** 2) ** 0.5)

    def memory(self, layout: Layout) -> Memory:
        """Return the memory that a layout needs."""
        return Needs(self.cluster, self.model, self.software, self.seq, layout).fullest()

    @property
    def links(self) -> Links:
        """Links of the cluster."""
        return Links(self.cluster, self.constants)

    @property
    def device(self) -> Device:
        """GPU with constants and program."""
        return Device(self.cluster.gpu, self.constants, self.software)

    def _batch(self, layout: Layout) -> MicroBatch:
        """Return the work of a micro-batch, which does not depend on messages between replicas."""
        key = replace(layout, data=1, zero=3 * (layout.zero == 3), accumulation=min(layout.accumulation, 2), virtual=1)
        key = replace(key, shard_within=0, gradient_bits=0, weight_bits=0, islands=1, sync_every=1)
        if key not in self._batches:
            self._batches[key] = micro_batch(self.device, self.model, self.seq, layout)
        return self._batches[key]
