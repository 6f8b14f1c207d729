"""Startup announcement: one line with the settings and the bytes to be sent, and warnings about the engine."""

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.runtime.zero.partition_parameters import get_allgather_dtype

from deepspeed_compress.backends.announce import gradient_texts, joined, tell, weight_text
from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind, has_optimizer
from deepspeed_compress.backends.deepspeed.groups import expert_names, reduction_group
from deepspeed_compress.backends.deepspeed.units import IslandUnit, NodeUnit, node_unit
from deepspeed_compress.backends.deepspeed.weights.zero_3 import rounded_parameters
from deepspeed_compress.collectives.buckets import even_partition, partition_each
from deepspeed_compress.collectives.exchange import is_gloo
from deepspeed_compress.collectives.pace import launched_ranks_of_host
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import SECTION, CompressConfig, CompressedWeights, find_missing
from deepspeed_compress.config.numbers import size
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from deepspeed_compress.session.session import Session


def announce(engine: Any, session: Session, parameters: Parameters, measured: Sequence[object]) -> None:
    """Write the announcement to standard error, on rank 0, unless `monitor.announce` is false.

    Args:
        engine: the engine.
        session: its session.
        parameters: its parameters.
        measured: what was measured at the start, as texts.
    """
    if engine.global_rank == 0 and session.config.monitor.announce:
        tell(partial(_announcement, engine, session, parameters, measured))


def _announcement(engine: Any, session: Session, parameters: Parameters, measured: Sequence[object]) -> str:
    """Return the settings, the excluded parameters, and what rank 0 sends per step with and without compression."""
    where, members, nodes = f"ZeRO {engine.zero_optimization_stage()}", "data-parallel ranks", node_unit(engine)
    figures = partial(_figures, engine, session, parameters)
    if nodes is not None:
        where += f" within nodes of {nodes.get_data_parallel_world_size()} ranks"
        members, figures = "nodes", partial(_between_nodes, session, parameters, nodes)
    return joined(session.config, where, reduction_group(engine).size(), figures, members, measured)


def warn_of_uncompressed(engine: Any, ds_config: Mapping[str, Any]) -> None:
    """Warn (CompressWarning), on rank 0, that `engine` is not compressed because `ds_config` has no section."""
    problem = find_missing(ds_config)
    if problem is not None and engine.global_rank == 0 and has_optimizer(engine):
        meant = 'Or say that it is meant, by "gradients": {"method": "none"} in it'
        text = f"an engine is not compressed: {problem} {meant}"
        warnings.warn(text, CompressWarning, stacklevel=5)


def find_idle_keys(engine: Any, config: CompressConfig, island: IslandUnit | None, dtype: torch.dtype) -> Iterator[str]:
    """Yield texts on keys that do not have the effect that the file suggests.

    - `communication_data_type`: sums are computed in fp32 whatever the file says; uncompressed elements are sent in
      `dtype`.
    - `gradients.method`, if it applies a momentum of its own in several micro-steps. Nodes average gradients once.
    - `adaptive`, if islands by host have one data-parallel rank each. Islands of a given size are checked when the
      section is read.
    """
    method, written = config.gradients.method, engine.config.get("communication_data_type")
    if method != "none" and written is not None and engine.communication_data_type != dtype:
        yield (
            f'/communication_data_type: "{written}" has no effect with compressed gradients: sums are in fp32, and '
            f"uncompressed elements in {str(dtype).removeprefix('torch.')}; remove the key, or write "
            f'"method": "{written}" into /{SECTION}/gradients'
        )
    steps, stage = engine.gradient_accumulation_steps(), int(engine.zero_optimization_stage())
    if method in OWN_MOMENTUM and steps > 1 and stage >= 2 and node_unit(engine) is None:
        yield (
            f'/{SECTION}/gradients/method: "{method}" applies its momentum in each of the {steps} micro-steps, in '
            f"which ZeRO {stage} reduces; write 1 as zero_optimization.stage or as gradient_accumulation_steps"
        )
    by_host = config.islands is not None and config.islands.by_host
    if config.adaptive is not None and by_host and island and island.get_data_parallel_world_size() == 1:
        yield (
            f"/{SECTION}/adaptive: has no effect, because each host has one data-parallel rank, which sends neither "
            "gradients nor weights (allowed: null); remove the key"
        )


