"""Features of the package, each in a short training of two or four ranks."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.feature_settings import FEATURES, NODES
from tests.gpu.plugin import needs
from tests.gpu.ranks import PACKAGES, Outcome, backend_here, run_ranks
from tests.gpu.runs import Run

RecordProperty = Callable[[str, object], None]
Results = Mapping[str, tuple[Run, str]]
"""Results of the ranks that completed a feature, and what ended them prematurely, by feature."""

RANKS = {2: FEATURES, 4: tuple(NODES)}
"""Features by number of ranks."""
_CASES = [pytest.param(ranks, one, id=one) for ranks, every in RANKS.items() for one in every]
PATIENCE = 25
"""Seconds after which a feature hangs. Kernels of Triton may have to be compiled first."""
ENVIRONMENT = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    # Muon's compiled kernels depend on the shapes that came before, and compiling takes long.
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="module")
def results(
    device: torch.device, seconds_left: Callable[[], float], tmp_path_factory: pytest.TempPathFactory
) -> Results:
    """Results of all features. If ranks end prematurely, further ones try the features after the last one."""
    until = time.monotonic() + 0.95 * seconds_left()
    found: dict[str, tuple[Run, str]] = {}
    for ranks, features in RANKS.items():
        remaining = list(features)
        while remaining and time.monotonic() < until:
            directory = tmp_path_factory.mktemp("features")
            outcome = _run_on(device.type, ranks, remaining, directory, until - time.monotonic())
            completed = results_of(outcome, remaining, ranks)
            found |= completed
            remaining = remaining[len(completed) :]
    return found


def _run_on(device: str, ranks: int, features: list[str], directory: Path, seconds: float) -> Outcome:
    job = {"device": device, "backend": backend_here(device, ranks), "directory": str(directory)}
    job |= {"features": features, "patience": PATIENCE}
    return run_ranks(ranks, "tests.gpu.features:try_features", job, seconds, ENVIRONMENT)


def results_of(outcome: Outcome, features: list[str], ranks: int) -> Results:
    """Return the results of features up to the first one that not all ranks completed, or that ended all of them."""
    found: dict[str, tuple[Run, str]] = {}
    run: Run = ()
    for name in features:
        failed = any(one["error"] for one in run)
        run = [one for rank in outcome.results for one in rank if one["feature"] == name]
        if failed and not run:
            return found
        found[name] = run, outcome.trouble or "not all ranks got there"
        if len(run) < ranks:
            return found
    return found


def problem_of(run: Run, trouble: str, ranks: int) -> str:
    """Return what is wrong with a feature, or ""."""
    if errors := [one["error"] for one in run if one["error"]]:
        return str(errors[0])
    if len(run) < ranks:
        return trouble
    if run[0]["skip"]:
        return ""
    if len({one["weights"] for one in run}) > 1:
        return "ranks have different weights"
    losses = run[0]["losses"]
    falls = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    return "" if falls else f"the loss does not fall: {losses}"


@pytest.mark.gpu
@needs(*PACKAGES, "transformers")
@pytest.mark.parametrize(("ranks", "feature"), _CASES)
def test_feature(ranks: int, feature: str, results: Results, record_property: RecordProperty) -> None:
    record_property("goal", "loss falls, ranks agree")
    if feature not in results:
        pytest.skip("the time was up before")
    run, trouble = results[feature]
    problem = problem_of(run, trouble, ranks)
    assert not problem, problem
    if run[0]["skip"]:
        pytest.skip(run[0]["skip"])
    losses, figure = run[0]["losses"], run[0]["figure"]
    whole = f"loss {losses[0]:.4g} to {losses[-1]:.4g}, {run[0]['seconds']:.1f} s"
    record_property("figure", f"{whole}, {figure}" if figure else whole)


def result(**changes: Any) -> dict[str, Any]:
    return {"feature": "a", "losses": [2.0, 1.0], "weights": "w", "figure": "", "error": "", "skip": ""} | changes


@pytest.mark.parametrize(
    ("second", "problem"),
    [
        (result(), ""),
        (result(weights="v"), "ranks have different weights"),
        (result(error="no"), "no"),
        (None, "a rank ended"),
    ],
)
def test_ranks_must_agree(second: Any, problem: str) -> None:
    outcome = Outcome(((result(),), () if second is None else (second,)), "a rank ended")
    run, trouble = results_of(outcome, ["a", "b"], 2)["a"]
    assert problem_of(run, trouble, 2) == problem


def test_features_after_one_that_hangs_are_tried_again() -> None:
    outcome = Outcome(((result(), result(feature="b", error="alone")), (result(),)), "hangs")
    found = results_of(outcome, ["a", "b", "c"], 2)
    assert list(found) == ["a", "b"]
    assert problem_of(*found["a"], 2) == ""
    assert problem_of(*found["b"], 2) == "alone"
