"""Layers of a pipeline call transformers without warnings, which would fill the terminal of every run."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, MistralConfig

from deepspeed_compress.models.pipeline import DecoderLayer


class _Masked(nn.Module):
    """Layer that keeps the mask that it gets."""

    def forward(self, hidden: Tensor, attention_mask: Tensor | None, position_ids: Tensor) -> Tensor:
        self.mask = attention_mask
        return hidden


@pytest.mark.parametrize(
    ("config", "visible"), [(LlamaConfig(), [1, 2, 3, 4]), (MistralConfig(sliding_window=2), [1, 2, 2, 2])]
)
def test_masks_are_made_without_a_warning(config: Any, visible: list[int]) -> None:
    config._attn_implementation = "eager"
    masked = _Masked()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DecoderLayer(masked, 0, config, None)(torch.zeros(1, 4, 8))
    assert (masked.mask[0, 0] == 0).sum(dim=1).tolist() == visible
