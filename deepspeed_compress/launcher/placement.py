"""Placement of the ranks of a start on slots of hosts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Host:
    """Connected host. `slots` are the numbers of its usable slots for ranks, such as GPUs."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Hosts by node rank, each with the slots of its ranks."""

    hosts: tuple[Host, ...]

    @property
    def world(self) -> int:
        """Return the total number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Return the first rank of the host `node`."""
        return sum(len(host.slots) for host in self.hosts[:node])


def place(
    hosts: Sequence[Host], nodes: int, ranks: int, fits: Callable[[int], bool], former: Placement | None = None
) -> Placement | None:
    """Return the largest placement on at most `nodes` of `hosts`, with the same number of ranks on each.

    Hosts of the `former` placement are preferred and keep their node ranks. New hosts take the places of lost ones.

    Args:
        hosts: the connected hosts.
        nodes: largest number of hosts.
        ranks: largest number of ranks on each host.
        fits: returns True if this total number of ranks may train. `nodes` x `ranks` always may.
        former: the previous placement.

    Returns:
        The placement; None if there is none.
    """
    before = [host.name for host in former.hosts] if former is not None else []
    ordered = sorted(hosts, key=lambda host: host.name not in before)
    for count, each in _shapes(nodes, ranks):
        able = [Host(host.name, host.slots[:each]) for host in ordered if len(host.slots) >= each]
        if len(able) >= count and (count * each == nodes * ranks or fits(count * each)):
            return Placement(_in_former_order(able[:count], before))
    return None


def _shapes(nodes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (hosts, ranks on each), in the order of decreasing total ranks, and then of decreasing hosts."""
    shapes = [(count, each) for count in range(1, nodes + 1) for each in range(1, ranks + 1)]
    yield from sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)


def _in_former_order(chosen: Sequence[Host], before: Sequence[str]) -> tuple[Host, ...]:
    """Order `chosen` by former node ranks. New hosts fill the gaps if the number of hosts is the same, or come last."""
    if len(before) != len(chosen):
        return tuple(sorted(chosen, key=lambda host: before.index(host.name) if host.name in before else len(before)))
    known = {host.name: host for host in chosen}
    new = iter([host for host in chosen if host.name not in before])
    return tuple(known[name] if name in known else next(new) for name in before)
