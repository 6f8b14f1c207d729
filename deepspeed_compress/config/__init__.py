"""The `deepspeed_compress` section of a DeepSpeed configuration: models, loading, expansion, JSON Schema.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.activations import Activations, ExpertActivations, TensorActivations
from deepspeed_compress.config.candidates import gradient_candidates, weight_candidates
from deepspeed_compress.config.checkpointing import Checkpointing
from deepspeed_compress.config.communication import Communication
from deepspeed_compress.config.expand import check_world, expand
from deepspeed_compress.config.islands import Elastic, Islands, Outer
from deepspeed_compress.config.loading import read_ds_config
from deepspeed_compress.config.methods import MethodConfig
from deepspeed_compress.config.models import SECTION, CompressConfig, Guard, Parallelism
from deepspeed_compress.config.notices import find_notices
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.patches import brief, patched, settings_of, written
from deepspeed_compress.config.places import (
    AnyCompressedGradients,
    CompressedGradients,
    CompressedWeights,
    ErrorFeedbackConfig,
    GradientsConfig,
    NoneGradients,
    PowerSGDGradients,
    WeightsConfig,
)
from deepspeed_compress.config.preset import with_preset
from deepspeed_compress.config.schedules import total_steps
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.secrets import MASK, masked, masked_arguments
from deepspeed_compress.config.section import find_missing, find_problems, parse_section
from deepspeed_compress.config.sparse_methods import SparseConfig

__all__ = [
    "MASK",
    "SECTION",
    "Activations",
    "AnyCompressedGradients",
    "Checkpointing",
    "Communication",
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
    "NoneGradients",
    "Outer",
    "Override",
    "Parallelism",
    "PowerSGDGradients",
    "SparseConfig",
    "TensorActivations",
    "WeightsConfig",
    "brief",
    "check_world",
    "expand",
    "find_missing",
    "find_notices",
    "find_problems",
    "gradient_candidates",
    "json_schema",
    "masked",
    "masked_arguments",
    "parse_section",
    "patched",
    "read_ds_config",
    "settings_of",
    "total_steps",
    "weight_candidates",
    "with_preset",
    "written",
]
