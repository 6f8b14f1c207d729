"""A model in parts computes what transformers computes with the same weights, padding and loss included."""

from pathlib import Path
from typing import Any

import deepspeed
import numpy as np
import pytest
import torch
from deepspeed.pipe import TiedLayerSpec
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoModelForCausalLM

from deepspeed_compress.models import Layout, build_model, build_parallel, read_model_config, whole_logits
from deepspeed_compress.models.families import FAMILIES, family_of
from deepspeed_compress.models.layers import next_token_loss
from deepspeed_compress.models.pipeline import pipeline_layers
from tests.models.families import MODELS, padded, random_tokens, save_model
from tests.models.runs import SEED, Run, finish, start
from tests.support.forks import run_forks

ROWS = 3
SIDES = ("none", "left", "right")

Seen = tuple[float, NDArray[np.float32]]
"""Loss, and logits of (ROWS, LENGTH, vocabulary)."""


def shown(side: str) -> tuple[Tensor, Tensor | None, Tensor]:
    """Tokens, the mask of those that are not padding, and labels: -100 where the mask is zero."""
    tokens = random_tokens(ROWS)
    if side == "none":
        return tokens, None, tokens
    mask = padded(side, ROWS)
    return tokens, mask, tokens.masked_fill(mask == 0, -100)


def whole(model: Any, side: str) -> Seen:
    tokens, mask, labels = shown(side)
    with torch.no_grad():
        output = model(input_ids=tokens, attention_mask=mask, labels=labels, use_cache=False)
    return float(output.loss), output.logits.numpy()


def staged(engine: Any, side: str) -> Seen | None:
    """None on ranks that do not see the logits."""
    tokens, mask, labels = shown(side)
    inputs = tokens if mask is None else (tokens, mask)
    engine.reset_activation_shape()
    loss, logits = engine.eval_batch(iter([(inputs, labels)]), return_logits=True)
    return None if logits is None else (float(loss), logits.numpy())


def sliced(model: Any, side: str) -> Seen:
    with whole_logits(model), torch.no_grad():
        tokens, mask, _ = shown(side)
        logits = model(input_ids=tokens, attention_mask=mask, use_cache=False).logits
    return whole(model, side)[0], logits.numpy()


def in_stages(rank: int, *paths: Path) -> list[dict[str, Seen | None]]:
    seen = []
    for path in paths:
        engine = start(Run(path, Layout(pipeline=2)))
        seen.append({side: staged(engine, side) for side in SIDES})
        finish(engine)
    return seen


def in_slices(rank: int, *paths: Path) -> list[dict[str, Seen | None]]:
    deepspeed.init_distributed("gloo")
    models = [build_parallel(path, read_model_config(path), SEED, Layout(tensor=2)).eval() for path in paths]
    return [{side: sliced(model, side) for side in SIDES} for model in models]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, bool], Path]:
    """Directories by family, and by whether head and embedding are one."""
    root = tmp_path_factory.mktemp("saved")
    return {(family, tied): save_model(root / f"{family}-{tied}", family, tied) for family in MODELS for tied in TIED}


TIED = (True, False)
Saved = dict[tuple[str, bool], Path]


def check(seen: Seen | None, model: Any, side: str, tolerance: float) -> None:
    loss, logits = whole(model, side)
    assert seen is not None
    kept = np.ones((ROWS, logits.shape[1]), bool) if side == "none" else padded(side, ROWS).numpy().astype(bool)
    # What a padding token sees means nothing.
    assert np.abs(seen[1] - logits)[kept].max() <= tolerance, side
    assert abs(seen[0] - loss) <= tolerance, side


def test_every_family_is_here() -> None:
    assert set(MODELS) == set(FAMILIES)


@pytest.mark.parametrize("family", MODELS)
def test_two_stages(family: str, saved: Saved) -> None:
    """To the bit: the same operations on the same numbers."""
    paths = [saved[family, tied] for tied in TIED]
    _, last = run_forks(2, in_stages, *paths)
    for path, seen in zip(paths, last, strict=True):
        model = AutoModelForCausalLM.from_pretrained(path)
        for side in SIDES:
            check(seen[side], model, side, tolerance=0.0)


@pytest.mark.parametrize("family", MODELS)
def test_two_slices(family: str, saved: Saved) -> None:
    """Logits are about 1 to 10: sums of two halves differ from whole ones by a few of the last of 24 bits."""
    paths = [saved[family, tied] for tied in TIED]
    for rank in run_forks(2, in_slices, *paths):
        for path, seen in zip(paths, rank, strict=True):
            model = AutoModelForCausalLM.from_pretrained(path)
            for side in SIDES:
                check(seen[side], model, side, tolerance=1e-5)


@pytest.mark.parametrize("tied", TIED)
@pytest.mark.parametrize("family", MODELS)
def test_layers_one_after_the_other(family: str, tied: bool, saved: Saved) -> None:
    path = saved[family, tied]
    model: Any = build_model(path, read_model_config(path), SEED).eval()
    for side in SIDES:
        tokens, mask, labels = shown(side)
        flow: Any = tokens if mask is None else (tokens, mask)
        with torch.no_grad():
            for layer in pipeline_layers(model, family_of(model.config)):
                flow = applied(layer, flow)
            loss = next_token_loss(flow, labels)
        check((float(loss), flow.numpy()), model, side, tolerance=0.0)


def applied(layer: Any, flow: Any) -> Any:
    if not isinstance(layer, TiedLayerSpec):
        return layer(flow)
    module = layer.build()
    return module(flow) if layer.forward_fn is None else layer.forward_fn(module, flow)
