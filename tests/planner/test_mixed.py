"""GPUs of several kinds in one job, and documents that are packed in place of padded."""

from collections.abc import Sequence

import pytest
import torch

from deepspeed_compress.planner.choices import divide, fastest_alone, packing_gain
from deepspeed_compress.planner.cluster import read_cluster
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.search import Job as PlannedJob
from deepspeed_compress.planner.search import search
from tests.planner.jobs import LLAMA_1B, job
from tests.support.forks import run_forks
from tests.support.jobs import WIDTH, Job, make_engine, network, train_on, weights

LAYOUT = Layout(1, 1, 16, 1, 2, 8)


def mixed(gpus: str = "8xA100+8xL4", network: str = "100gbit") -> PlannedJob:
    return job(gpus, network, LLAMA_1B, seq=2048, batch=256)


def test_a_step_at_equal_batches_is_that_of_the_slowest_gpus() -> None:
    """An L4 is worse than an A100 in everything: rates, memory, and link."""
    both, slow, fast = (mixed(gpus).predict(LAYOUT).seconds for gpus in ("8xA100+8xL4", "16xL4", "2x8xA100"))
    assert both == slow > 2 * fast
    cluster = mixed().cluster
    assert cluster.gpu.memory == read_cluster("1xL4", "1gbit").gpu.memory
    assert cluster.peak == pytest.approx(8 * (312e12 + 121e12))
    assert str(cluster) == "8 A100-80 + 8 L4 in 2 nodes of 8, 100 Gbit/s per node"


def test_each_figure_is_the_worst_one() -> None:
    """A 4090 computes faster than an L4 and has slightly more memory, but its link is slower."""
    gpu = read_cluster("8x4090+8xL4", "1gbit").gpu
    assert (gpu.peak, gpu.memory, gpu.link_rate) == (121e12, 23.7e9, 16e9)


def test_one_kind_that_is_written_twice_is_one_kind() -> None:
    assert read_cluster("8xA100+8xA100-80GB", "1gbit") == read_cluster("16xA100", "1gbit")


def test_gpus_without_bf16_make_all_train_in_fp16() -> None:
    found = ds_config(LAYOUT, read_cluster("8xV100+8xA100", "1gbit"))
    assert "fp16" in found
    assert "bf16" not in found


def test_all_kinds_end_together_and_compute_the_whole_batch() -> None:
    plan = mixed()
    (slow, fast), gain = divide(plan, plan.candidate(LAYOUT))
    assert (slow.gpu.name, fast.gpu.name) == ("L4", "A100-80")
    assert 8 * slow.sequences + 8 * fast.sequences == pytest.approx(plan.batch)
    assert slow.sequences * slow.seconds == pytest.approx(fast.sequences * fast.seconds)
    assert 1 < gain < slow.seconds / fast.seconds


def test_sequences_of_tensor_ranks_are_those_of_their_replica() -> None:
    plan = mixed()
    kinds, _ = divide(plan, plan.candidate(Layout(4, 1, 4, 1, 2, 32)))
    assert sum(2 * kind.sequences for kind in kinds) == pytest.approx(plan.batch)


def test_fast_gpus_alone_may_be_faster_than_with_slow_ones() -> None:
    plan = mixed()
    gain, part = fastest_alone(plan, search(plan)) or (0.0, plan.cluster)
    assert (gain > 1, part.gpu.name, part.gpus, part.kinds) == (True, "A100-80", 8, ())
    alike = mixed("8xA100+8xA100-40")
    gain, part = fastest_alone(alike, search(alike)) or (1.0, alike.cluster)
    assert gain < 1


def packed(seq: int, mean_length: int) -> float:
    padded = job("16xA100", "100gbit", LLAMA_1B, seq=seq, batch=256, mean_length=mean_length)
    return packing_gain(padded, padded.candidate(LAYOUT))


def test_packing_trains_the_padding_and_spares_attention_between_documents() -> None:
    assert packed(2048, 2048) == pytest.approx(1)
    assert 4 < packed(2048, 512) < 4.5
    assert packed(32768, 8192) > 5


def test_padding_makes_a_run_longer() -> None:
    full, padded = (job("16xA100", "100gbit", LLAMA_1B, seq=2048, batch=256, mean_length=length) for length in (0, 512))
    days = [one.candidate(LAYOUT).days for one in (full, padded)]
    assert days[1] == pytest.approx(4 * days[0])


def train(rank: int, stage: int, sizes: Sequence[int]) -> dict[str, list[float]]:
    """Return the weights after three steps in which ranks have `sizes` of the same sequences."""
    engine, found = make_engine(network(), Job(stage).config()), torch.Generator().manual_seed(0)
    for _ in range(3):
        own = torch.split(torch.randn(sum(sizes), WIDTH, generator=found), list(sizes))[rank]
        train_on(engine, engine(own).square().mean() * sizes[rank] * len(sizes) / sum(sizes))
    return weights(engine)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_deepspeed_trains_with_batches_that_differ_between_ranks(stage: int) -> None:
    """With the factor of the loss that the output of `plan cluster` names."""
    [equal, _], [found, _] = (run_forks(2, train, stage, sizes) for sizes in ((4, 4), (7, 1)))
    assert found.keys() == equal.keys()
    for name, values in found.items():
        assert values == pytest.approx(equal[name], abs=1e-4)
