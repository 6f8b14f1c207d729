"""What users call a parameter: its name in the model of transformers, in every layout."""

from typing import Any

__all__ = ["HF_NAME", "user_name"]

HF_NAME = "hf_name"
"""Attribute of a parameter that has another name in the module that DeepSpeed got: a pipeline numbers its layers."""


def user_name(parameter: Any, name: str) -> str:
    """The name that overrides match: the one in transformers if it is noted, else `name`."""
    found: str = getattr(parameter, HF_NAME, name)
    return found
