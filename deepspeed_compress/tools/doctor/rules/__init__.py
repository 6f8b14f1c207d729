"""Rules of the doctor, one module per topic. Each check follows the texts of its rule."""

from deepspeed_compress.tools.doctor.rule import DoctorRule
from deepspeed_compress.tools.doctor.rules import learning, time, traffic
from deepspeed_compress.tools.outputs.report import rules_of

RULES: tuple[DoctorRule, ...] = tuple(rules_of((learning, time, traffic), DoctorRule))
"""All rules, in the order in which findings of equal severity and weight are shown: causes before consequences."""
