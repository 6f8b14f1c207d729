"""Configurations that the planner writes are valid, whatever the layout."""

import json
from pathlib import Path

import pytest

from deepspeed_compress.planner.files import ds_config, start_command
from deepspeed_compress.planner.layout import Layout, Layouts
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import lint_text
from tests.planner.jobs import LLAMA_7B, job

CLUSTER = job("32xA100", "100gbit").cluster


def kinds() -> dict[str, Layout]:
    """Return one layout of every kind of configuration."""
    layouts = Layouts(CLUSTER, LLAMA_7B, 256)
    plain = list(layouts.plain())
    every = [*plain, *(variant for one in plain for variant in layouts.compressed(one))]
    found: dict[tuple[object, ...], Layout] = {}
    for one in every:
        sizes = (one.tensor > 1, one.pipeline > 1, one.zero, bool(one.shard_within), one.recompute, one.islands > 1)
        found.setdefault((*sizes, one.data * one.tensor > CLUSTER.per_node, one.gradient_bits, one.weight_bits), one)
    return {str(one): one for one in found.values()}


def test_no_configuration_has_findings() -> None:
    found: dict[str, str] = {}
    for name, layout in kinds().items():
        text = json.dumps(ds_config(layout, CLUSTER), indent=2)
        findings = lint_text(text, context=Context(world_size=layout.ranks))
        found |= {f"{name} {finding.code}": finding.message for finding in findings}
    assert found == {}
    assert len(kinds()) > 150


def command(nodes: int, is_trainer: bool, hostfile: Path | None = None) -> str:
    software = SOFTWARE["hf" if is_trainer else "deepspeed"]
    started, one = job(f"{8 * nodes}xA100", software=software), Layout(1, 1, 8 * nodes, 3, 2, 4, recompute="full")
    return start_command(started, one, Path("my plan/ds_config.json"), Path("my model"), hostfile)


@pytest.mark.parametrize("is_trainer", [False, True])
def test_the_command_starts_every_node(is_trainer: bool) -> None:
    assert "$NODE_RANK" in command(4, is_trainer)
    assert "NODE_RANK" not in command(1, is_trainer)
    one_of_them = command(4, is_trainer, Path("my plan/hostfile"))
    assert "'my plan/hostfile'" in one_of_them
    assert "NODE_RANK" not in one_of_them


def test_the_command_finds_the_files_from_the_project() -> None:
    """Paths may have spaces. Trainer refuses arguments that differ from those of the configuration."""
    assert "launch/torchrun.sh 'my plan/ds_config.json' --model 'my model' --seq-len 4096" in command(
        1, is_trainer=False
    )
    trainer = command(1, is_trainer=True)
    assert (
        "--deepspeed 'my plan/ds_config.json' --per_device_train_batch_size 2 --gradient_accumulation_steps 4"
        in trainer
    )
    assert trainer.endswith("--bf16 True --gradient_checkpointing True")


def test_a_gpu_without_bf16_trains_in_fp16() -> None:
    kinds = {
        gpu: ds_config(Layout(1, 1, 8, 1, 1, 1), job(f"8x{gpu}", "1gbit").cluster) for gpu in ("V100", "A100", "CPU")
    }
    assert [[name for name in ("bf16", "fp16") if name in one] for one in kinds.values()] == [["fp16"], ["bf16"], []]
