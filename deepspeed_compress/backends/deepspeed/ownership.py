"""Balanced ownership of parameters under ZeRO 1 and 2, so that all ranks send and receive throughout backward.

DeepSpeed lays out the parameters of a group in one flat buffer, in the optimizer's order, and rank r owns the r-th of
equal parts. Backward runs through a model from its end, so at any time one rank owns the new gradients, and all others
send to it. This module reorders the parameters of each group before the optimizer is made
(`DeepSpeedEngine._configure_zero_optimizer`); nothing else of DeepSpeed changes. Checkpoints are written and read in
the order that the program gave (`ownership_files`), which is the order that plain DeepSpeed uses.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.runtime.engine import DeepSpeedEngine

from deepspeed_compress.backends.deepspeed.versions import owns_parameter
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import UnsupportedError

DEALT = "compress_file_order"
"""Attribute of an engine with reordered parameters, which holds the object that keeps the order of its files.

It remains after `detach`.
"""


GivenOrder = list[list[Any]]
"""Trained parameters of each group in the order that the program gave; empty if the order was not changed."""


@contextmanager
def dealing(wanted: bool) -> Iterator[GivenOrder]:
    """Reorder the parameters of the ZeRO optimizer of an engine that is made within the block, if `wanted`.

    There is no instance yet whose attribute could be replaced, so the class's method is replaced within the block.
    """
    given: GivenOrder = []
    original = DeepSpeedEngine._configure_zero_optimizer
    if not wanted:
        yield given
        return

    def configure(engine: Any, optimizer: Any) -> Any:
        if engine.zero_optimization_stage() in (1, 2) and optimizer is not None:
            given[:] = [_deal(group, engine.seq_data_parallel_group.size()) for group in optimizer.param_groups]
        return original(engine, optimizer)

    DeepSpeedEngine._configure_zero_optimizer = configure
    try:
        yield given
    finally:
        DeepSpeedEngine._configure_zero_optimizer = original


def check_ownership(engine: Any, config: CompressConfig) -> None:
    """Check that `engine` has the ownership that the section asks for.

    Raises:
        UnsupportedError: it does not.
    """
    if config.ownership == "balanced" and DEALT not in vars(engine):
        raise UnsupportedError(
            f'/deepspeed_compress/ownership is "balanced", but {type(engine.optimizer).__name__} was made without it '
            '(allowed: an optimizer of ZeRO 1 or 2, from initialize or after install); write "contiguous"'
        )
    if config.ownership == "balanced" and any(group.get("use_muon") for group in engine.optimizer.param_groups):
        raise UnsupportedError(
            '/deepspeed_compress/ownership is "balanced", but Muon keeps the momentum of whole matrices on several '
            'ranks, which files in the order of the program do not have; write "contiguous"'
        )


def _deal(group: dict[str, Any], ranks: int) -> list[Any]:
    """Reorder a torch parameter group for `ranks`, and return its trained parameters in the original order."""
    given = [parameter for parameter in group["params"] if owns_parameter(parameter)]
    others = [parameter for parameter in group["params"] if not owns_parameter(parameter)]
    order = balanced_order([parameter.numel() for parameter in given], ranks)
    group["params"] = [*(given[index] for index in order), *others]
    return given


def balanced_order(numels: Sequence[int], ranks: int) -> list[int]:
    """Return an order of the parameters, as indices, that spreads every part of the model over all ranks.

    Rank r owns the r-th of `ranks` equal runs of the returned order, and about the same number of elements as the other
    ranks in any slice of the given order.

    The largest ranks - 1 parameters lie across the borders between runs. The others are dealt out from the last one on,
    in the order in which backward reaches them, each to the rank with the most room left. Every rank keeps its own
    parameters in the given order.

    Args:
        numels: the number of elements of each parameter, in the given order.
        ranks: the number of owners.
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
