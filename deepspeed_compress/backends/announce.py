"""Line at the start for any engine: what is compressed, how, and what it is expected to send.

The figures are a prediction for all parameters in a single bucket, so they are those of large buckets: with small ones,
per-message overhead takes a larger share.
"""

import math
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial

from torch.distributed import ProcessGroup

from deepspeed_compress.choice_names import NOW
from deepspeed_compress.collectives.buckets import Partition
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import Reducer
from deepspeed_compress.config import Activations, CompressConfig, CompressedGradients, CompressedWeights, brief
from deepspeed_compress.config.numbers import size
from deepspeed_compress.config.schedules import choice_name
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import ring_all_gather
from deepspeed_compress.session.session import Session

LATE = 10**9
"""Optimizer step after the end of every density warm-up."""
MOST = 64
"""Largest number of steps to average over, if some parameters are sent only every few steps."""


def announce(session: Session, group: ProcessGroup, where: str, figures: Callable[[], Sequence[str]]) -> None:
    """Write the line to standard error, on the first rank of `group`, unless `monitor.announce` is false.

    Args:
        session: the session.
        group: the ranks that exchange messages.
        where: name of the engine.
        figures: returns texts about gradients and weights, none if nothing is compressed.
    """
    if group.rank() == 0 and session.config.monitor.announce:
        tell(partial(joined, session.config, where, group.size(), figures))


def tell(text: Callable[[], str]) -> None:
    """Write the startup line to standard error."""
    try:
        print(f"deepspeed_compress: {text()}", file=sys.stderr, flush=True)
    except Exception as error:  # an informational line must not stop one rank while the others wait for it
        warnings.warn(f"the startup line cannot be written: {error!r}", CompressWarning, stacklevel=3)


def joined(
    config: CompressConfig,
    where: str,
    ranks: int,
    figures: Callable[[], Sequence[str]],
    members: str = "data-parallel ranks",
    measured: Sequence[object] = (),
) -> str:
    """Return the startup line.

    Args:
        config: the section.
        where: the engine, such as the ZeRO stage.
        ranks: number of ranks, or nodes, that exchange messages.
        figures: returns the texts about traffic; called only if there are several.
        members: what is counted by `ranks`, in the plural.
        measured: what was measured at the start, as texts.
    """
    methods = f"gradients {brief(config.gradients)}, weights {brief(config.weights)}"
    first = f"{methods}; {where}, {ranks} {members}"
    found = [*(figures() if ranks > 1 else ()), *_inside_model(config), *map(str, measured)]
    if config.islands is not None:
        steps, interval = config.islands.sync_steps, config.islands.sync_every
        every = interval if steps is None else f"{steps} steps"
        found.append(f"islands exchange {brief(config.islands.exchange)} every {every}")
    if not found:
        return f"{first}; nothing is {'compressed' if ranks > 1 else 'sent, so nothing is compressed'}"
    if config.auto is not None:
        compressed = choice_name(config.gradients)
        found.append(f'auto: "{NOW}" (uncompressed) and "{compressed}" take turns, and the faster one stays')
    elif config.schedule.warmup_steps:
        found.append(f"the first {config.schedule.warmup_steps} steps are uncompressed")
    return "; ".join([first, *found]) + ' ("monitor": {"announce": false} turns this line off)'


def _inside_model(config: CompressConfig) -> list[str]:
    """Return the texts on what ranks with different parts of the model send to each other."""
    activations, found = config.activations or Activations(), []
    tensor, experts = activations.tensor, activations.experts
    if tensor is not None:
        backward = f", {tensor.backward_bits} backward" if tensor.backward_bits else ""
        how = (["merged"] if tensor.merge else []) + ([f"in {tensor.bits} bits{backward}"] if tensor.bits else [])
        found.append(f"sums of tensor parallelism are {' and '.join(how)}")
    messages = {
        "activations between stages": activations.pipeline,
        "tokens for experts": experts.dispatch if experts else None,
        "results of experts": experts.combine if experts else None,
        "all-to-alls of sequence parallelism": activations.sequence,
    }
    return found + [f"{what} are in {one.bits} bits" for what, one in messages.items() if one is not None]


