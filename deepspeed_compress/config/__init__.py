"""The `deepspeed_compress` section of a DeepSpeed configuration: models, loading, expansion, JSON Schema.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.activations import Activations, ExpertActivations, TensorActivations
from deepspeed_compress.config.expand import check_world, expand
from deepspeed_compress.config.islands import Elastic, Islands, Outer
from deepspeed_compress.config.loading import read_ds_config
from deepspeed_compress.config.methods import MethodConfig
from deepspeed_compress.config.models import SECTION, CompressConfig, Guard
from deepspeed_compress.config.patches import brief, patched, settings_of, written
from deepspeed_compress.config.places import (
    CompressedGradients,
    CompressedWeights,
    ErrorFeedbackConfig,
    GradientsConfig,
    PowerSGDGradients,
    WeightsConfig,
)
from deepspeed_compress.config.preset import with_preset
from deepspeed_compress.config.schedules import total_steps
from deepspeed_compress.config.secrets import masked, masked_arguments
from deepspeed_compress.config.section import find_missing, parse_section

__all__ = [
    "SECTION",
    "Activations",
    "CompressConfig",
    "CompressedGradients",
    "CompressedWeights",
    "Elastic",
    "ErrorFeedbackConfig",
    "ExpertActivations",
    "GradientsConfig",
    "Guard",
    "Islands",
    "MethodConfig",
    "Outer",
    "PowerSGDGradients",
    "TensorActivations",
    "WeightsConfig",
    "brief",
    "check_world",
    "expand",
    "find_missing",
    "masked",
    "masked_arguments",
    "parse_section",
    "patched",
    "read_ds_config",
    "settings_of",
    "total_steps",
    "with_preset",
    "written",
]
