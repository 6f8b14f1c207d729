"""The `deepspeed_compress` section of a DeepSpeed configuration: models, loading, expansion, JSON Schema.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.expand import check_world, expand, tensor_size
from deepspeed_compress.config.loading import read_ds_config
from deepspeed_compress.config.models import SECTION, CompressConfig, Lint, Monitor, Parallelism, Schedule
from deepspeed_compress.config.notices import find_notices
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import ErrorFeedback, GradientsConfig, Hierarchy, Memory, WeightsConfig
from deepspeed_compress.config.problems import Problem
from deepspeed_compress.config.schema import json_schema
from deepspeed_compress.config.section import find_problems, parse_section

__all__ = [
    "SECTION",
    "CompressConfig",
    "ErrorFeedback",
    "GradientsConfig",
    "Hierarchy",
    "Lint",
    "Memory",
    "Monitor",
    "Override",
    "Parallelism",
    "Problem",
    "Schedule",
    "WeightsConfig",
    "check_world",
    "expand",
    "find_notices",
    "find_problems",
    "json_schema",
    "parse_section",
    "read_ds_config",
    "tensor_size",
]
