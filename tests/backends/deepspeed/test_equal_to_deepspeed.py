"""Settings that must not change results: bit for bit against DeepSpeed alone, in the same processes."""

import pytest

from tests.support.forks import run_forks
from tests.support.jobs import Job, data, engines, run, train, weights
from tests.support.methods import BF16, NONE, RAW

pytestmark = pytest.mark.sampled(4)


def assert_identical(ranks: int, job: dict, section: dict) -> None:
    for plain, ours in run_forks(ranks, train, Job(**job), Job(**job, section=section)):
        assert plain == ours


def assert_identical_pipelines(job: dict, section: dict) -> None:
    """Compare runs in new processes, because DeepSpeed keeps the pipeline's groups in module state."""
    job = {"stages": 2, **job}
    assert run_forks(4, train, Job(**job)) == run_forks(4, train, Job(**job, section=section))


@pytest.mark.parametrize("section", [NONE, RAW], ids=["none", "uncompressed"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_own_values_of_deepspeed(stage, section):
    assert_identical(2, {"stage": stage, "accumulation": 2, "steps": 5, "defaults": True}, section)


@pytest.mark.case_a_stage
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("stage", [0, 1])
def test_method_none_in_a_pipeline(stage, accumulation):
    assert_identical_pipelines({"stage": stage, "accumulation": accumulation, "steps": 20}, NONE)


@pytest.mark.parametrize(
    "zero",
    [
        {},
        {"overlap_comm": True},
        {"reduce_scatter": False},
        {"round_robin_gradients": True},
    ],
    ids=lambda zero: next(iter(zero), "default"),
)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_uncompressed_exchange(stage, zero):
    """Two addends give the same bits in either order, so our sums must equal DeepSpeed's."""
    if stage == 3:
        zero = {key: value for key, value in zero.items() if key != "round_robin_gradients"}
    assert_identical(2, {"stage": stage, "zero": zero, "accumulation": 2}, RAW)


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_uncompressed_exchange_in_a_pipeline(stage):
    assert_identical_pipelines({"stage": stage, "accumulation": 2}, RAW)


@pytest.mark.parametrize(
    "extra",
    [{"prescale_gradients": True}, {"gradient_predivide_factor": 4.0}, {"gradient_allreduce_op": "sum"}],
    ids=lambda extra: next(iter(extra)),
)
@pytest.mark.parametrize("stage", [0, 2])
@pytest.mark.filterwarnings("ignore:.*matches every parameter:deepspeed_compress.CompressWarning")
def test_scaling_options(stage, extra):
    assert_identical(2, {"stage": stage, "zero": {"reduce_scatter": False}, "extra": extra}, RAW)


def copies(rank, *jobs):
    """Return the number of copies of gradients into one tensor, and the weights, of each job."""
    found = []
    for job, engine in engines(*jobs):
        flattened, original = [], engine.flatten

        def flatten(bucket, original=original, flattened=flattened):
            flattened.append(len(bucket))
            return original(bucket)

        engine.flatten = flatten
        run(engine, data(0, job))
        found.append((len(flattened), weights(engine)))
    return found


@pytest.mark.parametrize(
    ("extra", "alone"),
    [
        ({}, True),
        ({"prescale_gradients": True}, True),
        ({"gradient_predivide_factor": 3.0}, False),
        ({"communication_data_type": "fp16"}, False),
        ({"fp16": {"enabled": True, "initial_scale_power": 4}}, True),
        (BF16, True),
    ],
    ids=lambda value: next(iter(value), "fp32") if isinstance(value, dict) else "",
)
def test_a_single_rank_keeps_its_gradients_where_they_are(extra, alone):
    [(plain, ours)] = run_forks(1, copies, Job(extra=extra), Job(extra=extra, section=NONE))
    assert plain[1] == ours[1]
    assert plain[0] > 0
    assert ours[0] == (0 if alone else plain[0])


def test_warm_up_is_dense():
    schedule = {"gradients": {"bits": 4}, "schedule": {"warmup_steps": 4}}
    assert_identical(2, {"stage": 2, "steps": 4}, schedule)


def test_compression_begins_after_the_warm_up():
    schedule = {"gradients": {"bits": 4}, "schedule": {"warmup_steps": 4}}
    plain, ours = run_forks(2, train, Job(stage=2, steps=7), Job(stage=2, steps=7, section=schedule))[0]
    assert plain.losses[:5] == ours.losses[:5]
    assert plain.losses[5:] != ours.losses[5:]
