"""The `deepspeed_compress` section of a DeepSpeed configuration: models, loading, expansion, JSON Schema.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.expand import check_world, expand, tensor_size
from deepspeed_compress.config.islands import Islands, Outer
from deepspeed_compress.config.loading import read_ds_config
from deepspeed_compress.config.methods import MethodConfig, SparseConfig
from deepspeed_compress.config.models import (
    SECTION,
    Adaptive,
    CompressConfig,
    Guard,
    Lint,
    Monitor,
    Parallelism,
    Phase,
    Ramp,
    RollBack,
    Schedule,
)
from deepspeed_compress.config.notices import find_notices
from deepspeed_compress.config.overrides import Override, OverrideConfig
from deepspeed_compress.config.patches import brief, patched, settings_of, written
from deepspeed_compress.config.places import (
    AnyCompressedGradients,
    CompressedGradients,
    CompressedWeights,
    DGCGradients,
    ErrorFeedbackConfig,
    FeedbackGradients,
    GradientsConfig,
    Hierarchy,
    LayeredGradients,
    MemoryConfig,
    NodeConfig,
    NoneGradients,
    PowerSGDGradients,
    WeightsConfig,
)
from deepspeed_compress.config.schedules import phase_ends, total_steps
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.secrets import MASK, masked
from deepspeed_compress.config.section import find_missing, find_problems, parse_section

__all__ = [
    "MASK",
    "SECTION",
    "Adaptive",
    "AnyCompressedGradients",
    "CompressConfig",
    "CompressedGradients",
    "CompressedWeights",
    "DGCGradients",
    "ErrorFeedbackConfig",
    "FeedbackGradients",
    "GradientsConfig",
    "Guard",
    "Hierarchy",
    "Islands",
    "LayeredGradients",
    "Lint",
    "MemoryConfig",
    "MethodConfig",
    "Monitor",
    "NodeConfig",
    "NoneGradients",
    "Outer",
    "Override",
    "OverrideConfig",
    "Parallelism",
    "Phase",
    "PowerSGDGradients",
    "Ramp",
    "RollBack",
    "Schedule",
    "SparseConfig",
    "WeightsConfig",
    "brief",
    "check_world",
    "expand",
    "find_missing",
    "find_notices",
    "find_problems",
    "json_schema",
    "masked",
    "parse_section",
    "patched",
    "phase_ends",
    "read_ds_config",
    "settings_of",
    "tensor_size",
    "total_steps",
    "written",
]
