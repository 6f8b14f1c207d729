"""The `deepspeed_compress` section of a DeepSpeed configuration: models, loading, expansion, JSON Schema.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.activations import (
    Activations,
    ExpertActivations,
    PipelineActivations,
    SequenceActivations,
    TensorActivations,
)
from deepspeed_compress.config.candidates import gradient_candidates, weight_candidates
from deepspeed_compress.config.checkpointing import Checkpointing, MemoryCheckpoints
from deepspeed_compress.config.communication import Communication
from deepspeed_compress.config.expand import check_world, expand, tensor_size
from deepspeed_compress.config.islands import Elastic, Islands, Outer
from deepspeed_compress.config.loading import read_ds_config
from deepspeed_compress.config.methods import MethodConfig
from deepspeed_compress.config.models import (
    SECTION,
    Adaptive,
    Auto,
    CompressConfig,
    Guard,
    Lint,
    Monitor,
    Parallelism,
    Phase,
    Ramp,
    Rollback,
    Schedule,
)
from deepspeed_compress.config.notices import find_notices
from deepspeed_compress.config.overrides import Override, OverrideConfig
from deepspeed_compress.config.patches import brief, patched, patched_weights, settings_of, weights_of, written
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
from deepspeed_compress.config.preset import with_preset
from deepspeed_compress.config.rollout import Rollout
from deepspeed_compress.config.schedules import phase_ends, total_steps
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.secrets import MASK, masked, masked_arguments
from deepspeed_compress.config.section import find_missing, find_problems, is_misspelled, parse_section
from deepspeed_compress.config.sparse_methods import SparseConfig

__all__ = [
    "MASK",
    "SECTION",
    "Activations",
    "Adaptive",
    "AnyCompressedGradients",
    "Auto",
    "Checkpointing",
    "Communication",
    "CompressConfig",
    "CompressedGradients",
    "CompressedWeights",
    "DGCGradients",
    "Elastic",
    "ErrorFeedbackConfig",
    "ExpertActivations",
    "FeedbackGradients",
    "GradientsConfig",
    "Guard",
    "Hierarchy",
    "Islands",
    "LayeredGradients",
    "Lint",
    "MemoryCheckpoints",
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
    "PipelineActivations",
    "PowerSGDGradients",
    "Ramp",
    "Rollback",
    "Rollout",
    "Schedule",
    "SequenceActivations",
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
    "is_misspelled",
    "json_schema",
    "masked",
    "masked_arguments",
    "parse_section",
    "patched",
    "patched_weights",
    "phase_ends",
    "read_ds_config",
    "settings_of",
    "tensor_size",
    "total_steps",
    "weight_candidates",
    "weights_of",
    "with_preset",
    "written",
]
