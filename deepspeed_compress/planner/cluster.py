"""A cluster, and the seconds of its collectives: bandwidth of links and a delay for each hop (alpha-beta model)."""

import math
import re
from dataclasses import dataclass, replace

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.gpus import GPUS, Constants, Gpu, find_gpu, worst_of

MOST_GPUS = 1_000_000


@dataclass(frozen=True, slots=True)
class Cluster:
    """Nodes with equally many GPUs and equal networks.

    Attributes:
        gpu: Type of all GPUs; for several kinds, one with the worst figures of them.
        gpus: Number of GPUs.
        per_node: GPUs in a node, which share the node's network.
        network: Bytes per second, in each direction, of all network cards of a node together.
        kinds: Kinds of GPUs with their numbers, if there are several.
    """

    gpu: Gpu
    gpus: int
    per_node: int
    network: float
    kinds: tuple[tuple[Gpu, int], ...] = ()

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.gpus // self.per_node)

    @property
    def peak(self) -> float:
        """Operations per second of all GPUs together."""
        return sum(count * gpu.peak for gpu, count in self.kinds or ((self.gpu, self.gpus),))

    def __str__(self) -> str:
        kinds = " + ".join(f"{count:,} {gpu.name}" for gpu, count in self.kinds or ((self.gpu, self.gpus),))
        nodes = f"{self.nodes} node{'s' * (self.nodes > 1)} of {self.per_node}"
        network = f", {self.network * 8e-9:g} Gbit/s per node" if self.nodes > 1 else ""
        return f"{kinds} in {nodes}{network}"


def read_cluster(gpus: str, network: str, per_node: int | None = None) -> Cluster:
    """Return the cluster that options describe.

    Args:
        gpus: Number and type, such as "64xH100"; nodes, GPUs of each, and type, such as "8x8xH100"; or several of
            these, such as "8xA100+8xL4".
        network: Rate of a node, such as "100gbit" or "100gbit/node"; of its cards, "8x200gbit"; or of one card for each
            GPU, "200gbit/gpu".
        per_node: GPUs in a node, or None for the usual number of this type, at most all.

    Raises:
        ConfigError: A text cannot be read, the GPUs do not fill whole nodes, or nodes differ in their number.
    """
    counts: dict[str, int] = {}
    sizes: dict[int, str] = {}
    for text in gpus.split("+"):
        gpu, count, size = _read_kind(text.strip(), per_node)
        counts[gpu.name] = counts.get(gpu.name, 0) + count
        sizes[size] = gpu.name
    if len(sizes) > 1:
        found = " and ".join(f"{size} {name}" for size, name in sizes.items())
        alike = math.gcd(*counts.values())
        raise ConfigError(f"--gpus: {gpus} has unlike nodes of {found}; write --gpus-per-node {alike}, for example")
    kinds = tuple((GPUS[name], count) for name, count in counts.items())
    worst, total = worst_of([gpu for gpu, _ in kinds]), sum(counts.values())
    return Cluster(worst, total, size, read_network(network, size), kinds if len(kinds) > 1 else ())


def _read_kind(text: str, per_node: int | None) -> tuple[Gpu, int, int]:
    """Return the type of GPUs, their number, and that of a node."""
    nodes = re.fullmatch(r"([0-9]{1,6})\s*[xX]\s*([0-9]{1,3})\s*[xX]\s*(.+)", text)
    if nodes and per_node:
        raise ConfigError(f"--gpus-per-node: --gpus {text} says it, too; leave it out, or write --gpus 64xH100")
    if nodes:
        text, per_node = f"{int(nodes[1]) * int(nodes[2])}x{nodes[3]}", int(nodes[2])
    match = re.fullmatch(r"([0-9][0-9,_]{0,9})\s*[xX]\s*(.+)", text)
    count = int(re.sub("[,_]", "", match[1])) if match else 0
    if match is None or not 0 < count <= MOST_GPUS:
        raise ConfigError(f"--gpus: {text!r} is not 1 to {MOST_GPUS:,} and a type; write 64xH100, for example")
    gpu = find_gpu(match[2])
    size = min(per_node or gpu.per_node, count)
    if count % size:
        raise ConfigError(f"--gpus: {count} GPUs do not fill nodes of {size}; write a multiple, or --gpus-per-node N")
    return gpu, count, size


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
        raise ConfigError(f"--network: {text!r} is not a rate in bits; write 100gbit/node, 8x200gbit, or 200gbit/gpu")
    return int(cards or (per_node if per_gpu else 1)) * float(rate) * _UNITS[unit] / 8


