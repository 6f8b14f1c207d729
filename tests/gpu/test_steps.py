"""Training with every ZeRO stage, whose results must not depend on the timing of streams and messages."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tests.gpu.plugin import needs
from tests.gpu.ranks import PACKAGES, Outcome, backend_here, run_ranks
from tests.gpu.runs import difference_of, problem_in_mirror, problem_of, run_of

pytestmark = [pytest.mark.gpu, needs(*PACKAGES)]
RecordProperty = Callable[[str, object], None]

RANKS, NODE, NODES = 2, 2, 2
SEEDS = (None, None, 1, 2)
"""Seeds of pauses: two undisturbed runs, which must be equal to compare the others with, and two disturbed ones."""
AGAIN, LATE = (1,), (2, 3)
REPEATABLE = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
BLOCKED = "CUDA_LAUNCH_BLOCKING"
GOAL = "the same bits"
SHARE = 0.6
"""Share of the time left that each of the following programs may take."""

every_stage = pytest.mark.parametrize("stage", [0, 1, 2, 3], ids="ZeRO {}".format)


@pytest.fixture(scope="module")
def plain(device: torch.device, seconds_left: Callable[[], float]) -> Outcome:
    """Runs of two ranks, without and with pauses."""
    job = {"device": device.type, "backend": backend_here(device.type, RANKS), "seeds": SEEDS}
    return run_ranks(RANKS, "tests.gpu.programs:train", job, SHARE * seconds_left(), REPEATABLE)


@pytest.fixture(scope="module")
def sharded(device: torch.device, seconds_left: Callable[[], float]) -> Outcome:
    """Runs of two nodes of two ranks, without and with pauses."""
    ranks = NODES * NODE
    job = {"device": device.type, "backend": backend_here(device.type, ranks), "seeds": SEEDS, "node": NODE}
    return run_ranks(ranks, "tests.gpu.programs:train_nodes", job, SHARE * seconds_left(), REPEATABLE)


@pytest.fixture(scope="module")
def mirrored(device: torch.device, seconds_left: Callable[[], float]) -> Outcome:
    """Runs of one rank and its image, with messages that arrive at once and late."""
    job = {"device": device.type, "backend": "late_mirror", "seeds": SEEDS}
    return run_ranks(1, "tests.gpu.programs:train_in_mirror", job, SHARE * seconds_left(), REPEATABLE)


@pytest.fixture(scope="module")
def blocking(device: torch.device, seconds_left: Callable[[], float]) -> Outcome:
    """Run of two ranks whose hosts wait for every kernel."""
    if device.type != "cuda":
        pytest.skip("needs CUDA")
    job = {"device": device.type, "backend": backend_here(device.type, RANKS), "seeds": (None,)}
    return run_ranks(RANKS, "tests.gpu.programs:train", job, SHARE * seconds_left(), {**REPEATABLE, BLOCKED: "1"})


@every_stage
def test_trains(stage: int, plain: Outcome, device: torch.device, record_property: RecordProperty) -> None:
    record_property("goal", "equal weights on all ranks")
    run = run_of(plain, stage, 0)
    problem = problem_of(run, RANKS, plain.trouble)
    assert not problem, problem
    losses = run[0]["losses"]
    record_property("figure", f"loss {losses[0]:.4g} to {losses[-1]:.4g}, {backend_here(device.type, RANKS)}")


@every_stage
def test_again(stage: int, plain: Outcome, record_property: RecordProperty) -> None:
    compare(stage, plain, plain, AGAIN, record_property)


@every_stage
def test_streams_late_at_random(stage: int, plain: Outcome, record_property: RecordProperty) -> None:
    compare(stage, plain, plain, LATE, record_property)


@every_stage
def test_launches_that_block(stage: int, plain: Outcome, blocking: Outcome, record_property: RecordProperty) -> None:
    compare(stage, plain, blocking, (0,), record_property)


def compare(
    stage: int, plain: Outcome, other: Outcome, numbers: Sequence[int], record_property: RecordProperty
) -> None:
    """Fail if runs of `other` differ from the first one of `plain`."""
    record_property("goal", GOAL)
    first = run_of(plain, stage, 0)
    if wrong := problem_of(first, RANKS, plain.trouble):
        pytest.skip(wrong)
    difference = difference_of(first, [run_of(other, stage, number) for number in numbers], RANKS, other.trouble)
    assert not difference, difference
    record_property("figure", f"runs: {len(numbers)}")


@pytest.mark.parametrize("stage", [1, 2, 3], ids="ZeRO {}".format)
def test_nodes_with_streams_late_at_random(
    stage: int, sharded: Outcome, device: torch.device, record_property: RecordProperty
) -> None:
    """Shards travel to the other node during backward."""
    record_property("goal", GOAL)
    first, *others = (run_of(sharded, stage, number) for number in range(len(SEEDS)))
    difference = difference_of(first, others, NODES * NODE, sharded.trouble)
    assert not difference, difference
    record_property("figure", f"runs: {len(SEEDS)}, {backend_here(device.type, NODES * NODE)}")


@every_stage
def test_messages_late_at_random_in_a_mirror(stage: int, mirrored: Outcome, record_property: RecordProperty) -> None:
    record_property("goal", GOAL)
    problem = problem_in_mirror(mirrored, stage, len(SEEDS))
    assert not problem, problem
    record_property("figure", f"runs: {len(SEEDS) - 1}")
