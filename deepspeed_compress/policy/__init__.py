"""Decisions between steps about the settings in force. All ranks decide alike, because they use the same figures."""

from deepspeed_compress.policy.adaptive import AllowedChoices, CandidateSelector
from deepspeed_compress.policy.alpha_beta import AlphaBeta
from deepspeed_compress.policy.measurement import Choice, Measurement, WeightCosts
from deepspeed_compress.policy.observation import Observation
from deepspeed_compress.policy.policy import Actions, Policy, StepPlan

__all__ = [
    "Actions",
    "AllowedChoices",
    "AlphaBeta",
    "CandidateSelector",
    "Choice",
    "Measurement",
    "Observation",
    "Policy",
    "StepPlan",
    "WeightCosts",
]
