"""Configurations that the planner writes are valid, whatever the layout."""

import json

import pytest

from deepspeed_compress.planner.files import command, ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.layouts import Layouts
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import lint_text
from tests.planner.jobs import LLAMA_7B, job

CLUSTER = job("32xA100", "100gbit").cluster


def kinds() -> dict[str, Layout]:
    """Return one layout of every kind of configuration."""
    layouts = Layouts(CLUSTER, LLAMA_7B, 256)
    plain = [one for one in layouts.plain() if one.engine == "deepspeed"]
    every = [*plain, *(variant for one in plain for variant in layouts.compressed(one))]
    found: dict[tuple[object, ...], Layout] = {}
    for one in every:
        sizes = (one.tensor > 1, one.pipeline > 1, one.zero, bool(one.shard_within), one.recompute, one.islands > 1)
        found.setdefault((*sizes, one.data * one.tensor > CLUSTER.per_node, one.gradient_bits, one.weight_bits), one)
    return {str(one): one for one in found.values()}


def test_no_configuration_has_findings() -> None:
    found = {}
    for name, layout in kinds().items():
        text = json.dumps(ds_config(layout, CLUSTER), indent=2)
        findings = lint_text(text, context=Context(world_size=layout.ranks))
        found |= {f"{name} {one.code}": one.message for one in findings}
    assert found == {}
    assert len(kinds()) > 150


@pytest.mark.parametrize("program", ["deepspeed", "hf"])
def test_the_command_starts_every_node(program: str) -> None:
    text = command(CLUSTER, "config.json", 4096, 100, program)
    assert "$NODE_RANK" in text
    alone = command(job("8xA100", "100gbit").cluster, "config.json", 4096, 100, program)
    assert "NODE_RANK" not in alone
    one_of_them = command(CLUSTER, "config.json", 4096, 100, program, hosts=True)
    assert "hostfile" in one_of_them
    assert "NODE_RANK" not in one_of_them
