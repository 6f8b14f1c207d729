"""Shards on their way to other nodes on GPUs: no data race, no memory freed too early, and one wait on the host."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from deepspeed.accelerator import get_accelerator

from deepspeed_compress.backends.deepspeed.gradients.background import MeansStream
from deepspeed_compress.backends.deepspeed.gradients.early import EarlyReductions
from tests.support.early import Seen, check_equal, early_of, ordinary, train_both
from tests.support.forks import run_forks
from tests.support.jobs import Job, data, run, start
from tests.support.methods import FP32_SUMS

pytestmark = pytest.mark.sampled(6)
SECTION = {"gradients": {"bits": 4, "block_size": 32, "min_numel": 0}, "parallelism": {"shard_within": 2}}
TWO = {"accumulation": 2}
OF_ZERO_3 = {
    "aten.cat.out reads on side, which does not wait for default",
    "memory of an earlier operation on default is reused while side uses it",
}
"""Races of DeepSpeed itself under ZeRO 3. Its streams are named "side"."""
MEANS = "means"
"""Name of the stream of a `MeansStream`."""


def job(stage: int, overlap: bool = True, **options: Any) -> Job:
    return Job(stage, SECTION, {"overlap_comm": overlap}, **options)


def named_early_of(engine: Any) -> EarlyReductions:
    early = early_of(engine)
    assert isinstance(early._background, MeansStream)
    early._background._stream.name = MEANS
    return early


def train(rank: int, one: Job, fault: Callable[[], Any] = nullcontext) -> tuple[tuple[Seen, Seen], set[str]]:
    """Train with and without exchanges during backward, and return what was seen and the races."""
    from tests.support.cuda_paths import on_streams

    with on_streams() as gpu, fault():
        seen = train_both(rank, one, ordinary, named_early_of, 100)
    return seen, set(gpu.problems)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize(
    ("stage", "options"),
    [(1, {}), (1, TWO), (2, {}), (2, TWO), (2, {"extra": FP32_SUMS, **TWO}), (3, {}), (3, TWO)],
)
def test_streams_wait_for_each_other(stage: int, options: dict[str, Any], overlap: bool) -> None:
    ranks = run_forks(4, train, job(stage, overlap, **options))
    check_equal([seen for seen, _ in ranks])
    for (early, _), races in ranks:
        assert races <= (OF_ZERO_3 if stage == 3 else set())
        assert early.buckets > 1
        assert early.under_way == [early.buckets] * 3
        assert early.agreed == [True] * 3


def alone(rank: int) -> set[str]:
    from tests.support.cuda_paths import on_streams

    one = replace(job(3), section=None)
    with on_streams() as gpu:
        engine = start(one)
        run(engine, data(rank, one))
        engine.destroy()
    return set(gpu.problems)


@pytest.mark.slow
def test_the_races_of_deepspeed_are_there_without_us() -> None:
    assert run_forks(4, alone) == [OF_ZERO_3] * 4


def copied_elsewhere() -> Any:
    """Copy gradients on the current stream, whichever has computed them."""
    return patch.object(MeansStream, "filling", lambda self: nullcontext())


def unawaited_copies() -> Any:
    return patch.object(MeansStream, "sending", lambda self: get_accelerator().stream(self._stream))


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (copied_elsewhere, "on default, which does not wait for side"),
        (unawaited_copies, f"on {MEANS}, which does not wait for side"),
    ],
)
def test_missing_synchronization_is_detected(fault: Callable[[], Any], found: str) -> None:
    for _, races in run_forks(4, train, job(2), fault):
        assert any(found in race for race in races), races


def waiting(rank: int, one: Job, directory: str) -> set[str]:
    """Return the waits in unmeasured steps that exchange during backward."""
    from tests.support.cuda_paths import on_streams
    from tests.support.host_waits import HostWaits

    monitor = {"every": 100, "announce": False, "path": directory}
    with on_streams():
        engine = start(replace(one, section={**SECTION, "monitor": monitor}))
        batches = data(rank, one)
        run(engine, batches[:2])
        with HostWaits() as waits:
            run(engine, batches[2:])
        assert early_of(engine)._history.order
        engine.destroy()
    return waits.found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_host_waits_once_for_the_agreement(stage: int, tmp_path: Path) -> None:
    agreement = "backends/deepspeed/gradients/early.py:_agree: _local_scalar_dense"
    assert run_forks(4, waiting, job(stage), str(tmp_path)) == [{agreement}] * 4
