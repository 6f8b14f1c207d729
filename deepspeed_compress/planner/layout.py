"""A layout: how a job divides its model, its batch and its messages; and what each of its pipeline stages holds."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from deepspeed_compress.model_families import FAMILIES
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.model import Model

Recompute = Literal["none", "full", "selective"]
Engine = Literal["deepspeed", "megatron"]
Optimizer = Literal["AdamW", "Muon"]
Offload = Literal["none", "optimizer", "all"]
"""Content of the host's memory: nothing, optimizer states, or optimizer states and weights (ZeRO 3)."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Division of a job over its ranks.

    Attributes:
        tensor: Ranks that share each layer.
        pipeline: Pipeline stages.
        data: Replicas. The product of the three is the number of ranks.
        zero: ZeRO stage.
        micro: Sequences of a micro-batch.
        accumulation: Micro-batches of a step.
        recompute: Activations that are computed again in backward.
        virtual: Interleaved stages per rank (Megatron only).
        sequence_parallel: Whether norms are split over tensor ranks, too (Megatron only).
        shard_within: Replicas that ZeRO shards over, or 0 for all (hybrid sharding).
        gradient_bits: Bits of gradients between ranks, or 0 for uncompressed ones.
        weight_bits: Bits of gathered weights, or 0 for uncompressed ones.
        islands: Groups of replicas that train independently between exchanges.
        sync_every: Steps between exchanges of islands.
        offload: Content of the host's memory.
        engine: Program that can start it.
        optimizer: Optimizer of the matrices in layers.
    """

    tensor: int
    pipeline: int
    data: int
    zero: int
    micro: int
    accumulation: int
    recompute: Recompute = "none"
    virtual: int = 1
    sequence_parallel: bool = False
    shard_within: int = 0
    gradient_bits: int = 0
    weight_bits: int = 0
    islands: int = 1
    sync_every: int = 1
    offload: Offload = "none"
    engine: Engine = "deepspeed"
    optimizer: Optimizer = "AdamW"

    @property
    def ranks(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data

    @property
    def batch(self) -> int:
        """Sequences of a step."""
        return self.data * self.micro * self.accumulation

    @property
    def island_size(self) -> int:
        """Replicas of an island; all replicas without islands."""
        return self.data // self.islands

    @property
    def shards(self) -> int:
        """Replicas that ZeRO divides its states over."""
        return self.shard_within or self.island_size

    @property
    def compressed(self) -> bool:
        """True if any message is compressed."""
        return bool(self.gradient_bits or self.weight_bits or self.islands > 1)

    @property
    def kind(self) -> tuple[int, int, bool]:
        """ZeRO stage, sharding within nodes, and compression: layouts that agree in these err alike."""
        return self.zero, self.shard_within, self.compressed

    def __str__(self) -> str:
        parts = [f"zero{self.zero}", f"d{self.data}"]
        parts += [f"{letter}{size}" for letter, size in (("t", self.tensor), ("p", self.pipeline)) if size > 1]
        parts += [f"v{self.virtual}"] * (self.virtual > 1) + [f"node{self.shard_within}"] * bool(self.shard_within)
        parts += [f"b{self.micro}x{self.accumulation}"] + [self.recompute] * (self.recompute != "none")
        parts += [f"g{self.gradient_bits}"] * bool(self.gradient_bits) + [f"w{self.weight_bits}"] * bool(
            self.weight_bits
        )
        parts += [f"i{self.islands}every{self.sync_every}"] * (self.islands > 1)
        parts += [f"offload_{self.offload}"] * (self.offload != "none")
        parts += ["muon"] * (self.optimizer == "Muon")
        return "-".join(parts + ["megatron"] * (self.engine == "megatron"))


@dataclass(frozen=True, slots=True)
class Stage:
    """Share of a model on a rank of a pipeline stage.

    Attributes:
        layers: Decoder layers.
        parameters: Parameters of the rank.
        trained: Those of them that are trained: all, or the adapters.
        tied: Those of them that another stage holds, too: a tied embedding.
        has_head: Whether it computes the head.
        behind: Number of stages after it.
    """

    layers: int
    parameters: float
    trained: float
    tied: float
    has_head: bool
    behind: int


def stages(model: Model, layout: Layout) -> tuple[Stage, ...]:
    """Return the first stage, the one with most layers between the ends, and the last, as far as they exist."""
    return tuple(_stage(model, layout, number, layers) for number, layers in _layers(model, layout))


def largest_stage(model: Model, layout: Layout) -> Stage:
    """Return the stage with most parameters."""
    return max(stages(model, layout), key=lambda stage: stage.parameters)


def _stage(model: Model, layout: Layout, number: int, layers: int) -> Stage:
    is_first, is_last = number == 0, number == layout.pipeline - 1
    tied = model.vocab * model.hidden if model.tied and is_first != is_last else 0
    ends = model.embedding_parameters * is_first + (model.head_parameters + tied * (not is_first)) * is_last
    trained = (layers * model.trained_layer_parameters + (0 if model.rank else ends)) / layout.tensor
    # Adapters come on top of what is frozen.
    parameters = (layers * model.layer_parameters + ends) / layout.tensor + (trained if model.rank else 0)
    return Stage(layers, parameters, trained, tied / layout.tensor, is_last, layout.pipeline - 1 - number)


def _layers(model: Model, layout: Layout) -> Iterator[tuple[int, int]]:
    """Yield the numbers of stages and their layers: equally many in Megatron, equal work in `build_parallel`."""
    count = layout.pipeline
    last = model.layers if count == 1 else -(-model.layers // count)
    first = middle = last
    if layout.engine == "deepspeed" and count > 1:
        last = _last_layers(model, count)
        first, more = divmod(model.layers - last, count - 1)
        middle = first + (more > 0)
    yield 0, first
    if count > 2:
        yield 1, middle
    if count > 1:
        yield count - 1, last


def _last_layers(model: Model, count: int) -> int:
    """Return the layers beside the head that make the work of `count` stages most equal (DeepSpeed's partition)."""
    head = model.vocab * model.hidden / model.layer_parameters
    least = max(0, int((model.layers - (count - 1) * head) / count))

    def spread(last: int) -> float:
        fewest, more = divmod(model.layers - last, count - 1)
        return max(fewest + (more > 0), last + head) - min(fewest, last + head)

    return min((least, least + 1), key=spread)


MICRO_BATCHES = (1, 2, 4, 8, 16, 32)
GRADIENT_BITS = (0, 8, 4, 3)
WEIGHT_BITS = (0, 8, 4)
ISLANDS, SYNC_EVERY = (2, 4, 8), 30
"""Numbers of islands, and steps between their exchanges, for which the law of the loss holds (`search.DILOCO`)."""


@dataclass(frozen=True, slots=True)
class Layouts:
    """Enumeration of layouts for a batch of `batch` sequences.

    Attributes:
        cluster: GPUs and network.
        model: Model to train.
        batch: Sequences of a step.
        engine: Program that starts the layouts.
        is_trainer: Whether the program is Hugging Face's Trainer.
        micros: Sequences of a micro-batch that are tried.
        refused: Number of refused divisions by reason, counted while they are enumerated.
    """

    cluster: Cluster
    model: Model
    batch: int
    engine: Engine = "deepspeed"
    is_trainer: bool = False
    micros: tuple[int, ...] = MICRO_BATCHES
    refused: Counter[str] = field(default_factory=Counter)

    def plain(self) -> Iterator[Layout]:
        """Yield the layouts without compression."""
        for tensor in _divisors(self.cluster.gpus):
            for pipeline in _divisors(self.cluster.gpus // tensor):
                reason = self._refusal(tensor, pipeline)
                if reason:
                    self.refused[reason] += 1
                else:
                    yield from self._batches(tensor, pipeline)

    def compressed(self, layout: Layout) -> Iterator[Layout]:
        """Yield the variants of a layout that send fewer bytes between replicas. Islands need DeepSpeed."""
        if layout.data == 1:
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
        stage, family = self.cluster.gpus // pipeline, model.family
        reasons = {
            "LoRA is predicted without tensor and pipeline ranks": divided and model.rank,
            "tensor ranks do not share a node": per_node % tensor,
            "stages do not fill nodes": per_node % stage and stage % per_node,
            "DeepSpeed's experts exclude tensor and pipeline ranks": divided and model.experts > 1,
            f'the family "{family}" cannot be divided': divided and FAMILIES[family].modules is None,
            "tensor ranks do not divide the heads": model.heads % tensor or model.kv_heads % tensor,
            "more stages than layers": pipeline > model.layers,
            "replicas do not divide the batch": self.batch % (stage // tensor),
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def _batches(self, tensor: int, pipeline: int) -> Iterator[Layout]:
        data = self.cluster.gpus // tensor // pipeline
        for micro in self.micros:
            if self.batch % (data * micro):
                continue
            count = self.batch // (data * micro)
            if pipeline > 1 and count < pipeline:
                self.refused["fewer micro-batches than stages"] += 1
                continue
            layout = Layout(tensor, pipeline, data, 0, micro, count, engine=self.engine)
            yield from self._of_deepspeed(layout) if self.engine == "deepspeed" else self._of_megatron(layout)

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
            for recompute in ("none", "full"):
                found = replace(layout, zero=zero, recompute=recompute)
                yield found
                if zero and layout.pipeline == 1 and 1 < node < layout.data and layout.data % node == 0:
                    yield replace(found, shard_within=node)

    def _of_megatron(self, layout: Layout) -> Iterator[Layout]:
        """Yield layouts with interleaved stages or sequence parallelism, which only Megatron has."""
        if self.model.rank or self.model.experts > 1 or self.model.layers % layout.pipeline:
            self.refused["Megatron is predicted without LoRA and experts, and with equally large stages"] += 1
            return
        plain = replace(layout, zero=1 if layout.data > 1 else 0, sequence_parallel=layout.tensor > 1)
        for virtual in _interleavings(self.model.layers, layout):
            for recompute in ("none", "selective", "full"):
                yield replace(plain, virtual=virtual, recompute=recompute)

    def _islands(self, layout: Layout) -> Iterator[Layout]:
        """Yield islands of whole nodes. In islands of one replica, all ZeRO stages are alike."""
        for islands in ISLANDS:
            size, left = divmod(layout.data, islands)
            if left or (size == 1 and layout.zero > 1):
                continue
            if size * layout.tensor % self.cluster.per_node == 0:
                yield replace(layout, islands=islands, sync_every=SYNC_EVERY)


def with_offload(layouts: Iterable[Layout]) -> Iterator[Layout]:
    """Yield the layouts of DeepSpeed that can use the memory of the host, with what can be there."""
    for layout in layouts:
        if layout.zero and layout.engine == "deepspeed" and layout.pipeline == 1:
            yield replace(layout, offload="optimizer")
            if layout.zero == 3:
                yield replace(layout, offload="all")


def _interleavings(layers: int, layout: Layout) -> list[int]:
    """Return 1 and the largest number of interleaved stages up to 6."""
    if layout.pipeline == 1 or layers % layout.pipeline or layout.accumulation % layout.pipeline:
        return [1]
    own = layers // layout.pipeline
    return sorted({1, max(count for count in range(1, 7) if own % count == 0)})


def _divisors(number: int) -> list[int]:
    low = [divisor for divisor in range(1, int(number**0.5) + 1) if number % divisor == 0]
    return sorted({*low, *(number // divisor for divisor in low)})
