"""The programs on four ranks, for models that are sharded within nodes of two."""

from collections.abc import Mapping
from dataclasses import replace

from tests.backends.deepspeed.programs.catalogue import PROGRAMS
from tests.backends.deepspeed.programs.program import Program

_DIFFERENT: Mapping[str, str] = {
    "batches of other sizes at tails of epochs": "its batches are for two ranks",
    "running statistics loaded": "the first node writes its statistics only, as rank 0 does under ZeRO 1 and 2",
    "gradients and states read": "nodes exchange gradients in the step, after they are read",
    "weights written in GatheredParameters": "rank 0 writes the weights of its own node",
}
"""Programs that are left out, and why."""
_STAGES = (1, 2, 3)
_WHOLE = {1: "clips whole gradients"}
_EXPERTS = dict.fromkeys(_STAGES, "mixture-of-experts layers with groups of their own")
_REFUSED: Mapping[str, Mapping[int, str]] = {
    "Muon": dict.fromkeys((1, 2), "orthogonalizes Muon's gradients under ZeRO 1 and 2 before"),
    "bf16, a tied embedding first, sums in fp32": _WHOLE,
    "bf16, sums in fp32": _WHOLE,
    "experts on each rank": _EXPERTS,
    "experts spread over ranks": _EXPERTS,
    "experts spread over ranks, bf16, sums in fp32": _EXPERTS,
    # Refused elsewhere because of compressed gradients, which these runs do not have.
    "universal checkpoint": {},
    "zero_hpz_partition_size": {3: "would gather weights across islands or nodes"},
}
"""ZeRO stages at which programs are refused with nodes, and a part of the message."""


def _on_nodes(program: Program) -> Program:
    stages = tuple(stage for stage in _STAGES if stage in program.stages)
    return replace(program, ranks=4, refused=_REFUSED.get(program.name, program.refused), stages=stages)


PROGRAMS_ON_NODES = tuple(_on_nodes(one) for one in PROGRAMS if one.ranks == 2 and one.name not in _DIFFERENT)

# A universal checkpoint is refused when it is loaded, after this engine has been made.
PROGRAMS_ON_RAW_NODES = tuple(one for one in PROGRAMS_ON_NODES if one.name != "universal checkpoint")
