"""Parts 5 to 7: what is made of what ranks say."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.collectives import exchange
from deepspeed_compress.collectives.exchange import PendingExchange
from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.language_model import judge_losses, judge_times
from deepspeed_compress.tools.gpu_check.profile import covered, shares
from deepspeed_compress.tools.gpu_check.ranks import Said, run_ranks
from deepspeed_compress.tools.gpu_check.sanitizer import summary
from deepspeed_compress.tools.gpu_check.steps import judge, judge_image, train_in_mirror

ROOT = Path(__file__).parents[3]
ON_GPU, ON_CPU = Task("cuda", 60, Path()), Task("cpu", 60, Path())


def run(number: int, **other: Any) -> dict[str, Any]:
    return {"stage": 1, "run": number, "losses": [2.0, 1.0], "weights": "abc", "error": ""} | other


def said(*changes: tuple[int, int, dict[str, Any]], runs: int = 4, trouble: str = "") -> Said:
    """Two ranks with equal results of all runs, but for `changes`: (rank, run, what differs)."""
    results = [[run(number) for number in range(runs)] for _ in range(2)]
    for rank, number, other in changes:
        results[rank][number] |= other
    return Said(tuple(map(tuple, results)), trouble)


def verdicts(found: Said) -> list[str]:
    return [one.verdict for one in judge(1, found, on_gpu=True)]


def test_equal_runs_pass() -> None:
    assert verdicts(said()) == ["pass"] * 3


@pytest.mark.parametrize("other", [{"weights": "abd"}, {"losses": [2.0, 1.0000001]}])
@pytest.mark.parametrize(("number", "expected"), [(1, ["pass", "fail", "pass"]), (3, ["pass", "pass", "fail"])])
def test_other_bits_are_found(number: int, other: dict[str, Any], expected: list[str]) -> None:
    assert verdicts(said((0, number, other), (1, number, other))) == expected


def test_ranks_that_part_are_found() -> None:
    [first, *others] = judge(1, said((1, 0, {"weights": "abd"})), on_gpu=True)
    assert (first.verdict, first.why) == ("fail", "ranks have different weights")
    assert [one.verdict for one in others] == ["not run"] * 2


@pytest.mark.parametrize("losses", [[1.0, 2.0], [1.0, float("nan")]])
def test_a_loss_that_does_not_fall_is_found(losses: list[float]) -> None:
    assert verdicts(said((0, 0, {"losses": losses}), (1, 0, {"losses": losses})))[0] == "fail"


def test_a_crash_on_the_way_leaves_what_was_found_before() -> None:
    found = list(judge(1, said(runs=2, trouble="a rank ended with status 1: no memory"), on_gpu=True))
    assert [one.verdict for one in found] == ["pass", "pass", "fail"]
    assert found[2].why == "a rank ended with status 1: no memory"


def image(*weights: str, error: str = "") -> Said:
    return Said((tuple(run(number, weights=one, error=error) for number, one in enumerate(weights)),), "")


@pytest.mark.parametrize(
    ("weights", "verdict"),
    [("aaaa", "pass"), ("aaab", "fail"), ("abaa", "fail"), ("aaa", "fail")],
)
def test_late_messages_must_not_change_a_bit(weights: str, verdict: str) -> None:
    assert judge_image(1, image(*weights)).verdict == verdict
    assert judge_image(1, image(*weights, error="no such operation")).verdict == "fail"


@dataclass(frozen=True)
class Careless(PendingExchange):
    """Does not wait."""

    def wait_for(self, source: int) -> None:
        self.receives.pop(source, None)


def careless(job: Any) -> Any:
    """On a rank: train while nobody waits for messages."""
    exchange.PendingExchange = Careless  # type: ignore[misc]
    yield from train_in_mirror(job)


@pytest.mark.slow
def test_a_step_that_does_not_wait_is_found() -> None:
    job = {"device": "cpu", "backend": "mirror", "seeds": (None, None, 1, 2)}
    environment = {"PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    good, bad = (
        run_ranks(1, work, job, 200, environment)
        for work in ("deepspeed_compress.tools.gpu_check.steps:train_in_mirror", f"{__name__}:careless")
    )
    assert [judge_image(stage, good).verdict for stage in range(4)] == ["pass"] * 4
    assert all(judge_image(stage, bad).verdict == "fail" for stage in range(4)), bad


def timed(plain: float, compressed: float) -> Said:
    return Said((({"seconds": [plain] * 3 + [9.0]}, {"seconds": [compressed] * 3}),), "")


@pytest.mark.parametrize(("compressed", "verdict"), [(0.102, "pass"), (0.104, "missed")])
def test_the_step_is_held_against_its_goal(compressed: float, verdict: str) -> None:
    assert judge_times(timed(0.1, compressed), ON_GPU).verdict == verdict
    assert judge_times(timed(0.1, compressed), ON_CPU).verdict == "not run"


def test_a_step_that_was_not_measured_is_no_success() -> None:
    assert judge_times(Said(((),), "ended at its limit"), ON_GPU).verdict == "fail"


def learnt(*losses: list[float], trouble: str = "") -> Said:
    return Said((tuple({"losses": one} for one in losses),) * 2, trouble)


@pytest.mark.parametrize(("last", "verdict"), [(1.01, "pass"), (1.05, "missed"), (0.9, "missed")])
def test_losses_are_compared_at_the_end(last: float, verdict: str) -> None:
    plain, compressed = judge_losses(learnt([5.0] * 20 + [1.0] * 10, [5.0] * 20 + [last] * 10), ON_GPU)
    assert (plain.verdict, compressed.verdict) == ("pass", verdict)
    assert plain.figure == "5.0000 to 1.0000, 30 steps"


def test_losses_of_one_run_alone_are_no_success() -> None:
    [finding] = judge_losses(learnt([5.0, 1.0]), ON_GPU)
    assert finding.verdict == "fail"


def span(name: str, cat: str, ts: float, dur: float, tid: int = 1) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "ts": ts, "dur": dur, "tid": tid}


EVENTS = [
    span("gpu_check.step", "user_annotation", 0, 100),
    span("gpu_check.step", "gpu_user_annotation", 5, 90),
    span("deepspeed_compress.compress", "user_annotation", 0, 50),
    span("deepspeed_compress.compress", "gpu_user_annotation", 10, 4),
    span("deepspeed_compress.compress", "gpu_user_annotation", 12, 4),
    span("deepspeed_compress.decompress", "gpu_user_annotation", 20, 1),
    span("deepspeed_compress.communicate", "user_annotation", 40, 20),
    span("gemm", "kernel", 0, 60, tid=7),
    span("gemm", "kernel", 50, 20, tid=7),
    span("Memcpy", "gpu_memcpy", 0, 30, tid=8),
    {"ph": "i", "name": "mark", "ts": 3},
]


def test_shares_of_a_step() -> None:
    assert shares(EVENTS, on_gpu=True) == pytest.approx(
        {
            "our kernels, sender": 0.06,
            "our kernels, receiver": 0.01,
            "the exchange": 0.2,
            "the compute stream is idle": 0.3,
        }
    )
    assert shares(EVENTS, on_gpu=False)["our kernels, sender"] == pytest.approx(0.5)


def test_time_that_is_shared_counts_once() -> None:
    spans = [span("", "", 0, 10), span("", "", 2, 3), span("", "", 8, 4), span("", "", 20, 1)]
    assert covered(spans) == 13
    assert covered([]) == 0


@pytest.mark.parametrize(
    ("text", "verdict", "figure"),
    [
        ("========= ERROR SUMMARY: 0 errors\n", "pass", "0 errors in 1 comparisons"),
        (
            "========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n",
            "pass",
            "0 errors in 1 comparisons",
        ),
        (
            "========= Invalid __global__ write, error\n========= ERROR SUMMARY: 3 errors\n",
            "fail",
            "3 errors in 1 comparisons",
        ),
        ("========= Error: no device\n", "fail", ""),
    ],
)
def test_what_the_sanitizer_says(text: str, verdict: str, figure: str) -> None:
    finding = summary("memcheck", text, [Finding("cast", "pass")])
    assert (finding.verdict, finding.figure) == (verdict, figure)
    assert summary("memcheck", text, [Finding("cast", "fail", why="differs")]).verdict == "fail"


def test_ranks_that_cannot_begin_are_trouble() -> None:
    found = run_ranks(2, "no_such_module:work", {"backend": "gloo"}, 120, {"DS_ACCELERATOR": "cpu"})
    assert found.results == ((), ())
    assert "No module named 'no_such_module'" in found.trouble
