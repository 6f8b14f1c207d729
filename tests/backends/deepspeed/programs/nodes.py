"""The programs on four ranks, for models that are sharded within nodes of two."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from tests.backends.deepspeed.programs.catalogue import PROGRAMS
from tests.backends.deepspeed.programs.program import Program

__all__ = ["PROGRAMS_ON_NODES"]

_DIFFERENT: Mapping[str, str] = MappingProxyType(
    {
        "batches of other sizes at tails of epochs": "its batches are for two ranks",
        "gradients and states read": "nodes exchange gradients in the step, after they are read",
        "weights written in GatheredParameters": "rank 0 writes the weights of its own node",
    }
)
"""Programs that are left out, and why."""
_REFUSED: Mapping[str, str] = MappingProxyType(
    {
        "optimizer offload": "moves gradients to the host before they are averaged over the nodes",
        "parameter and optimizer offload": "moves gradients to the host before they are averaged over the nodes",
        "bf16, sums in fp32": "clips whole gradients",
        "bf16, a tied embedding first, sums in fp32": "clips whole gradients",
        "zero.Init": "divided the parameters over other ranks",
        "zero.Init, weights written by rank 0": "divided the parameters over other ranks",
    }
)
"""Programs that are refused only with nodes, and a part of the message."""


_FIRST_STAGE = frozenset({"clips whole gradients"})
"""Refusals that apply to ZeRO 1 only."""


def _on_nodes(program: Program) -> Program:
    stages, text = range(1, 4), _REFUSED.get(program.name)
    refused = program.refused if text is None else dict.fromkeys((1,) if text in _FIRST_STAGE else stages, text)
    return replace(program, ranks=4, refused=refused, stages=tuple(set(program.stages) & set(stages)))


PROGRAMS_ON_NODES = tuple(_on_nodes(one) for one in PROGRAMS if one.ranks == 2 and one.name not in _DIFFERENT)
