"""Decisions between steps about the settings in force. All ranks decide alike, because they use the same figures."""

from deepspeed_compress.policy.decider import Actions, Observation, StepPlan
from deepspeed_compress.policy.measurement import AlphaBeta, Choice, Measurement, WeightCosts
from deepspeed_compress.policy.policy import Policy
from deepspeed_compress.policy.selector import CandidateSelector

__all__ = [
    "Actions",
    "AlphaBeta",
    "CandidateSelector",
    "Choice",
    "Measurement",
    "Observation",
    "Policy",
    "StepPlan",
    "WeightCosts",
]
