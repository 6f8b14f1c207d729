"""Constants of the model: shares of the published figures that training achieves, and factors of typical costs.

The first four were fitted to published training steps by `launch/studies/planner_calibration.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a prediction; `MEANINGS` describes each.

    The first four are fitted to published runs on A100, the others are typical. `plan cluster --measure` fits all of
    them to measurements.
    """

    matmul: float = 0.819
    memory: float = 0.647
    link: float = 0.610
    kernel: float = 8.97e-6
    # Published nccl-tests on InfiniBand and RoCE.
    network: float = 0.85
    delay: float = 1.0
    cpu: float = 1.0
    coding: float = 1.0
    # NCCL's channels occupy 24 of 108 multiprocessors of an A100.
    contention: float = 0.2

    @property
    def origin(self) -> str:
        """Origin of the values."""
        return "fitted on A100" if self == Constants() else "measured"


@dataclass(frozen=True, slots=True)
class Calibrated:
    """Range of the runs that the constants are fitted to."""

    software: str
    parameters: tuple[float, float]
    gpus: int
    network: float


CALIBRATED = Calibrated("megatron", (1.6e9, 1.02e12), 3072, 200e9)
"""The 18 runs of `launch/studies/published_steps.csv`, whose nodes have eight cards of 200 Gbit/s."""

MEANINGS: Mapping[str, str] = {
    "matmul": "share of the peak rate that large matrix products reach",
    "memory": "share of the memory bandwidth that elementwise kernels reach",
    "link": "share of the rate between the GPUs of a node that collectives reach",
    "kernel": "seconds that a kernel takes beyond its work: start, tail, and the gap to the next one",
    "network": "share of the line rate of a node's network cards that collectives reach",
    "delay": "delays of a collective and its hops, relative to those of NCCL",
    "cpu": "costs of the CPU (issuing kernels, hooks of ZeRO 3, idle share), relative to the table of programs",
    "coding": "rate of the compression kernels, relative to elementwise kernels",
    "contention": "seconds that computation loses for each second of a message behind it, at most 1",
}
"""Meaning of each constant."""
