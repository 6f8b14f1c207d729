"""The rules: a module for each thing that may hold a run back, in which each check stands below its words."""

from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import effect, guard, islands, learning, memory, ranks, time, traffic
from deepspeed_compress.tools.rules import rules_of

__all__ = ["RULES"]

_MODULES = (learning, guard, effect, time, traffic, ranks, memory, islands)

RULES: tuple[DoctorRule, ...] = tuple(rules_of(_MODULES, DoctorRule))
"""In the order in which findings of equal severity and weight are shown: causes before what follows from them."""
