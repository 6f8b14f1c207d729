"""Which rank owns which parameters under ZeRO 1 and 2, so that all of them send and receive all through backward.

DeepSpeed lays the parameters of a group into one flat buffer, in the order of the optimizer, and rank r owns the r-th
of equal parts. Backward goes through a model from its end, so at any time gradients have one owner: all send to it.
Here parameters are dealt out before the optimizer is made (`DeepSpeedEngine._configure_zero_optimizer`): another order
in the group, and nothing else of DeepSpeed changes. What it writes into checkpoints is brought back into the order that
the program gave (`ownership_files`), in which DeepSpeed alone reads and writes them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.utils import is_optimized_parameter

from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import UnsupportedError

__all__ = ["DEALT", "GivenOrder", "balanced_order", "check_ownership", "dealing"]

DEALT = "compress_file_order"
"""Attribute of an engine whose parameters were dealt out: what keeps the order of its files. It outlives `detach`."""


@dataclass
class GivenOrder:
    """By parameter group, what is trained in the order in which the program gave it; empty where it was left so."""

    groups: list[list[Any]] = field(default_factory=list)


@contextmanager
def dealing(wanted: bool) -> Iterator[GivenOrder]:
    """The ZeRO optimizer of the engine that is made while this lasts has its parameters dealt out, if `wanted`.

    There is no instance yet whose attribute could be replaced, so it is that of the class for as long.
    """
    given, original = GivenOrder(), DeepSpeedEngine._configure_zero_optimizer
    if not wanted:
        yield given
        return

    def configure(engine: Any, optimizer: Any) -> Any:
        if engine.zero_optimization_stage() in (1, 2) and optimizer is not None:
            given.groups = [_deal(group, engine.seq_data_parallel_group.size()) for group in optimizer.param_groups]
        return original(engine, optimizer)

    DeepSpeedEngine._configure_zero_optimizer = configure
    try:
        yield given
    finally:
        DeepSpeedEngine._configure_zero_optimizer = original


def check_ownership(engine: Any, config: CompressConfig) -> None:
    """UnsupportedError if the section asks for another ownership than `engine` has."""
    if config.ownership == "balanced" and DEALT not in vars(engine):
        raise UnsupportedError(
            '/deepspeed_compress/ownership is "balanced", but the optimizer of this engine '
            f"({type(engine.optimizer).__name__}) was made without it (allowed: the optimizer of ZeRO 1 and 2, made by "
            'deepspeed_compress.initialize, or after install); write "contiguous"'
        )


def _deal(group: dict[str, Any], ranks: int) -> list[Any]:
    """Reorder a parameter group of torch for `ranks`; what is trained of it, as it was given."""
    given = [parameter for parameter in group["params"] if is_optimized_parameter(parameter)]
    others = [parameter for parameter in group["params"] if not is_optimized_parameter(parameter)]
    order = balanced_order([parameter.numel() for parameter in given], ranks)
    group["params"] = [*(given[index] for index in order), *others]
    return given


def balanced_order(numels: Sequence[int], ranks: int) -> list[int]:
    """An order of parameters of `numels` elements, of which each of `ranks` owns one of equal runs, such that of any
    stretch of the given order all own about the same; indices.

    The largest ones, ranks - 1 of them, lie across the borders of two runs. The others are dealt out from the last one
    on, as backward finds them, each to the rank that has most room left; every rank keeps its own in the given order.
    """
    if ranks == 1 or len(numels) <= ranks:
        return list(range(len(numels)))
    borders = sorted(sorted(range(len(numels)), key=lambda index: -numels[index])[: ranks - 1])
    halves = [0.0, *(numels[index] / 2 for index in borders), 0.0]
    rooms = [max(sum(numels) / ranks - halves[rank] - halves[rank + 1], 1.0) for rank in range(ranks)]
    runs: list[list[int]] = [[] for _ in range(ranks)]
    left = list(rooms)
    for index in sorted(set(range(len(numels))) - set(borders), reverse=True):
        rank = max(range(ranks), key=lambda one: (left[one] / rooms[one], -one))
        runs[rank].insert(0, index)
        left[rank] -= numels[index]
    joined = [[*run, *border] for run, border in zip(runs, [*([index] for index in borders), []], strict=True)]
    return [index for run in joined for index in run]
