"""The rules: a module for each thing that may hold a run back, with a table at its end."""

from deepspeed_compress.tools.doctor.finding import Rule
from deepspeed_compress.tools.doctor.rules import effect, guard, learning, memory, ranks, time, traffic

__all__ = ["RULES"]

_MODULES = (learning, guard, effect, time, traffic, ranks, memory)

RULES: tuple[Rule, ...] = tuple(rule for module in _MODULES for rule in module.RULES)
"""In the order in which findings of equal severity and weight are shown: causes before what follows from them."""
