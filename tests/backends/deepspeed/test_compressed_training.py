"""Compressed training in every engine: replicas stay equal, the loss falls, and all precisions and options work."""

import pytest
import torch

import deepspeed_compress
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, Outcome, network, train
from tests.support.methods import BF16, FP32_SUMS, METHODS, NO_MOMENTUM, WITHOUT_MOMENTUM, by_stage

SAMPLED = pytest.mark.sampled(8)


STEPS = {"randomk": 80}
"""Number of steps for methods that learn slowly. After 40 steps, random-k has 0.4 to 0.9 of the first loss."""


def outcomes(ranks: int, **job) -> list:
    return [outcome for (outcome,) in run_forks(ranks, train, Job(**job))]


def assert_learned(results: list) -> None:
    """Check that the replicas are bit-identical and that the loss of rank 0 fell."""
    first = results[0]
    assert all(result.parameters == first.parameters for result in results)
    early, late = first.losses[:10], first.losses[-10:]
    assert sum(late) < 0.8 * sum(early)


@SAMPLED
@pytest.mark.parametrize(("stage", "names"), by_stage(list(METHODS)))
def test_replicas_agree_and_learn(stage, names):
    """Methods run one after the other in the same processes."""
    jobs = [Job(stage=stage, section={"gradients": METHODS[name]}, steps=STEPS.get(name, 40)) for name in names]
    for results in zip(*run_forks(2, train, *jobs), strict=True):
        assert_learned(list(results))


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_replicas_agree_and_learn_with_own_values_of_deepspeed(stage):
    assert_learned(outcomes(2, stage=stage, section={"gradients": METHODS["int4_stochastic"]}, steps=40, defaults=True))


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_methods_with_a_momentum_of_their_own(stage):
    jobs = [Job(stage, {"gradients": method}, extra=NO_MOMENTUM, steps=40) for method in WITHOUT_MOMENTUM.values()]
    for results in zip(*run_forks(2, train, *jobs), strict=True):
        assert_learned(list(results))


