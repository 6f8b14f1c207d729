"""Decisions between steps about the settings in force. All ranks decide alike, because they use the same figures."""

from deepspeed_compress.policy.adaptive import AllowedChoices, CandidateSelector
from deepspeed_compress.policy.alpha_beta import AlphaBeta, fit
from deepspeed_compress.policy.guard import Guard, GuardState, Verdict
from deepspeed_compress.policy.ladder import ladder
from deepspeed_compress.policy.measurement import Choice, Measurement, WeightCosts
from deepspeed_compress.policy.observation import Observation
from deepspeed_compress.policy.penalty import low_rank_error
from deepspeed_compress.policy.policy import Actions, Policy, StepPlan
from deepspeed_compress.policy.schedule import SettingsSchedule, timeline

__all__ = [
    "Actions",
    "AllowedChoices",
    "AlphaBeta",
    "CandidateSelector",
    "Choice",
    "Guard",
    "GuardState",
    "Measurement",
    "Observation",
    "Policy",
    "SettingsSchedule",
    "StepPlan",
    "Verdict",
    "WeightCosts",
    "fit",
    "ladder",
    "low_rank_error",
    "timeline",
]
