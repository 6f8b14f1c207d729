"""Best layouts with each setting of compression, over rates of the network."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.search import Candidate, Job, search

Sweep = Mapping[str, Mapping[float, Candidate]]
"""Best candidate by setting and by rate. Rates at which nothing fits are missing."""


def is_plain(layout: Layout) -> bool:
    """Return True if nothing is compressed, and there are no islands."""
    return not layout.compressed


def has_islands(layout: Layout) -> bool:
    """Return True if groups of replicas train independently between exchanges."""
    return layout.islands > 1


@dataclass(frozen=True, slots=True)
class Bits:
    """Setting of layouts with these bits of gradients, and of weights where they are gathered over the network."""

    gradients: int
    weights: int

    def __call__(self, layout: Layout) -> bool:
        """Return True if a layout has these bits."""
        weights = self.weights if layout.zero and not layout.shard_within else 0
        return (layout.gradient_bits, layout.weight_bits) == (self.gradients, weights)


Setting = Callable[[Layout], bool]
BITS: Mapping[str, Setting] = {
    "uncompressed": is_plain,
    "8 bits": Bits(8, 8),
    "4 bits": Bits(4, 4),
    "3 bits, weights 4": Bits(3, 4),
    "islands": has_islands,
}
"""Bits in both directions: gradients, and gathered weights."""


def best(found: Iterable[Candidate]) -> dict[str, Candidate]:
    """Return the candidate with the fewest days for each of `BITS` that any of them has."""
    fastest: dict[str, Candidate] = {}
    for one in sorted(found, key=lambda one: one.days):
        for name, has in BITS.items():
            if has(one.layout):
                fastest.setdefault(name, one)
    return fastest


def over_network(job: Job, rates: Iterable[float]) -> Sweep:
    """Return the best candidates for each of `BITS`, with nodes that send `rates` bytes per second."""
    found: dict[str, dict[float, Candidate]] = {name: {} for name in BITS}
    for rate in rates:
        plan = search(replace(job, cluster=replace(job.cluster, network=rate)))
        for name, one in best(plan.fitting).items():
            found[name][rate] = one
    return found
