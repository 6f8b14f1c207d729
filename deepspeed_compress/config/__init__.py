"""The `deepspeed_compress` section of a DeepSpeed configuration, on its way from the file into force.

1. `loading` reads the file as DeepSpeed does; `numbers` reads its times and rates.
2. `section` adds what a preset sets, and validates. The settings are in `models` (the whole section with its defaults),
   `places` and `overrides` (gradients and weights, with `methods` and `sparse_methods`), `schedules` and `islands`.
   `validation_errors` says what pydantic finds wrong, with the help of `schema`.
3. `section` also has the table of all refusals and warnings, which the modules `..._problems` define.
   `expand`, in the same module, writes the parallelism into DeepSpeed's own keys, which `problems` reads.
4. `schedules` and `candidates` make the settings that a policy puts in force at a step.

Nothing here imports torch, deepspeed or transformers.
"""

from deepspeed_compress.config.islands import Elastic, Islands, Outer
from deepspeed_compress.config.loading import masked, read_ds_config
from deepspeed_compress.config.methods import MethodConfig
from deepspeed_compress.config.models import (
    SECTION,
    Activations,
    CompressConfig,
    ExpertActivations,
    Guard,
    TensorActivations,
)
from deepspeed_compress.config.places import (
    CompressedGradients,
    CompressedWeights,
    ErrorFeedbackConfig,
    GradientsConfig,
    PowerSGDGradients,
    WeightsConfig,
)
from deepspeed_compress.config.schedules import brief, patched, settings_of, total_steps, written
from deepspeed_compress.config.section import check_world, expand, find_missing, parse_section, with_preset

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
    "parse_section",
    "patched",
    "read_ds_config",
    "settings_of",
    "total_steps",
    "with_preset",
    "written",
]
