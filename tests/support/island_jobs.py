"""Jobs of islands under DeepSpeed: sections of a configuration, and what ranks do with them."""

import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import CompressWarning
from tests.support.jobs import Job, Outcome, data, run, start, weights

SGD: Mapping[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
HEAD = r"^4\."
"""Pattern of a layer in the middle; under ZeRO 1 its owner has other layers too."""


def section(**islands: Any) -> Mapping[str, Any]:
    """Return the section for islands of one job."""
    return {"gradients": {"method": "none"}, "monitor": {"announce": False}, "islands": islands}


def elastic_section(
    address: str, minimum: int = 2, give_up: str = "20 s", timeout: str = "5 s", **islands: Any
) -> Mapping[str, Any]:
    """Return the section for islands that exchange in rounds."""
    elastic = {"rendezvous": address, "timeout": timeout, "minimum": minimum, "give_up": give_up}
    exchange = {"method": "blockwise", "bits": 4}
    return section(**{"sync_every": 3, "exchange": exchange, **islands, "elastic": elastic})


def train(rank: int, *jobs: Job) -> list[Outcome]:
    """Return losses and final weights of each job."""
    outcomes = []
    for job in jobs:
        engine = start(job)
        outcomes.append(Outcome(run(engine, data(rank, job)), weights(engine)))
        engine.destroy()
    return outcomes


def largest(one: Mapping[str, list[float]], other: Mapping[str, list[float]]) -> float:
    """Return the largest difference between two sets of weights."""
    return max(max(abs(a - b) for a, b in zip(one[name], other[name], strict=True)) for name in one)


def warned(rank: int, job: Job) -> list[str]:
    """Return the texts of the warnings that the start of `job` raises."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always", CompressWarning)
        start(job)
    return [str(one.message) for one in found if issubclass(one.category, CompressWarning)]


def wait_for(marks: Path, name: str, count: int = 1) -> None:
    """Wait until `count` files whose names begin with `name` exist in `marks`."""
    while len(list(marks.glob(f"{name}*"))) < count:
        time.sleep(0.02)
