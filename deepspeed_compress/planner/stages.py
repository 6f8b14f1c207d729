"""Pipeline stages: which layers each of them has, and which of them hold the embedding and the head."""

from collections.abc import Iterator
from dataclasses import dataclass

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.model import Model


@dataclass(frozen=True, slots=True)
class Stage:
    """Share of a model on a rank of a pipeline stage.

    Attributes:
        layers: Decoder layers.
        parameters: Parameters of the rank.
        tied: Those of them that another stage holds, too: a tied embedding.
        has_head: Whether it computes the head.
        behind: Number of stages after it.
    """

    layers: int
    parameters: float
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
    parameters = (layers * model.layer_parameters + ends) / layout.tensor
    return Stage(layers, parameters, tied / layout.tensor, is_last, layout.pipeline - 1 - number)


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
