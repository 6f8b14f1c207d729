"""Jobs of islands under DeepSpeed: sections of a configuration, and what ranks do with them."""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from deepspeed_compress.local_sgd.coordinator.client import status
from tests.support.coordinators import become_island, coordinator, own_ports
from tests.support.forks import run_forks
from tests.support.jobs import Job, weights

T = TypeVar("T")
SGD: Mapping[str, Any] = {
    "optimizer": {"type": "SGD", "params": {"lr": 0.05}},
    "gradient_clipping": 0.0,
    "zero_allow_untested_optimizer": True,
}
Weights = dict[str, list[float]]
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


def run_apart(count: int, work: Callable[..., T], job: Job, *args: Any, size: int = 1, **islands: Any) -> list[T]:
    """Run `work(rank, job, *args)` on all ranks of `count` islands, each a job of its own with `size` ranks.

    Ranks count on from island to island. All of them share a coordinator, which ends with this call.

    Args:
        count: number of islands.
        work: function to run.
        job: run of an island. Its section is added to that of `elastic_section`.
        args: further arguments of `work`.
        size: ranks of an island.
        islands: arguments of `elastic_section`. An island may be silent for long, since the machine may be busy.

    Returns:
        The results in rank order.
    """
    with coordinator() as address, own_ports(count) as ports:
        patient = {"timeout": "60 s", "give_up": "300 s", **islands}
        given = replace(job, section={**elastic_section(address, **patient), **(job.section or {})})
        return run_forks(count * size, _in_island, work, given, args, size, ports)


def _in_island(rank: int, work: Callable[..., T], job: Job, args: tuple[Any, ...], size: int, ports: list[int]) -> T:
    become_island(rank, size, ports)
    return work(rank, job, *args)


@dataclass
class Exchanges:
    """Exchanges of a rank, by version of the anchor.

    Attributes:
        before: weights before each exchange.
        after: weights after it.
        samples: samples since the exchange before.
    """

    before: dict[int, Weights] = field(default_factory=dict)
    after: dict[int, Weights] = field(default_factory=dict)
    samples: dict[int, int] = field(default_factory=dict)

    def check_means(self, other: "Exchanges") -> None:
        """Check that uncompressed exchanges were means, weighted by samples, of this rank's weights and `other`'s."""
        versions = self.after.keys() & other.after.keys()
        assert len(versions) >= 2
        for version in versions:
            assert self.after[version] == other.after[version]
            assert self.before[version] != other.before[version]
            # An island that waits for the other one's exchange may have taken another number of steps.
            share = self.samples[version] / (self.samples[version] + other.samples[version])
            for name, mean in self.after[version].items():
                pairs = zip(self.before[version][name], other.before[version][name], strict=True)
                assert mean == pytest.approx([share * a + (1 - share) * b for a, b in pairs], abs=1e-5)


def watch_exchanges(engine: Any) -> Exchanges:
    """Return the exchanges in rounds that `engine` takes part in, which are added as they end."""
    seen, exchange = Exchanges(), engine.compression.islands.exchange
    step_ended = exchange.step_ended

    def watched(samples: int) -> Any:
        before = weights(engine)
        result = step_ended(samples)
        if result is not None and result.kind == "exchange":
            seen.before[exchange.version], seen.after[exchange.version] = before, weights(engine)
            seen.samples[exchange.version] = samples - sum(seen.samples.values())
        return result

    exchange.step_ended = watched
    return seen


def wait_for(marks: Path, name: str, count: int = 1) -> None:
    """Wait until `count` files whose names begin with `name` exist in `marks`."""
    while len(list(marks.glob(f"{name}*"))) < count:
        time.sleep(0.02)


def wait_for_islands(address: str, count: int) -> None:
    """Wait until `count` islands are connected to the coordinator at `address`."""
    while len(status(address)["islands"]) < count:
        time.sleep(0.02)
