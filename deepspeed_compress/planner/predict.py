"""A prediction: the step, its interval, and the memory of one layout."""

from dataclasses import dataclass, field

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.links import Links
from deepspeed_compress.planner.memory import Memory, needed_memory
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.schedule import MicroBatch, micro_batch, step_terms
from deepspeed_compress.planner.software import Software
from deepspeed_compress.planner.term import Term

SPREAD = {"compute": 0.05, "memory": 0.10, "launch": 0.4, "bubble": 0.10, "network": 0.25}
"""Relative standard error of a term by its kind; other links have that of `LINK_SPREAD`."""
LINK_SPREAD = 0.15
COMMON = {"A100-80": 0.07}
"""Relative standard error of a whole step on a GPU with fitted constants; others have `SCALED`."""
SCALED = 0.10
QUANTILE = 1.28
"""Standard errors on each side of an interval that holds in 80 % of the cases."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Predicted step of a layout."""

    layout: Layout
    terms: tuple[Term, ...]
    memory: Memory
    tokens: int
    gpu: str

    @property
    def seconds(self) -> float:
        """Seconds of a step."""
        return sum(term.seconds for term in self.terms)

    @property
    def error(self) -> float:
        """Relative standard error: a part that all layouts share, and that of each term."""
        each = sum((SPREAD.get(term.kind, LINK_SPREAD) * term.seconds) ** 2 for term in self.terms)
        common = COMMON.get(self.gpu, SCALED)
        return float((common**2 + each / self.seconds**2) ** 0.5)

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
    constants: Constants = Constants()
    _batches: dict[tuple[object, ...], MicroBatch] = field(default_factory=dict)

    def predict(self, layout: Layout, memory: Memory | None = None) -> Prediction:
        """Return the prediction of a layout."""
        terms = step_terms(self.links, self.device, self.model, self.seq, layout, self._batch(layout))
        memory = memory or self.memory(layout)
        return Prediction(layout, tuple(terms), memory, layout.batch * self.seq, self.cluster.gpu.name)

    def memory(self, layout: Layout) -> Memory:
        """Return the memory that a layout needs."""
        return needed_memory(self.model, self.software, self.seq, layout)

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
        key = (layout.tensor, layout.pipeline, layout.micro, layout.recompute, layout.sequence_parallel)
        key += (layout.zero == 3, layout.accumulation > 1, layout.engine)
        if key not in self._batches:
            self._batches[key] = micro_batch(self.device, self.model, self.seq, layout)
        return self._batches[key]
