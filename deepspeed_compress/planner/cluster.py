"""A cluster: its GPUs, its nodes, their order, and the network between them."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.gpus import Gpu, find_gpu
from deepspeed_compress.planner.layout import Layout

MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal nodes with equal GPUs.

    Attributes:
        gpu: Type of all GPUs.
        gpus: Number of GPUs.
        per_node: GPUs in a node, which share the node's network.
        network: Bytes per second, in each direction, of all network cards of a node together.
    """

    gpu: Gpu
    gpus: int
    per_node: int
    network: float

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.per_node)

    def __str__(self) -> str:
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.per_node}"
        network = f", {self.network * 8e-9:g} Gbit/s per node" if self.nodes > 1 else ""
        return f"{self.gpus:,} {self.gpu.name} in {nodes}{network}"


def read_cluster(gpus: str, network: str, per_node: int | None = None) -> Cluster:
    """Return the cluster that options describe.

    Args:
        gpus: Number and type, such as "64xH100", or nodes, GPUs of each, and type, such as "8x8xH100".
        network: Rate of a node, such as "100gbit" or "100gbit/node"; of its cards, "8x200gbit"; or of one card for each
            GPU, "200gbit/gpu".
        per_node: GPUs in a node, or None for the usual number of this type, at most all.

    Raises:
        ConfigError: A text cannot be read, or the GPUs do not fill whole nodes.
    """
    nodes = re.fullmatch(r"([0-9]{1,6})\s*[xX]\s*([0-9]{1,3})\s*[xX]\s*(.+)", gpus.strip())
    if nodes:
        gpus, per_node = f"{int(nodes[1]) * int(nodes[2])}x{nodes[3]}", per_node or int(nodes[2])
    match = re.fullmatch(r"([0-9][0-9,_]{0,9})\s*[xX]\s*(.+)", gpus.strip())
    count = int(re.sub("[,_]", "", match[1])) if match else 0
    if match is None or not 0 < count <= MOST_GPUS:
        raise ConfigError(
            f"--gpus: {gpus!r} is not a number from 1 to {MOST_GPUS:,} and a type; write 64xH100, for example"
        )
    gpu = find_gpu(match[2])
    size = min(per_node or gpu.per_node, count)
    if count % size:
        raise ConfigError(
            f"--gpus: {count} GPUs do not fill nodes of {size} (allowed: multiples of {size}); write another number, "
            "or --gpus-per-node N"
        )
    return Cluster(gpu, count, size, read_network(network, size))


_UNITS = {"m": 1e6, "g": 1e9, "t": 1e12}
_RATE = r"(?:([1-9][0-9]{0,3})x)?([0-9]{0,6}\.?[0-9]{1,6})([mgt])(?:bit(?:/s)?|bps)(?:/(node|gpu|card))?"
"""Cards, rate, unit, and what has it."""


def read_network(text: str, per_node: int) -> float:
    """Return the bytes per second of a node.

    Raises:
        ConfigError: The text is not a rate in bits.
    """
    plain = text.replace(" ", "")
    match = re.fullmatch(_RATE, plain.lower())
    cards, rate, unit, each = match.groups() if match else (None, "0", "g", None)
    per_gpu = each in ("gpu", "card")
    if not float(rate) or "Bps" in plain or (cards and per_gpu):
        raise ConfigError(
            f"--network: {text!r} is not a rate in bits; write 100gbit/node, 8x200gbit for all cards of a node, or "
            "200gbit/gpu"
        )
    return int(cards or (per_node if per_gpu else 1)) * float(rate) * _UNITS[unit] / 8


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
