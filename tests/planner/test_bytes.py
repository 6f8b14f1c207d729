"""Bytes that the planner predicts for gloo, next to those that training counts."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import pytest
import torch.distributed as dist

from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import Job
from deepspeed_compress.tools.bench.gauges import join
from deepspeed_compress.tools.bench.step_rank import measure_group
from deepspeed_compress.tools.bench.workload import Group, group_contenders
from tests.planner.jobs import job
from tests.support.forks import run_forks

MODEL = Path("configs/models/gpt_1m.json").absolute()
COUNTERS = {
    "gradients": "bytes_sent",
    "updated weights": "bytes_weights",
    "gathered weights": "bytes_weights",
    "persistent weights": "bytes_weights",
    "messages between stages": "bytes_pipeline",
    "tied embedding": "bytes_tied",
}
"""Counter of each term."""


def measured(rank: int, group: Group) -> list[dict[str, float]]:
    """Return the counters of all ranks."""
    join()
    rows: list[dict[str, list[dict[str, float]]]] = []
    measure_group(group, {None: 1}, rows.append, lambda _: None)
    dist.destroy_process_group()
    return rows[0]["traffic"]


def predicted(toy: Job, layout: Layout) -> Counter[str]:
    sizes: Counter[str] = Counter()
    for term in toy.predict(layout).terms:
        if term.name in COUNTERS:
            sizes[COUNTERS[term.name]] += round(term.inside + term.outside)
    return sizes


def layouts() -> Iterator[Layout]:
    for zero in range(4):
        for gradients, weights in ((0, 0), (4, 0), (4, 4)):
            if zero or not weights:
                yield Layout(1, 1, 2, zero, 1, 2, gradient_bits=gradients, weight_bits=weights)
    for gradients, weights in ((0, 0), (4, 4)):
        yield Layout(1, 2, 2, 1, 1, 2, gradient_bits=gradients, weight_bits=weights)


def means_of_the_fullest_stage(counters: Sequence[Mapping[str, float]], layout: Layout) -> dict[str, float]:
    """Return the mean over the ranks of the stage that sends most. Ranks of a stage are neighbors."""
    stages = [counters[first : first + layout.data] for first in range(0, layout.ranks, layout.data)]
    return {name: max(fmean(rank[name] for rank in stage) for stage in stages) for name in set(COUNTERS.values())}


@pytest.mark.sampled(15)
@pytest.mark.parametrize("layout", list(layouts()), ids=str)
def test_predicted_bytes_are_those_that_training_counts(layout: Layout, tmp_path: Path) -> None:
    toy = job(
        f"{layout.ranks}xCPU", "1gbit", read_model(MODEL), per_node=layout.ranks, seq=64, batch=layout.batch, tokens=1e9
    )
    file = tmp_path / f"{layout}.json"
    file.write_text(json.dumps(ds_config(layout, toy.cluster)))
    sizes = {"micro_batch": None, "seq_len": toy.seq, "seed": 0}
    [group] = group_contenders([str(file)], str(MODEL), (), sizes, layout.ranks)
    counters = run_forks(layout.ranks, measured, group)[0]
    fullest = means_of_the_fullest_stage(counters, layout)
    assert fullest == pytest.approx({name: predicted(toy, layout)[name] for name in fullest}, rel=0.01)
