"""Best layouts with each setting of compression, over numbers of GPUs and over rates of the network."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.search import Candidate, Job, search

Sweep = Mapping[str, Mapping[float, Candidate]]
"""Best candidate by setting and by the figure that varies. Figures for which nothing fits are missing."""


def is_plain(layout: Layout) -> bool:
    """Return True if nothing is compressed, and there are no islands."""
    return not layout.compressed


def is_compressed(layout: Layout) -> bool:
    """Return True if gradients or weights are compressed, without islands."""
    return layout.compressed and layout.islands == 1


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
KINDS: Mapping[str, Setting] = {"uncompressed": is_plain, "compressed": is_compressed, "islands": has_islands}
"""Kinds of layouts: a job chooses one before its start, and cannot change it."""
BITS: Mapping[str, Setting] = {
    "uncompressed": is_plain,
    "8 bits": Bits(8, 8),
    "4 bits": Bits(4, 4),
    "3 bits, weights 4": Bits(3, 4),
    "islands": has_islands,
}
"""Bits in both directions: gradients, and gathered weights."""


def best(found: Iterable[Candidate], settings: Mapping[str, Setting]) -> dict[str, Candidate]:
    """Return the candidate with the fewest days for each setting that any of them has."""
    fastest: dict[str, Candidate] = {}
    for one in sorted(found, key=lambda one: one.days):
        for name, has in settings.items():
            if has(one.layout):
                fastest.setdefault(name, one)
    return fastest


def over_gpus(job: Job, counts: Iterable[int], settings: Mapping[str, Setting] = KINDS) -> Sweep:
    """Return the best candidates of the same job on other numbers of GPUs."""
    return _sweep({count: replace(job, cluster=replace(job.cluster, gpus=count)) for count in counts}, settings)


def over_network(job: Job, rates: Iterable[float], settings: Mapping[str, Setting] = BITS) -> Sweep:
    """Return the best candidates with nodes that send `rates` bytes per second."""
    return _sweep({rate: replace(job, cluster=replace(job.cluster, network=rate)) for rate in rates}, settings)


def _sweep(jobs: Mapping[float, Job], settings: Mapping[str, Setting]) -> Sweep:
    found: dict[str, dict[float, Candidate]] = {name: {} for name in settings}
    for figure, job in jobs.items():
        for name, one in best(search(job).fitting, settings).items():
            found[name][figure] = one
    return found