def attach_with_momentum(rank: int, method: str) -> None:
    """Attach to an engine whose configuration names no optimizer, so that only the engine shows the momentum."""
    model, config = network(), Job(stage=2, section={"gradients": WITHOUT_MOMENTUM[method]}).config()
    del config["optimizer"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    config["zero_allow_untested_optimizer"] = True
    deepspeed_compress.initialize(model=model, optimizer=optimizer, config=config)


@pytest.mark.parametrize("method", WITHOUT_MOMENTUM)
def test_momentum_is_not_applied_twice(method):
    with pytest.raises(RankError, match=r"(?s)ConfigError.*momentum"):
        outcomes(2, stage=2, section={"gradients": WITHOUT_MOMENTUM[method]})
    with pytest.raises(RankError, match=r"(?s)UnsupportedError.*momentum.*betas: \[0\.0"):
        run_forks(2, attach_with_momentum, method)


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("inside", ["none", "blockwise"])
def test_two_levels(stage, inside):
    hierarchy = {"ranks_per_node": 2, "inside": {"method": inside}}
    section = {"gradients": {"bits": 4, "block_size": 32, "hierarchy": hierarchy}}
    assert_learned(outcomes(4, stage=stage, section=section, steps=40, accumulation=2))


@SAMPLED
@pytest.mark.parametrize("size", [3, 4])
def test_nodes_that_do_not_fit(size):
    section = {"gradients": {"hierarchy": {"ranks_per_node": size}}}
    with pytest.raises(RankError, match="hierarchy/ranks_per_node"):
        outcomes(4, stage=2, section=section)


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_three_ranks(stage):
    assert_learned(outcomes(3, stage=stage, section={"gradients": METHODS["int8"]}, steps=40))


@SAMPLED
@pytest.mark.parametrize("stage", [0, 2])
def test_same_seed_same_bits(stage):
    job = Job(stage=stage, section={"gradients": METHODS["int4_stochastic"], "seed": 5})
    other = Job(stage=stage, section={"gradients": METHODS["int4_stochastic"], "seed": 6})
    first, second, third = run_forks(2, train, job, job, other)[0]
    assert first == second
    assert first != third


def train_after_garbage(rank: int, *jobs: Job) -> list[Outcome]:
    """Run the jobs with garbage in memory that nobody has written, and NaN in what torch leaves uninitialized."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    found = []
    for job in jobs:
        garbage = [torch.full((size,), rank + 0.5) for size in (1, 3, 16, 60, 200, 600, 2000) for _ in range(30)]
        del garbage
        found += train(rank, job)
    return found


WEIGHTS = {"weights": {"bits": 8, "block_size": 32}}
LATER_ENGINES = [
    Job(2, {"gradients": METHODS["int4_stochastic"]}, extra=BF16),
    Job(2, {"gradients": METHODS["int8"], **WEIGHTS}, extra=BF16),
    Job(2, {"gradients": METHODS["topk_int4"], "weights": {**WEIGHTS["weights"], "overlap": True}}, extra=BF16),
    Job(1, {"gradients": METHODS["int2"], **WEIGHTS}, zero={"overlap_comm": True}),
    Job(1, {"gradients": METHODS["percentile"]}),
    Job(0, {"gradients": METHODS["qsgd"]}),
    Job(0, {"gradients": METHODS["powersgd"]}),
]


def test_bits_depend_on_neither_earlier_engines_nor_uninitialized_memory():
    """Not on those without ZeRO 3, which leaves its own `torch.nn.functional.linear` in the process."""
    forward = run_forks(2, train, *LATER_ENGINES)
    assert run_forks(2, train_after_garbage, *LATER_ENGINES[::-1]) == [found[::-1] for found in forward]
    of_stage_3 = [Job(3, job.section) for job in LATER_ENGINES[:2]]
    forward = run_forks(2, train, *of_stage_3)
    assert run_forks(2, train_after_garbage, *of_stage_3[::-1]) == [found[::-1] for found in forward]


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_overlapped_reductions(stage):
    section, zero = {"gradients": METHODS["int8"]}, {"overlap_comm": True}
    assert_learned(outcomes(2, stage=stage, zero=zero, section=section, steps=40, accumulation=2))


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_bf16(stage):
    assert_learned(outcomes(2, stage=stage, extra=BF16, section={"gradients": METHODS["int8"]}, steps=40))


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2])
def test_bf16_with_fp32_accumulation(stage):
    """With fp32 accumulation, ZeRO 1 becomes DeepSpeed's BF16_Optimizer, which reduces on the path of ZeRO 0."""
    job = {"stage": stage, "extra": FP32_SUMS, "steps": 40, "accumulation": 2}
    assert_learned(outcomes(2, **job, section={"gradients": METHODS["int8"]}))


@SAMPLED
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_optimizer_offload(stage):
    zero = {"offload_optimizer": {"device": "cpu"}}
    extra = {"zero_force_ds_cpu_optimizer": False, "zero_allow_untested_optimizer": True}
    assert_learned(outcomes(2, stage=stage, zero=zero, extra=extra, section={"gradients": METHODS["int8"]}, steps=40))


@SAMPLED
@pytest.mark.parametrize("method", ["int8", "topk_int4"])
@pytest.mark.parametrize("stage", [0, 1])
def test_pipeline(stage, method):
    """Both stages hold the tied matrix. Its copies must stay equal, and so must the replicas of a stage."""
    section = {"parallelism": {"pipeline": 2}, "gradients": METHODS[method]}
    results = outcomes(4, stage=stage, stages=2, section=section, steps=40, accumulation=2)
    assert results[0].parameters == results[1].parameters
    assert results[2].parameters == results[3].parameters
    tied = [[value for name, value in result.parameters.items() if "tied" in name] for result in results]
    assert tied[0]
    assert tied[0] == tied[2]
    assert results[0].losses[-1] < results[0].losses[0]
