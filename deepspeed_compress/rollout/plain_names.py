"""Names of parameters in the plain model, which receivers hold."""

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.model_families import user_name


def is_pipeline(module: nn.Module) -> bool:
    """Return True for a PipelineModule of DeepSpeed, which is not imported for this."""
    deepspeed = sys.modules.get("deepspeed")
    return deepspeed is not None and isinstance(module, deepspeed.PipelineModule)


def plain_name(module: nn.Module, parameter: Any, name: str, names: Mapping[str, str]) -> str:
    """Return the name of a parameter in the plain model.

    Args:
        module: the model in training.
        parameter: the parameter. Models of the section `parallelism` record its name in transformers.
        name: its name in `module`.
        names: names in the plain model of submodules and parameters of `module`, as far as they differ.

    Raises:
        UnsupportedError: `module` is a pipeline, which numbers its layers, and nothing tells what they are called in
            the plain model.
    """
    parts = name.split(".")
    for end in range(len(parts), 0, -1):
        found = names.get(".".join(parts[:end]))
        if found is not None:
            return ".".join([found, *parts[end:]])
    known = user_name(parameter, "")
    if not known and is_pipeline(module):
        raise UnsupportedError(
            f'parameter "{name}" of a pipeline has no known name in the plain model; pass the names of its layers to '
            f'Publisher, such as names={{"{parts[0]}": "model.layers.0"}}, or make the model by the key "parallelism"'
        )
    return known or name
