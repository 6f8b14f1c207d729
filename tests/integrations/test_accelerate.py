"""An unmodified Accelerate training loop after one call of `install`."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DeepSpeedPlugin

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.integrations.trainers import INT4, collate, network, sentences
from tests.support.forks import run_forks
from tests.support.jobs import weights
from tests.support.messages import caught_warnings

pytestmark = pytest.mark.sampled(4)

NONE = {"gradients": {"method": "none"}}
BATCH = 4


def loop(rank: int, stage: int, section: dict[str, Any] | None, directory: str = "") -> tuple[list[float], Any, bool]:
    """Train three epochs; return the losses, the parameters, and whether compression is attached.

    With `directory`, the state is saved and loaded after the first epoch.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    uninstall = deepspeed_compress.install()
    config = {
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": stage},
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": "auto"},
    }
    plugin = DeepSpeedPlugin(hf_ds_config=config if section is None else {**config, SECTION: section})
    accelerator = Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=2)
    model = network("gpt2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows: Any = sentences(4 * BATCH)
    loader: Any = torch.utils.data.DataLoader(rows, batch_size=BATCH, collate_fn=collate)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for epoch in range(3):
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(float(loss.detach()))
        if directory and epoch == 0:
            accelerator.save_state(directory)
            model.compression.residuals.clear()
            accelerator.load_state(directory)
    uninstall()
    return losses, weights(model), "compression" in vars(model)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_none_matches_accelerate_alone_and_four_bits_train(stage: int) -> None:
    alone, none, int4 = (run_forks(2, loop, stage, section) for section in (None, NONE, INT4))
    for rank in range(2):
        assert none[rank][:2] == alone[rank][:2]
        assert [one[rank][2] for one in (alone, none, int4)] == [False, True, True]
        assert int4[rank][1] != alone[rank][1]
        assert int4[rank][0][-1] == pytest.approx(alone[rank][0][-1], rel=0.05)
        assert int4[rank][0][-1] < int4[rank][0][0]


def test_load_state_restores_residuals(tmp_path: Path) -> None:
    """The loop resets the residuals between `save_state` and `load_state`."""
    uninterrupted = run_forks(2, loop, 2, INT4)
    assert run_forks(2, loop, 2, INT4, str(tmp_path)) == uninterrupted


def collect(rank: int) -> tuple[bool, list[str], list[str], float]:
    """Let rank 0 alone collect a state dict, before and after `synchronise`.

    Returns whether the two differ, the warnings of each, and the largest distance of the weights from the fp32 master
    weights after `synchronise`.
    """
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    uninstall = deepspeed_compress.install()
    config = {
        "train_micro_batch_size_per_gpu": BATCH,
        "zero_optimization": {"stage": 2},
        "zero_allow_untested_optimizer": True,
        SECTION: {"weights": {"bits": 4}},
    }
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))
    model = network("gpt2")
    model, _ = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for _ in range(3):
        accelerator.backward(model(**collate(sentences(BATCH))).loss)
    warned: list[list[str]] = []
    states = [state_dict(accelerator, model, warned) if rank == 0 else {}]
    model.compression.synchronise()
    states.append(state_dict(accelerator, model, warned) if rank == 0 else {})
    master = model.optimizer.single_partition_of_fp32_groups[0]
    weights = model.optimizer.parallel_partitioned_bit16_groups[0][rank]
    uninstall()
    differ = any(not torch.equal(states[0][name], states[1][name]) for name in states[0])
    return differ, *(warned or [[], []]), float((master - weights).abs().max())


def state_dict(accelerator: Accelerator, model: Any, warned: list[list[str]]) -> dict[str, torch.Tensor]:
    with caught_warnings() as texts:
        state = accelerator.get_state_dict(model)
    warned.append(texts)
    return {name: value.clone() for name, value in state.items()}


def test_state_dict_is_exact_after_synchronise() -> None:
    (differ, before, after, distance), (_, _, _, others) = run_forks(2, collect)
    assert differ
    assert [text.partition(":")[0] for text in before] == [f"/{SECTION}/weights"]
    assert after == []
    assert distance == others == 0.0
