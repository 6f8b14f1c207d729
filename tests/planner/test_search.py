"""Rankings on typical clusters, and the limits of the search."""

import time
from dataclasses import replace

import pytest

from deepspeed_compress.planner.layout import Layouts
from deepspeed_compress.planner.search import search
from deepspeed_compress.planner.software import SOFTWARE
from tests.planner.jobs import LLAMA_1B, LLAMA_7B, LLAMA_70B, job


def test_a_slow_network_needs_compression_or_islands() -> None:
    plan = search(job("16xA100", "5gbit", batch=256))
    plain = min(candidate.days for candidate in plan.candidates if not candidate.layout.compressed)
    assert plan.candidates[0].layout.compressed
    assert plan.candidates[0].days < 0.7 * plain


def test_one_gpu_per_host_at_1_gbit_is_limited_by_the_network() -> None:
    plan = search(job("4x4090", "1gbit", LLAMA_1B, batch=128, seq=2048, tokens=20e9, per_node=1))
    assert plan.candidates[0].layout.gradient_bits in (3, 4)
    assert plan.candidates[0].layout.tensor == 1
    assert plan.candidates[0].prediction.share("network") > 0.3


def test_70b_on_64_gpus_is_divided() -> None:
    plan = search(job("64xH100", "100gbit", LLAMA_70B))
    first = plan.recommended.layout
    assert first.zero == 3 or first.tensor * first.pipeline > 1
    assert all(candidate.verdict != "does not fit" for candidate in plan.candidates)
    assert plan.refused["does not fit into memory"] > 100


def test_the_fastest_come_first_and_each_kind_once() -> None:
    plan = search(job("64xH100", "100gbit"))
    days = [candidate.days for candidate in plan.candidates]
    assert days == sorted(days)
    assert len({str(candidate.layout) for candidate in plan.candidates}) == len(days)
    assert plan.is_tied(plan.candidates[0])
    assert not plan.is_tied(plan.candidates[-1])


def test_only_megatron_interleaves() -> None:
    plan, own = (search(job("64xH100", "100gbit", LLAMA_70B, software=SOFTWARE[name])) for name in ("hf", "megatron"))
    assert all(
        candidate.layout.virtual == 1 and not candidate.layout.sequence_parallel for candidate in plan.candidates
    )
    assert {candidate.layout.engine for candidate in own.candidates} == {"megatron"}
    assert any(one.layout.virtual > 1 for one in own.fitting)


def test_all_layouts_use_all_gpus_and_the_batch() -> None:
    layouts = Layouts(job("64xH100", "100gbit").cluster, LLAMA_7B, 1024)
    found = list(layouts.plain())
    found += [variant for plain in found[:200] for variant in layouts.compressed(plain)]
    assert {(one.ranks, one.batch) for one in found} == {(64, 1024)}
    assert not [one for one in found if one.zero >= 2 and one.pipeline > 1]
    assert not [one for one in found if one.islands > 1 and one.island_size * one.tensor % 8]


@pytest.mark.parametrize(
    ("batch", "reason"), [(1000, "replicas do not divide the batch"), (64, "fewer micro-batches than stages")]
)
def test_refusals_are_counted_by_reason(batch: int, reason: str) -> None:
    layouts = Layouts(job("64xH100", "100gbit").cluster, LLAMA_7B, batch)
    list(layouts.plain())
    assert layouts.refused[reason] > 0


def test_layouts_that_a_program_cannot_start_are_not_proposed() -> None:
    """Trainer has no pipelines, Megatron has equal stages, and a hierarchy needs nodes with equally many replicas."""
    trainer = search(job("16xA100", "100gbit", software=SOFTWARE["hf"]))
    assert {one.layout.pipeline for one in trainer.fitting} == {1}
    odd = replace(LLAMA_7B, layers=30)
    cluster = job("24xA100", "100gbit").cluster
    assert {one.pipeline for one in Layouts(cluster, odd, 768, "megatron").plain()} == {1, 3, 6}
    assert {one.pipeline for one in Layouts(cluster, odd, 768).plain()} == {1, 3, 6, 12, 24}


def test_ten_thousand_gpus_take_seconds() -> None:
    start = time.process_time()
    plan = search(job("10240xH100", "8x400gbit", LLAMA_70B, batch=10240))
    assert plan.candidates
    assert time.process_time() - start < 10


def test_one_node_needs_neither_islands_nor_many_bits_saved() -> None:
    plan = search(job("8xA100", "100gbit", batch=256))
    plain = min(one.days for one in plan.candidates if not one.layout.compressed)
    assert plan.candidates[0].layout.islands == 1
    assert plan.candidates[0].days > 0.97 * plain


def test_islands_are_kept_apart() -> None:
    """They train in another way, so they are never the answer to a question that did not ask for them."""
    plan = search(job("16xA100", "10gbit", batch=256))
    assert plan.islands
    assert {one.layout.islands for one in plan.candidates} == {1}
    assert plan.islands[0].days < plan.candidates[0].days
    assert plan.recommended.layout.islands == 1
    assert not [one for one in plan.islands if one.layout.islands == 1]
