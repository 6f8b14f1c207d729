"""Synthetic results and candidates for tests of the search."""

from collections.abc import Mapping

from deepspeed_compress.tools.tune.search import Result, Round, Rung
from deepspeed_compress.tools.tune.space import BASELINE, Candidate

LAST = Rung(1, 30, gap=0.01, slack=0.0)
BASE = Result(BASELINE, "finished", loss=2.0, step_ms=100.0, bytes=1000.0, seconds=10.0)


def result(name: str, gap: float, step_ms: float, sent: float = 100.0) -> Result:
    """Return a finished result whose loss exceeds that of `BASE` by the fraction `gap`."""
    return Result(name, "finished", loss=2.0 * (1 + gap), step_ms=step_ms, bytes=sent, seconds=10.0)


def a_round(*results: Result, rung: Rung = LAST, baseline: Result = BASE) -> Round:
    return Round(rung, {one.name: one for one in (baseline, *results)})


def candidates(*names: str) -> list[Candidate]:
    """Return candidates, baseline first."""
    sections: Mapping[str, Mapping[str, object]] = {"gradients": {"method": "none"}}
    return [Candidate(BASELINE, sections), *(Candidate(name, {}) for name in names)]
