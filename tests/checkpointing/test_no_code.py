"""Weight files are read without running code, because a foreign checkpoint may name any function."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from deepspeed.checkpoint.constants import PARAM, SUB_PARAM_SHAPE
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_compress.checkpointing.deepspeed import resharding
from deepspeed_compress.errors import StateError
from deepspeed_compress.tools import checkpoint as tools_universal


class Payload:
    """Object that creates a directory when it is unpickled."""

    def __init__(self, made: Path) -> None:
        self._made = made

    def __reduce__(self) -> tuple[Callable[..., None], tuple[str]]:
        return os.mkdir, (str(self._made),)


def saved(folder: Path, weight: torch.Tensor, **more: object) -> Path:
    folder.mkdir(parents=True)
    torch.save({PARAM: weight, **more}, folder / "fp32.pt")
    return folder / "fp32.pt"


def test_a_weight_that_names_a_function_is_refused_and_nothing_runs(tmp_path: Path) -> None:
    made = tmp_path / "made"
    file = saved(tmp_path / "zero" / "h.0.attn.c_attn.weight", torch.zeros(2, 6), more=Payload(made))
    with pytest.raises(StateError, match="contains more than a weight"):
        tools_universal.transpose_gpt2(tmp_path, linear=True)
    with pytest.raises(StateError, match="contains more than a weight"):
        list(resharding._differences(file, "h.0.attn.c_attn.weight", (2, 6)))
    assert not made.exists()
    torch.load(file, weights_only=False)
    assert made.exists(), "the payload would have run"


def test_deepspeeds_attributes_of_a_weight_are_read(tmp_path: Path) -> None:
    shape = SubparamShape(["x"], (2, 3), 0)
    file = saved(tmp_path / "zero" / "h.0.attn.c_attn.weight", torch.zeros(2, 6), **{SUB_PARAM_SHAPE: shape})
    assert list(resharding._differences(file, "w", (2, 6))) == []
    tools_universal.transpose_gpt2(tmp_path, linear=True)
    assert torch.load(file, weights_only=True)[PARAM].shape == (6, 2)
