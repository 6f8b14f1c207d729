"""A layout: how a job divides its model, its batch and its messages; and what each of its pipeline stages holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepspeed_compress.planner.model import Model

Recompute = Literal["none", "full", "selective"]
Engine = Literal["deepspeed", "megatron"]


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
        engine: Program that can start it.
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
    engine: Engine = "deepspeed"

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

    def __str__(self) -> str:
        parts = [f"zero{self.zero}", f"d{self.data}"]
        parts += [f"{letter}{size}" for letter, size in (("t", self.tensor), ("p", self.pipeline)) if size > 1]
        parts += [f"v{self.virtual}"] * (self.virtual > 1) + [f"node{self.shard_within}"] * bool(self.shard_within)
        parts += [f"b{self.micro}x{self.accumulation}"] + [self.recompute] * (self.recompute != "none")
        parts += [f"g{self.gradient_bits}"] * bool(self.gradient_bits) + [f"w{self.weight_bits}"] * bool(
            self.weight_bits
        )
        parts += [f"i{self.islands}every{self.sync_every}"] * (self.islands > 1)
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
