"""Which slots of which hosts the ranks of a start get."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

__all__ = ["Host", "Placement", "place"]


@dataclass(frozen=True)
class Host:
    """A host that is there. `slots`: numbers of places for a rank, such as those of GPUs, which are not lost."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Hosts by node rank, each with the slots that its ranks get."""

    hosts: tuple[Host, ...]

    @property
    def world(self) -> int:
        """Ranks in all."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Of the host `node`."""
        return sum(len(host.slots) for host in self.hosts[:node])


def place(
    hosts: Sequence[Host], nodes: int, ranks: int, fits: Callable[[int], bool], former: Placement | None = None
) -> Placement | None:
    """The largest placement on at most `nodes` of `hosts`, with as many ranks on each, at most `ranks`.

    None where there is none: `fits` says which numbers of ranks in all may train; all of them always may. Hosts of the
    `former` placement come before others, at the node ranks that they had, so that others take over for the lost.
    """
    before = [host.name for host in former.hosts] if former is not None else []
    ordered = sorted(hosts, key=lambda host: host.name not in before)
    for count, each in _shapes(nodes, ranks):
        able = [Host(host.name, host.slots[:each]) for host in ordered if len(host.slots) >= each]
        if len(able) >= count and (count * each == nodes * ranks or fits(count * each)):
            return Placement(_in_former_order(able[:count], before))
    return None


def _shapes(nodes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """(hosts, ranks on each), most ranks first, of those most hosts."""
    shapes = [(count, each) for count in range(1, nodes + 1) for each in range(1, ranks + 1)]
    yield from sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)


def _in_former_order(chosen: Sequence[Host], before: Sequence[str]) -> tuple[Host, ...]:
    """Those that were there keep their places where the number of hosts is the same; else their order."""
    if len(before) != len(chosen):
        return tuple(sorted(chosen, key=lambda host: before.index(host.name) if host.name in before else len(before)))
    known = {host.name: host for host in chosen}
    new = iter([host for host in chosen if host.name not in before])
    return tuple(known[name] if name in known else next(new) for name in before)
