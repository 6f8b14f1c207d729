"""Rules of the doctor, one module per topic. Each check follows the texts of its rule."""

from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import learning, time, traffic

RULES: tuple[DoctorRule, ...] = tuple(
    value for module in (learning, time, traffic) for value in vars(module).values() if isinstance(value, DoctorRule)
)
"""All rules, in the order in which findings of equal severity and weight are shown: causes before consequences."""
