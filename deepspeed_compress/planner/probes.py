"""Probes of a cluster: measured seconds of single operations, and the model's prediction of each."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import Device
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.fit import Prior
from deepspeed_compress.planner.links import Group, Links, Message
from deepspeed_compress.planner.software import Software

PRIOR = Prior(
    Constants(),
    {
        "matmul": 1.5,
        "memory": 1.5,
        "link": 1.5,
        "kernel": 1.5,
        "network": 0.1,
        "delay": 2.0,
        "cpu": 1.5,
        "coding": 1.5,
        "contention": 0.7,
    },
)
"""Constants before a cluster is measured. Only the network's rate is known, to a tenth.

Short messages seem faster than the line, since queues take them at once.
"""
NOISE = 0.2
"""Relative standard error of the model's prediction of a probe."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Measured operation.

    Attributes:
        kind: Key of `PREDICTED`.
        sizes: Rows, columns and inner size of a matrix product; bytes that a kernel moves; or bytes of a rank's buffer
            and the number of ranks of a collective.
        seconds: Measured seconds.
    """

    kind: str
    sizes: tuple[float, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class MeasuredProbe:
    """Probe on a cluster as an observation."""

    probe: Probe
    cluster: Cluster
    software: Software
    noise: float = NOISE

    @property
    def seconds(self) -> float:
        """Measured seconds."""
        return self.probe.seconds

    def predicted(self, constants: Constants) -> float:
        """Return the predicted seconds."""
        device = Device(self.cluster.gpu, constants, self.software)
        return PREDICTED[self.probe.kind](device, Links(self.cluster, constants), *self.probe.sizes)


Collective = Callable[[Links, float, Group], Message]


def _sent(collective: Collective, _: Device, links: Links, size: float, ranks: float) -> float:
    return collective(links, size, links.group(int(ranks), 1)).seconds


PREDICTED: Mapping[str, Callable[..., float]] = {
    "product": lambda device, _, *sizes: device.product(*sizes),
    "copy": lambda device, _, size: device.moved(size),
    "kernel": lambda device, _: device.constants.kernel,
    "coding": lambda device, _, size: device.coded(size),
    "all_reduce": partial(_sent, Links.reduce),
    "all_gather_into_tensor": partial(_sent, Links.gather),
    "reduce_scatter_tensor": partial(_sent, Links.scatter),
    "all_to_all_single": partial(_sent, Links.exchange),
    "exchange": partial(_sent, Links.exchange),
}
"""Predicted seconds by kind of probe, from the device, the links, and the sizes."""
