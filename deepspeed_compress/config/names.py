"""Names of parameters for users: those in the transformers model, in every layout."""

from typing import Any

HF_NAME = "hf_name"
"""Attribute of a parameter whose name differs in the module that DeepSpeed got: a pipeline numbers its layers."""

HF_TRANSPOSED = "hf_transposed"
"""Attribute of a weight whose transpose is the weight in the transformers model."""


def user_name(parameter: Any, name: str) -> str:
    """Return the name that overrides match: the name in transformers if it is recorded, else `name`."""
    found: str = getattr(parameter, HF_NAME, name)
    return found
