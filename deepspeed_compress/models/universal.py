"""Information about a model for DeepSpeed's universal checkpoint converter (`deepspeed.checkpoint.ds_to_universal`)."""

import functools
from typing import Any

import torch.distributed as dist
from deepspeed.checkpoint.constants import PIPELINE_REPLICATED_PARAMETER_PATTERNS, UNIVERSAL_CHECKPOINT_INFO
from deepspeed.module_inject.layers import collect_autotp_universal_checkpoint_info
from torch import nn

TIED = r"^tied_modules\."
"""Pattern of weights that several pipeline stages hold; the converter takes them from the first of these stages."""


def describe_parts(module: nn.Module) -> None:
    """Record on `module` how the weights of all stages are split, because the converter reads only the first stage.

    Collective over all ranks. It needs no weights.
    """
    described: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(described, collect_autotp_universal_checkpoint_info(module))
    whole = functools.reduce(_merge, described)
    setattr(module, UNIVERSAL_CHECKPOINT_INFO, whole | {PIPELINE_REPLICATED_PARAMETER_PATTERNS: [TIED]})


def _merge(one: Any, other: Any) -> Any:
    if isinstance(one, dict) and isinstance(other, dict):
        both = one.keys() & other.keys()
        return one | other | {key: _merge(one[key], other[key]) for key in both}
    if isinstance(one, list):
        return one + [item for item in other if item not in one]
    return one
