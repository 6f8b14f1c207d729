"""Groups of configurations that `bench step` compares, and the DeepSpeed configuration of each."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench.workload import (
    DEEPSPEED,
    OURS,
    Group,
    group_contenders,
    stage_of,
    without_section,
)

SIZES = {"micro_batch": None, "seq_len": 16, "seed": 0}
Write = Callable[..., str]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Function that writes a configuration NAME.json with a micro-batch of 2, and returns its path."""

    def save(name: str, section: Any, **native: Any) -> str:
        path = tmp_path / f"{name}.json"
        path.write_text(json.dumps({"train_micro_batch_size_per_gpu": 2, SECTION: section} | native))
        return str(path)

    return save


def groups(files: list[str], *peers: str, ranks: int = 4, **sizes: Any) -> list[Group]:
    return group_contenders(files, "model.json", peers, SIZES | sizes, ranks)


def test_zero_stages_of_one_layout_form_a_group(write: Write) -> None:
    files = [
        write("zero2_int4", {"parallelism": {"zero_stage": 2}, "gradients": {"bits": 4}}),
        write("zero0_int4", {"gradients": {"bits": 4}}),
        write("zero2_int8", {"parallelism": {"zero_stage": 2}}),
    ]
    [group] = groups(files, "deepspeed", "ddp")
    assert [(contender.name, contender.kind, stage_of(contender.ds_config)) for contender in group.contenders] == [
        ("deepspeed", DEEPSPEED, 0),
        ("zero0_int4", OURS, 0),
        ("deepspeed", DEEPSPEED, 2),
        ("zero2_int4", OURS, 2),
        ("zero2_int8", OURS, 2),
        ("ddp", "ddp", None),
    ]


def test_different_layouts_and_batches_form_groups(write: Write) -> None:
    files = [
        write("plain", {}),
        write("stages", {"parallelism": {"pipeline": 2}}, gradient_accumulation_steps=4),
        write("bf16", {}, bf16={"enabled": True}),
        write("larger", {}, train_micro_batch_size_per_gpu=8),
    ]
    found = [group.workload for group in groups(files)]
    assert [(work.pipeline, work.accumulation, work.precision, work.micro_batch) for work in found] == [
        (1, 1, "fp32", 2),
        (2, 4, "fp32", 2),
        (1, 1, "bf16", 2),
        (1, 1, "fp32", 8),
    ]


def test_plain_deepspeed_keeps_only_the_parallelism_of_the_section(write: Write) -> None:
    file = write("all", {"parallelism": {"zero_stage": 1}}, optimizer={"type": "AdamW"})
    [group] = groups([file], "deepspeed")
    alone, ours = (contender.ds_config for contender in group.contenders)
    assert ours is not None
    assert alone == without_section(ours)
    assert alone["zero_optimization"] == {"stage": 1}
    assert alone["optimizer"] == {"type": "AdamW"}


def test_warmups_and_monitors_are_removed(write: Write) -> None:
    gradients = {"method": "topk", "density": 0.01, "density_warmup_steps": 10}
    section = {"gradients": gradients, "schedule": {"warmup_steps": 5}, "monitor": {"path": "somewhere"}}
    file = write("warm", section, tensorboard={"enabled": True}, train_batch_size=8)
    [group] = groups([file])
    ds_config = group.contenders[0].ds_config
    assert ds_config is not None
    assert ds_config[SECTION]["gradients"] == {"method": "topk", "density": 0.01}
    assert ds_config[SECTION]["schedule"] == {}
    assert ds_config[SECTION]["monitor"] == {"every": 1}
    assert not {"tensorboard", "train_batch_size"} & ds_config.keys()


@pytest.mark.parametrize(
    ("native", "option", "expected"),
    [
        ({}, None, (2, 1)),
        ({"gradient_accumulation_steps": 3}, None, (2, 3)),
        ({"train_batch_size": 32}, None, (2, 4)),
        ({"train_micro_batch_size_per_gpu": None, "train_batch_size": 32}, None, (8, 1)),
        ({"train_micro_batch_size_per_gpu": "auto"}, 5, (5, 1)),
        ({"train_batch_size": 32, "gradient_accumulation_steps": 2}, 3, (3, 2)),
    ],
)
def test_the_batch_follows_the_configuration_or_the_option(
    write: Write, native: dict[str, Any], option: int | None, expected: tuple[int, int]
) -> None:
    [group] = groups([write("batch", {}, **native)], micro_batch=option)
    assert (group.workload.micro_batch, group.workload.accumulation) == expected


def test_a_file_without_the_section_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "plain.json"
    path.write_text('{"train_micro_batch_size_per_gpu": 2}')
    with pytest.raises(ConfigError, match=f'has no /{SECTION}, .* write "{SECTION}": {{}}'):
        groups([str(path)])


@pytest.mark.parametrize(
    ("micro_batch", "accumulation", "pipeline", "share"),
    [(4, 1, 1, (1, 4)), (2, 3, 1, (3, 2)), (2, 4, 2, (2, 2)), (4, 1, 2, (1, 2)), (2, 3, 2, (1, 3))],
)
def test_each_process_computes_an_equal_share(
    write: Write, micro_batch: int, accumulation: int, pipeline: int, share: tuple[int, int]
) -> None:
    [group] = groups([write("plain", {})])
    work = replace(group.workload, micro_batch=micro_batch, accumulation=accumulation, pipeline=pipeline)
    assert work.share == share
    count, size = share
    assert count * size * pipeline == micro_batch * accumulation


def test_a_batch_that_ranks_cannot_share_is_refused(write: Write) -> None:
    [group] = groups([write("plain", {})])
    with pytest.raises(ConfigError, match="3 sequences x 1 micro-batches are not a multiple of the 2 ranks"):
        _ = replace(group.workload, micro_batch=3, pipeline=2).share


def test_a_file_without_a_batch_is_refused(write: Write) -> None:
    with pytest.raises(ConfigError, match=r"train_micro_batch_size_per_gpu is 'auto'; .*--micro-batch N"):
        groups([write("auto", {}, train_micro_batch_size_per_gpu="auto")])


def test_ranks_that_divide_sequences_share_a_batch(write: Write) -> None:
    path = write("parts", {}, sequence_parallel_size=2)
    [group] = groups([path], "deepspeed")
    assert group.workload.sequence == 2
    assert replace(group.workload, micro_batch=4, accumulation=1).share == (1, 2)
    with pytest.raises(ConfigError, match="--peers ddp: cannot divide sequences"):
        groups([path], "ddp")


def test_a_group_survives_json(write: Write) -> None:
    [group] = groups([write("plain", {"parallelism": {"pipeline": 2, "partition": "uniform"}})], "deepspeed", "ddp")
    assert Group.from_json(json.loads(json.dumps(asdict(group)))) == group


def test_an_invalid_section_is_reported_with_its_file(write: Write) -> None:
    files = [write("good", {}), write("wrong", {"gradients": {"bit": 4}})]
    with pytest.raises(ConfigError, match=r"^--config .*wrong.json: 1 problem .*\n.*/gradients/bit: unknown key"):
        groups(files)
