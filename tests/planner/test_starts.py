"""Every kind of configuration that the planner writes starts: a step of a toy model on two nodes of two ranks."""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout, Layouts
from deepspeed_compress.planner.model import Model
from deepspeed_compress.tools.bench.gauges import join
from deepspeed_compress.tools.bench.systems import make, tokens
from deepspeed_compress.tools.bench.workload import Group, group_contenders
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import lint_text
from tests.support.forks import run_forks

TOY = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 64}
TOY |= {"num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 16}
SHAPE = Model("toy", "llama", 4, 32, 4, 2, 8, 64, gated=True, vocab=64, tied=False)
CLUSTER = read_cluster("4xA100", "1gbit", per_node=2)
BATCH, SEQ = 8, 16
TOGETHER = 3
"""Jobs that share their processes."""


def division(layout: Layout) -> tuple[int, int]:
    return (layout.tensor, layout.pipeline)


def kinds() -> list[Layout]:
    """Return one layout of every kind of configuration."""
    layouts = Layouts(CLUSTER, SHAPE, BATCH)
    plain = list(layouts.plain())
    found: dict[tuple[object, ...], Layout] = {}
    variants = [variant for one in plain for variant in layouts.compressed(one)]
    for one in (*plain, *variants):
        settings = (one.zero, one.shard_within, one.recompute, one.islands, one.gradient_bits, one.weight_bits)
        found.setdefault((*division(one), *settings), one)
    return list(found.values())


def jobs() -> list[list[Layout]]:
    """Return the layouts in lists of at most `TOGETHER`, which divide the model alike."""
    found = []
    for wanted in sorted(set(map(division, kinds()))):
        alike = [kind for kind in kinds() if division(kind) == wanted]
        count = -(-len(alike) // TOGETHER)
        # Neighbors differ by little, so each list takes some of every stage.
        found += [alike[index::count] for index in range(count)]
    return found


def start(rank: int, groups: Sequence[Group]) -> dict[str, float]:
    """Take a step with every configuration, and return the losses by name."""
    os.environ |= {"LOCAL_WORLD_SIZE": str(CLUSTER.per_node), "LOCAL_SIZE": str(CLUSTER.per_node)}
    join()
    losses = {}
    for group in groups:
        for contender in group.contenders:
            system = make(group.workload, contender)
            loss = system.stepper.train(tokens(group.workload, system.share))
            losses[contender.name] = float(loss)
            system.close()
    dist.destroy_process_group()
    return losses


@pytest.mark.sampled(80)
@pytest.mark.parametrize("layouts", jobs(), ids=lambda found: str(found[0]))
def test_every_kind_starts_and_passes_the_linter(layouts: list[Layout], tmp_path: Path) -> None:
    model, files = tmp_path / "toy.json", []
    model.write_text(json.dumps(TOY))
    for layout in layouts:
        text = json.dumps(ds_config(layout, CLUSTER))
        assert lint_text(text, context=Context(world_size=layout.ranks)) == []
        files.append(str(tmp_path / f"{layout}.json"))
        Path(files[-1]).write_text(text)
    sizes: dict[str, Any] = {"micro_batch": None, "seq_len": SEQ, "seed": 0}
    groups = group_contenders(files, str(model), (), sizes, CLUSTER.gpus)
    results = run_forks(CLUSTER.gpus, start, groups, shared_memory=layouts[0].tensor > 1)
    assert set(results[0]) == set(map(str, layouts))
    expected = float(torch.tensor(float(SHAPE.vocab)).log())
    assert all(abs(loss / expected - 1) < 0.1 for losses in results for loss in losses.values())
