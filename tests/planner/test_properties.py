"""Properties that hold for every plan, whatever the constants are."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest

from deepspeed_compress.planner.gpus import Constants
from deepspeed_compress.planner.layout import Layout, Layouts, Recompute
from deepspeed_compress.planner.search import GAIN, Job, search
from deepspeed_compress.planner.software import SOFTWARE
from tests.planner.jobs import LLAMA_1B, LLAMA_7B, TOY, job, layout

SMALL = job("16xA100", "10gbit", LLAMA_1B, batch=16, seq=2048)


def days(jobs: Sequence[Job]) -> list[float]:
    return [search(one).candidates[0].days for one in jobs]


def falls(values: Sequence[float]) -> bool:
    """Return True if no value exceeds one before it. Compression that gains less than `GAIN` is left out."""
    return all(after <= before * (1 + 2 * GAIN) for before, after in itertools.pairwise(values))


def test_more_bandwidth_never_takes_longer() -> None:
    assert falls(days([replace(SMALL, cluster=replace(SMALL.cluster, network=rate)) for rate in (1e9, 1e10, 1e11)]))
    gpus = [replace(SMALL.cluster.gpu, link_rate=rate) for rate in (1e10, 1e12)]
    assert falls(days([replace(SMALL, cluster=replace(SMALL.cluster, gpu=gpu)) for gpu in gpus]))


@pytest.mark.parametrize("bits", [0, 4])
def test_more_gpus_never_need_more_memory_with_zero_3(bits: int) -> None:
    sizes = []
    for nodes in (1, 2, 4, 32, 1250):
        one = layout(data=8 * nodes, zero=3, accumulation=1, gradient_bits=bits, weight_bits=bits)
        sizes.append(job(f"{8 * nodes}xH100", "100gbit").memory(one).total)
    assert sizes == sorted(sizes, reverse=True)


def test_compression_gains_nothing_if_messages_take_no_time() -> None:
    fast = replace(SMALL.cluster, network=1e30, gpu=replace(SMALL.cluster.gpu, link_rate=1e30))
    at_once = replace(SMALL, cluster=fast, constants=Constants(delay=1e-12))
    layouts = Layouts(fast, at_once.model, at_once.batch)
    for plain in [one for one in layouts.plain() if one.micro == 1]:
        alone = at_once.predict(plain).seconds
        for variant in layouts.compressed(plain):
            assert at_once.predict(variant).seconds >= alone * (1 - 1e-9), variant


def test_an_interval_holds_the_sum_of_the_terms() -> None:
    for one in search(SMALL).fitting:
        prediction = one.prediction
        assert prediction.interval[0] < sum(term.seconds for term in prediction.terms) < prediction.interval[1]
        assert all(0 <= term.seconds <= term.busy * (1 + 1e-9) for term in prediction.terms)


@pytest.mark.parametrize(
    ("tensor", "sequence_parallel", "recompute", "factor"),
    [
        (1, False, "none", 34 + 80),
        (8, False, "none", 10 + 24 / 8 + 80 / 8),
        (8, True, "none", 34 / 8 + 80 / 8),
        (8, True, "selective", 34 / 8),
        (8, False, "selective", 10 + 24 / 8),
    ],
)
def test_activations_are_those_of_2205_05198(
    tensor: int, sequence_parallel: bool, recompute: Recompute, factor: float
) -> None:
    """Bytes per layer of s x b x h tokens: table 2, with 5 a s / h = 80 for 22B."""
    model = replace(TOY, layers=48, hidden=6144, heads=64, kv_heads=64, head_size=96, ffn=4 * 6144, dropout=True)
    software = replace(SOFTWARE["megatron"], attention=0)
    one = Layout(tensor, 1, 1, 0, 4, 1, recompute, sequence_parallel=sequence_parallel, engine="megatron")
    seq = round(80 * 6144 / 5 / 64)
    found = job("8xA100", "1gbit", model, software=software, seq=seq).memory(one)
    assert found.activations == pytest.approx(48 * 4 * seq * 6144 * factor)


def test_attention_counts_half_of_the_pairs() -> None:
    """Six operations per weight and token, and half of the twelve per pair and element (2205.05198, appendix A)."""
    weights = 32 * (4 * 4096**2 + 3 * 4096 * 11008) + 4096 * 32000
    pairs = 32 * 12 * 4096 * 2048 / 2
    assert LLAMA_7B.flops_per_token(2048) == 6 * weights + pairs


def test_more_memory_never_takes_longer() -> None:
    gpus = [replace(SMALL.cluster.gpu, memory=size) for size in (2e10, 4e10, 1.6e11)]
    assert falls(days([replace(SMALL, cluster=replace(SMALL.cluster, gpu=gpu)) for gpu in gpus]))


def test_the_order_does_not_depend_on_what_was_predicted_before() -> None:
    # Copies, because a job keeps what it has predicted.
    first, second = (search(replace(SMALL)) for _ in range(2))
    assert [one.layout for one in first.candidates] == [one.layout for one in second.candidates]
    for one in first.candidates:
        alone = replace(SMALL).candidate(one.layout)
        assert alone.days == pytest.approx(one.days, rel=1e-12)
