"""Seconds of collectives: bandwidth of the links, and a delay for each hop (the alpha-beta model)."""

import math
from dataclasses import dataclass, replace

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.constants import Constants

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
        # A tree reaches about 0.9 of a ring's bandwidth.
        tree = self._without_hops(size, group) / 0.9 + self._start + depth
        return replace(ring, seconds=min(ring.seconds, tree))

    def _without_hops(self, size: float, group: Group) -> float:
        sent = 2 * size * (group.ranks - 1) / group.ranks
        return max(sent / (self.network_rate * group.local), sent / self.node_rate if group.local > 1 else 0.0)

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
