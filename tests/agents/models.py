"""The smallest model and the tokenizer of the example with sums."""

from typing import Any

from launch.agents.sums import END, PAD, make_model, make_tokenizer

__all__ = ["END", "PAD", "network", "tokenizer"]

tokenizer = make_tokenizer


def network() -> Any:
    """Return a model for sequences of up to 20 tokens."""
    return make_model(0, width=32, layers=2).eval()
