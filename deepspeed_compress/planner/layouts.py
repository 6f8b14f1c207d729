"""All layouts of a model on a cluster, and why others are refused."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from deepspeed_compress.model_families import FAMILIES
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.layout import Engine, Layout, Recompute
from deepspeed_compress.planner.learning import DILOCO
from deepspeed_compress.planner.model import Model

MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
GRADIENT_BITS = (0, 8, 4, 3)
WEIGHT_BITS = (0, 8, 4)
SYNC_EVERY = 30
"""Steps between exchanges of islands, for which both the law and our own runs hold."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Enumeration of layouts for a batch of `batch` sequences.

    Attributes:
        cluster: GPUs and network.
        model: Model to train.
        batch: Sequences of a step.
        engine: Program that starts the layouts. Layouts that only Megatron can start are enumerated for DeepSpeed, too.
        is_trainer: Whether the program is Hugging Face's Trainer.
        refused: Number of refused divisions by reason, counted while they are enumerated.
    """

    cluster: Cluster
    model: Model
    batch: int
    engine: Engine = "deepspeed"
    is_trainer: bool = False
    refused: Counter[str] = field(default_factory=Counter)

    def plain(self) -> Iterator[Layout]:
        """Yield the layouts without compression that DeepSpeed or Megatron can start."""
        for tensor in _divisors(self.cluster.gpus):
            for pipeline in _divisors(self.cluster.gpus // tensor):
                reason = self._refusal(tensor, pipeline)
                if reason:
                    self.refused[reason] += 1
                else:
                    yield from self._batches(tensor, pipeline)

    def compressed(self, layout: Layout) -> Iterator[Layout]:
        """Yield the variants of a layout that send fewer bytes between replicas. Islands need DeepSpeed."""
        if layout.engine != self.engine or layout.data == 1:
            return
        # Frozen weights travel exactly, and those of adapters are few.
        weights = WEIGHT_BITS if layout.zero and not layout.shard_within and not self.model.rank else (0,)
        for gradient_bits in GRADIENT_BITS:
            for weight_bits in weights:
                if gradient_bits or weight_bits:
                    yield replace(layout, gradient_bits=gradient_bits, weight_bits=weight_bits)
        may_have_islands = layout.pipeline == 1 and layout.zero and not layout.shard_within and not self.model.rank
        if self.engine == "deepspeed" and may_have_islands:
            yield from self._islands(layout)

    def _refusal(self, tensor: int, pipeline: int) -> str | None:
        model, divided, per_node = self.model, max(tensor, pipeline) > 1, self.cluster.per_node
        stage = self.cluster.gpus // pipeline
        if divided and model.rank:
            return "LoRA is predicted without tensor and pipeline ranks"
        if per_node % tensor:
            return "tensor ranks do not share a node"
        if per_node % stage and stage % per_node:
            return "stages do not fill nodes"
        if divided and model.experts > 1:
            return "DeepSpeed's experts exclude tensor and pipeline ranks"
        if divided and FAMILIES[model.family].modules is None:
            return f'the family "{model.family}" cannot be divided'
        if model.heads % tensor or model.kv_heads % tensor:
            return "tensor ranks do not divide the heads"
        if pipeline > model.layers:
            return "more stages than layers"
        if self.batch % (stage // tensor):
            return "replicas do not divide the batch"
        return None

    def _batches(self, tensor: int, pipeline: int) -> Iterator[Layout]:
        data = self.cluster.gpus // tensor // pipeline
        for micro in MICRO_BATCHES:
            if self.batch % (data * micro):
                continue
            count = self.batch // (data * micro)
            if pipeline > 1 and count < pipeline:
                self.refused["fewer micro-batches than stages"] += 1
                continue
            if self.engine == "deepspeed":
                yield from self._of_deepspeed(Layout(tensor, pipeline, data, 0, micro, count))
            yield from self._of_megatron(Layout(tensor, pipeline, data, 0, micro, count, engine="megatron"))

    def _of_deepspeed(self, layout: Layout) -> Iterator[Layout]:
        if self.is_trainer and (layout.pipeline > 1 or (layout.tensor > 1 and self.model.family == "gpt2")):
            self.refused["Trainer has neither pipelines nor tensor ranks of GPT-2"] += 1
            return
        node = self.cluster.per_node // layout.tensor
        for zero in range(4):
            if zero > 1 and layout.pipeline > 1:
                self.refused["ZeRO 2 and 3 exclude pipelines"] += 1
                continue
            if zero and layout.data == 1:
                continue
            for recompute in _RECOMPUTE:
                found = replace(layout, zero=zero, recompute=recompute)
                yield found
                if zero and layout.pipeline == 1 and 1 < node < layout.data and layout.data % node == 0:
                    yield replace(found, shard_within=node)

    def _of_megatron(self, layout: Layout) -> Iterator[Layout]:
        """Yield layouts with interleaved stages or sequence parallelism, which only Megatron has."""
        if layout.pipeline == layout.tensor == 1 and self.engine != "megatron":
            return
        if self.model.rank or self.model.experts > 1 or self.model.layers % layout.pipeline:
            self.refused[
                "Megatron is predicted without LoRA and experts, and with equally many layers in all stages"
            ] += 1
            return
        for virtual in _interleavings(self.model.layers, layout):
            for recompute in ("none", "selective", "full"):
                yield replace(
                    layout,
                    zero=1 if layout.data > 1 else 0,
                    virtual=virtual,
                    recompute=recompute,
                    sequence_parallel=layout.tensor > 1,
                )

    def _islands(self, layout: Layout) -> Iterator[Layout]:
        """Yield islands of whole nodes. In islands of one replica, all ZeRO stages are alike."""
        for islands in DILOCO:
            size, left = divmod(layout.data, islands)
            if islands == 1 or left or (size == 1 and layout.zero > 1):
                continue
            if size * layout.tensor % self.cluster.per_node == 0:
                yield replace(layout, islands=islands, sync_every=SYNC_EVERY)


_RECOMPUTE: tuple[Recompute, ...] = ("none", "full")


def _interleavings(layers: int, layout: Layout) -> list[int]:
    """Return 1 and the largest number of interleaved stages up to 6."""
    if layout.pipeline == 1 or layers % layout.pipeline or layout.accumulation % layout.pipeline:
        return [1]
    own = layers // layout.pipeline
    return sorted({1, max(count for count in range(1, 7) if own % count == 0)})


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})