NODE_HOP, NETWORK_HOP, PCIE_HOP = 3.4e-6, 14e-6, 5.7e-6
"""Seconds of a hop in a ring, of large messages (NCCL, src/graph/tuning.cc, `hwLatencies`, protocol Simple)."""
START = 8.4e-6
"""Seconds that a collective takes to start (the same file, `baseLat`)."""
SOURCE = "links.py; hops of NCCL"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks of a collective: `local` in each node that it reaches."""

    ranks: int
    local: int

    @property
    def nodes(self) -> int:
        """Number of nodes."""
        return -(-self.ranks // self.local)


@dataclass(frozen=True, slots=True)
class Message:
    """Cost of a message.

    Attributes:
        seconds: Seconds that it takes.
        inside: Bytes that a rank sends to others in its node.
        outside: Bytes that a rank sends to other nodes, as a mean over the ranks of the node.
        link: Slowest link on its way.
    """

    seconds: float
    inside: float
    outside: float
    link: str

    def times(self, count: float) -> "Message":
        """Return the cost of `count` such messages."""
        return Message(count * self.seconds, count * self.inside, count * self.outside, self.link)

    def then(self, other: "Message") -> "Message":
        """Return the cost of this message and another after it, named after the slower link."""
        link = self.link if self.seconds >= other.seconds else other.link
        return Message(self.seconds + other.seconds, self.inside + other.inside, self.outside + other.outside, link)


NOTHING = Message(0.0, 0.0, 0.0, "none")


@dataclass(frozen=True, slots=True)
class Links:
    """Links of a cluster. All ranks of a node communicate at the same time, so they share the node's cards."""

    cluster: Cluster
    constants: Constants

    @property
    def is_gloo(self) -> bool:
        """True if gloo sends the messages, from the memory of the CPU."""
        return self.cluster.gpu.backend == "gloo"

    @property
    def node_rate(self) -> float:
        """Bytes per second of a rank to the others in its node."""
        return self.cluster.gpu.link_rate * self.constants.link

    @property
    def network_rate(self) -> float:
        """Bytes per second of a rank to other nodes, if all ranks of its node send."""
        return self.cluster.network * self.constants.network / self.cluster.per_node

    def group(self, ranks: int, stride: int) -> Group:
        """Return the group of `ranks` ranks that are `stride` apart."""
        return Group(ranks, max(1, min(ranks, self.cluster.per_node // stride)))

    def gather(self, size: float, group: Group) -> Message:
        """Return the cost of a ring that moves `size` bytes once: an all-gather, or NCCL's reduce-scatter."""
        if group.ranks == 1:
            return NOTHING
        sent = size * (group.ranks - 1) / group.ranks
        between = group.nodes - 1
        near, far = (group.ranks - 1 - between) * self._node_hop, between * self._network_hop
        inside = sent / self.node_rate if group.local > 1 else 0.0
        crossing = sent / group.local if between else 0.0
        # Each node sends the buffer once, over the cards that belong to the group's share of the node.
        outside = sent / (self.network_rate * group.local) if between else 0.0
        link = "network" if outside + far > inside + near else self.cluster.gpu.link
        return Message(max(inside, outside) + self._start + near + far, sent - crossing, crossing, link)

    def scatter(self, size: float, group: Group) -> Message:
        """Return the cost of a reduce-scatter. Gloo's is an all-reduce (`ProcessGroupGloo::_reduce_scatter_base`)."""
        return self.reduce(size, group) if self.is_gloo else self.gather(size, group)

    def reduce(self, size: float, group: Group) -> Message:
        """Return the cost of an all-reduce: a ring, or NCCL's tree if few hops are worth more than bandwidth."""
        ring = self.gather(size, group).times(2)
        if group.nodes == 1 or self.is_gloo:
            return ring
        depth = 2 * (math.log2(group.nodes) * self._network_hop * 2 + (group.local - 1) * self._node_hop)
        sent = 2 * size * (group.ranks - 1) / group.ranks
        moved = max(sent / (self.network_rate * group.local), sent / self.node_rate if group.local > 1 else 0.0)
        # A tree reaches about 0.9 of a ring's bandwidth.
        return replace(ring, seconds=min(ring.seconds, moved / 0.9 + self._start + depth))

    def exchange(self, size: float, group: Group) -> Message:
        """Return the cost of sending `size` / ranks bytes from every rank to every rank, equal or different ones."""
        if group.ranks == 1:
            return NOTHING
        inside = size * (group.local - 1) / group.ranks
        outside = size * (group.ranks - group.local) / group.ranks
        times = {self.cluster.gpu.link: inside / self.node_rate, "network": outside / self.network_rate}
        link = max(times, key=times.__getitem__)
        # NCCL serves eight peers at a time.
        hops = (group.ranks - 1) / 8 * (self._network_hop if group.nodes > 1 else self._node_hop)
        return Message(times[link] + self._start + hops, inside, outside, link)

    def send(self, size: float, together: int) -> Message:
        """Return the cost of a message from each of `together` neighbors to the ranks after them.

        If they are fewer than a node has, only the last of them send to another node, and share all of its cards.
        """
        if self.cluster.nodes == 1:
            return Message(size / self.node_rate + self._node_hop, size, 0.0, self.cluster.gpu.link)
        leaving = min(1.0, together / self.cluster.per_node)
        seconds = size * leaving / self.network_rate + self._network_hop
        return Message(seconds, size * (1 - leaving), size * leaving, "network")

    @property
    def _node_hop(self) -> float:
        return self.constants.delay * (PCIE_HOP if self.cluster.gpu.link == "PCIe" else NODE_HOP)

    @property
    def _network_hop(self) -> float:
        return self.constants.delay * NETWORK_HOP

    @property
    def _start(self) -> float:
        return self.constants.delay * START