def _between_nodes(session: Session, parameters: Parameters, nodes: NodeUnit) -> list[str]:
    """Return the texts on what a rank sends to other nodes: its share of the model's gradients, once a step."""
    within = nodes.get_data_parallel_world_size()
    shares = [(name, -(-parameters.numel(name) // within)) for name in parameters.trained]
    partition = even_partition(shares, nodes.count)
    alone = ring_all_reduce(partition.numel * parameters.dtype.itemsize, nodes.count)
    if session.config.gradients.method == "none":
        return [f"rank 0 sends {size(alone)} of gradients a step"]
    return gradient_texts(session, parameters, [partition], everywhere=True, alone=alone)


def _figures(engine: Any, session: Session, parameters: Parameters) -> list[str]:
    config, parts = session.config, []
    if config.gradients.method != "none":
        parts += _gradients(engine, session, parameters)
    if isinstance(config.weights, CompressedWeights):
        parts.append(_compressed_weights(engine, config.weights, parameters))
    elif parts and engine.zero_optimization_stage() > 0 and config.islands is None:
        parts.append(_plain_weights(engine, parameters))
    if engine_kind(engine) == "zero_3":
        parts += _frozen_between_hosts(engine, parameters)
    return parts


MOSTLY = 0.5
"""Share of frozen elements from which on the line says that they need not travel between hosts."""


def _frozen_between_hosts(engine: Any, parameters: Parameters) -> list[str]:
    """Return a text on frozen weights that all hosts gather, if most weights are frozen, as with LoRA."""
    frozen = sum(map(parameters.numel, parameters.frozen))
    share = frozen / max(1, sum(map(parameters.numel, parameters.shapes)))
    local = launched_ranks_of_host()
    if share < MOSTLY or local is None or reduction_group(engine).size() <= local:
        return []
    # In a ring, what a rank sends for one gather is also what a host sends.
    sent = size(_ring_bytes(engine, parameters.frozen))
    return [
        f"{share:.1%} of the elements are frozen, and every host sends {sent} of them to another one in forward and in "
        'backward of each micro-step: if a host holds the model, "parallelism": {"shard_within": "node"} keeps them '
        "inside"
    ]


def _compressed_weights(engine: Any, weights: CompressedWeights, parameters: Parameters) -> str:
    every = engine_kind(engine) == "zero_3"
    names = parameters.shapes if every else parameters.trained
    when = "each time they are gathered" if every else "a step"
    rounded = rounded_parameters(engine, weights) if every else parameters.trained
    return weight_text(weights, parameters, _averaged(engine, names), _weight_bytes(engine), when, rounded)


def _weight_bytes(engine: Any) -> dict[str, int]:
    """Return the bytes of each uncompressed parameter, which ZeRO 3 may gather in another dtype."""
    return {
        name: one.ds_numel * get_allgather_dtype(one, one.ds_tensor).itemsize if hasattr(one, "ds_id") else one.nbytes
        for one, name in engine.param_names.items()
    }


def _ring_bytes(engine: Any, names: Collection[str]) -> int:
    """Return the bytes that a rank sends to gather the parameters `names` uncompressed."""
    sizes = _weight_bytes(engine)
    return sum(ring_all_gather(sum(sizes[name] for name in some), ranks) for some, ranks in _averaged(engine, names))


def _plain_weights(engine: Any, parameters: Parameters) -> str:
    """Return the text on uncompressed weights that could be compressed."""
    if engine.zero_optimization_stage() < 3:
        sent = size(_ring_bytes(engine, parameters.trained))
        return f'weights travel uncompressed: {sent} a step; add "weights": {{"bits": 4}}'
    every, frozen = (_ring_bytes(engine, names) for names in (parameters.shapes, parameters.frozen))
    of_frozen = f", {size(frozen)} of them frozen" if frozen else ""
    named = ', "frozen": true' if frozen else ""
    return (
        f"weights travel uncompressed: {size(every)} each time that forward or backward gathers them{of_frozen} "
        f'("weights": {{"bits": 8{named}}} sends numbers rounded)'
    )


def _gradients(engine: Any, session: Session, parameters: Parameters) -> list[str]:
    kind = engine_kind(engine)
    divide = partition_each if kind == "zero_3" else even_partition
    partitions = [
        divide([(name, parameters.numel(name)) for name in names], ranks)
        for names, ranks in _averaged(engine, parameters.trained)
    ]
    # ZeRO 2 and 3 reduce in every micro-step. Only ZeRO 3, and not on gloo, reduces directly to the owners.
    times = engine.gradient_accumulation_steps() if engine.zero_optimization_stage() >= 2 else 1
    scatters = kind == "zero_3" and not is_gloo(reduction_group(engine))
    ring = ring_reduce_scatter if scatters else ring_all_reduce
    alone = times * sum(
        ring(partition.numel * parameters.dtype.itemsize, partition.world_size) for partition in partitions
    )
    return gradient_texts(session, parameters, partitions, kind == "zero_0", alone, times)


def _averaged(engine: Any, names: Collection[str]) -> Iterator[tuple[list[str], int]]:
    """Yield those of `names` whose parameters are averaged over the same ranks, and the number of these ranks."""
    experts = expert_names(engine)
    separate = {name for some in experts.values() for name in some}
    yield [name for name in names if name not in separate], reduction_group(engine).size()
    for group, some in experts.items():
        yield [name for name in some if name in names], engine.expert_data_parallel_group[group].size()
