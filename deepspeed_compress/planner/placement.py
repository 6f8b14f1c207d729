"""Order of nodes, so that ranks that communicate most are close to each other."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.layout import Layout


@dataclass(frozen=True, slots=True)
class Node:
    """Node of a cluster.

    Attributes:
        name: Name of the host.
        switches: Switches above it, from the top of the network; none if all nodes share one.
    """

    name: str
    switches: tuple[str, ...] = ()


def read_nodes(file: Path, cluster: Cluster) -> list[Node]:
    """Return the nodes in `file`, which has a line for each: its name, and switches such as "hall1/rack2".

    Raises:
        ConfigError: The file cannot be read, a line is none, a name occurs twice, or the cluster has other nodes.
    """
    try:
        lines = [line.split() for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--nodes {file}: cannot be read: {error}; write the path of a text file") from error
    nodes = [Node(words[0], tuple(path for word in words[1:] for path in word.split("/"))) for words in lines if words]
    if any(len(words) > 2 for words in lines) or len({node.name for node in nodes}) < len(nodes):
        raise ConfigError(f'--nodes {file}: must name each node once; write a line such as "node1 hall1/rack2" for it')
    if len(nodes) != cluster.nodes:
        raise ConfigError(
            f"--nodes {file}: has {len(nodes)} nodes, but {cluster} has {cluster.nodes}; list all of them"
        )
    return nodes


def ring_order(nodes: Sequence[Node]) -> list[Node]:
    """Return the nodes with all of those below a switch next to each other.

    A ring in this order enters and leaves what is below a switch once, so it crosses each link between switches twice.
    """
    return sorted(nodes, key=lambda node: node.switches)


def hostfile(nodes: Sequence[Node], cluster: Cluster, layout: Layout) -> Iterator[str]:
    """Yield the lines of a hostfile, in ring order. Ranks follow it: tensor ranks, then replicas, then stages."""
    for number, node in enumerate(ring_order(nodes)):
        ranks = range(number * cluster.per_node, (number + 1) * cluster.per_node)
        first, last = (divmod(rank // layout.tensor, layout.data) for rank in (ranks[0], ranks[-1]))
        places = (f"stage {stage}, replica {replica}" for stage, replica in dict.fromkeys((first, last)))
        yield f"# ranks {ranks[0]} to {ranks[-1]}: {' to '.join(places)}"
        yield f"{node.name} slots={cluster.per_node}"