def gradient_texts(
    session: Session,
    parameters: Parameters,
    partitions: Sequence[Partition],
    everywhere: bool,
    alone: int,
    times: int = 1,
) -> list[str]:
    """Return texts on excluded parameters, and on the bytes that rank 0 sends in a step.

    Args:
        session: the session of the run.
        parameters: the model's parameters.
        partitions: cut of one bucket with all trained parameters of each group of ranks.
        everywhere: reduce to all ranks instead of to the owners.
        alone: bytes that the engine sends without compression.
        times: reductions per step.
    """
    total = sum(map(parameters.numel, parameters.trained))
    raw = {name for one in partitions for name in uncompressed(session.gradients.chosen_reducer(LATE, one), one)}
    sent = sum(mean_bytes(session, partition, everywhere) for partition in partitions)
    share = 1 - sum(parameters.numel(name) for name in raw) / max(1, total)
    count, frozen = len(parameters.trained), len(parameters.shapes) - len(parameters.trained)
    return [
        f"{count - len(raw)} of {count} parameters are compressed ({share:.1%} of the elements), {len(raw)} "
        f"are excluded{f', {frozen} are frozen' if frozen else ''}",
        f"rank 0 sends about {size(times * sent)} of gradients a step, uncompressed {size(alone)}",
    ]


def weight_text(
    weights: CompressedWeights,
    parameters: Parameters,
    gathered: Iterable[tuple[Collection[str], int]],
    sizes: Mapping[str, int],
    when: str,
    rounded: Collection[str],
) -> str:
    """Return a text on the bytes of weights that a rank sends `when` they are gathered, and on those sent exactly.

    Args:
        weights: the settings.
        parameters: the model's parameters.
        gathered: names of the parameters that are gathered over the same ranks, with the number of these ranks.
        sizes: bytes of each uncompressed parameter.
        when: occasion on which they are gathered.
        rounded: names of the parameters that are not data to be kept exactly.
    """
    sent = alone = exact = 0
    small = parameters.uncompressed(weights.min_numel)
    for names, ranks in gathered:
        raw = sum(sizes[name] for name in names if name in small or name not in rounded)
        coded = sum(parameters.numel(name) for name in names if name in rounded and name not in small)
        sent += ring_all_gather(weights.compressor().payload_bytes(coded) + raw, ranks)
        alone += ring_all_gather(sum(sizes[name] for name in names), ranks)
        exact += ring_all_gather(sum(sizes[name] for name in names if name not in rounded), ranks)
    text = f"about {size(sent)} of weights {when}, uncompressed {size(alone)}"
    if not exact:
        return text
    why = 'frozen and travel exactly (in weights, "frozen": true rounds those that are not packed)'
    if weights.frozen:
        why = "packed, or of a type that is not trained, and travel exactly"
    return f"{text}; {size(exact)} of them are {why}"


def mean_bytes(session: Session, partition: Partition, everywhere: bool) -> float:
    """Return the mean bytes that a rank sends to reduce a bucket cut by `partition` as configured, after all warm-ups.

    It is a mean over steps, because overrides may send only every few steps.

    Args:
        session: the session of the run.
        partition: the owners of the bucket's segments.
        everywhere: reduce to all ranks instead of to the owners.
    """
    gradients = session.config.gradients
    every = [override.every for override in gradients.overrides] if isinstance(gradients, CompressedGradients) else []
    steps = range(LATE, LATE + min(MOST, math.lcm(*every)))
    reducers = (session.gradients.chosen_reducer(step, partition) for step in steps)
    return sum(one.bytes for each in reducers for one in each.transfers(partition, everywhere)) / len(steps)


def uncompressed(reducer: Reducer, partition: Partition) -> set[str]:
    """Return the names of the parameters of `partition` that are always sent uncompressed."""
    transfers = reducer.transfers(partition, everywhere=False)
    compressed = {name for one in transfers for name in one.names() - one.uncompressed_names()}
    return {name for one in transfers for name in one.names()} - compressed
