"""Public figures of GPUs, and the constants of the model: shares of these figures that training achieves, for example.

The first four constants were fitted to published training steps by `launch/studies/planner_calibration.py`.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from deepspeed_compress.errors import ConfigError

Backend = Literal["nccl", "gloo"]
Precision = Literal["bf16", "fp16", "fp32"]
CALIBRATED_GPU = "A100-80"
"""GPU of the runs that the constants are fitted to."""


@dataclass(frozen=True, slots=True)
class Constants:
    """Constants of a prediction.

    The first four are fitted to published runs on A100, the others are typical. `plan cluster --measure` fits all of
    them to measurements.

    Attributes:
        matmul: Share of the peak rate that large matrix products reach.
        memory: Share of the memory bandwidth that elementwise kernels reach.
        link: Share of the rate between the GPUs of a node that collectives reach.
        kernel: Seconds that a kernel takes beyond its work: start, tail, and the gap to the next one.
        network: Share of the line rate of a node's network cards that collectives reach.
        delay: Delays of a collective and its hops, relative to those of NCCL.
        cpu: Costs of the CPU (issuing kernels, hooks of ZeRO 3, idle share), relative to the table of programs.
        coding: Rate of the compression kernels, relative to elementwise kernels.
        contention: Seconds that computation loses for each second of a message behind it, at most 1.
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
class Gpu:
    """Published figures of a GPU.

    Attributes:
        name: Name of the GPU.
        peak: Dense operations per second in `precision`.
        memory_rate: Memory bandwidth in bytes per second.
        memory: Memory in bytes.
        link_rate: Bytes per second in one direction between a GPU and the others of its node.
        link: Name of that link.
        per_node: GPUs in the usual node.
        best_matmul: Share of `peak` that the best matrix product reached in public measurements.
        flash: Share of `best_matmul` that flash attention reaches, by its generation.
        precision: Type of weights, activations and gradients: the fastest that the GPU has, except fp8.
        backend: Library of the collectives.
    """

    name: str
    peak: float
    memory_rate: float
    memory: float
    link_rate: float
    link: str
    per_node: int
    best_matmul: float
    flash: Mapping[int, float]
    precision: Precision = "bf16"
    backend: Backend = "nccl"

    @property
    def element(self) -> int:
        """Bytes of an element of weights, activations and gradients."""
        return 4 if self.precision == "fp32" else 2

    def matmul_rate(self, constants: Constants) -> float:
        """Return operations per second of large matrix products, scaled from the A100 by the best measured shares."""
        return self.peak * constants.matmul * self.best_matmul / _A100_BEST


_A100_BEST = 0.87
_FLASH_AMPERE: Mapping[int, float] = {1: 0.42, 2: 0.65, 3: 0.65}
"""Mean over forward and backward of 2205.14135 (generation 1) and figures 4 to 6 of 2307.08691 (generation 2)."""
_FLASH_HOPPER: Mapping[int, float] = {1: 0.25, 2: 0.48, 3: 0.75}
"""The same on H100: figures 5 and 6 of 2407.08608."""
_FLASH_OTHER: Mapping[int, float] = {1: 0.4, 2: 0.5, 3: 0.5}


def _gpu(
    name: str,
    tflops: float,
    memory: tuple[float, float],
    link: tuple[str, float],
    per_node: int,
    best: float,
    flash: Mapping[int, float],
    precision: Precision = "bf16",
    backend: Backend = "nccl",
) -> Gpu:
    """Return a GPU from its figures in teraflops, gigabytes, and gigabytes per second.

    `best` of most is that of mamf-finder (ml-engineering, compute/accelerator).
    """
    size, rate = (1e9 * figure for figure in memory)
    return Gpu(name, tflops * 1e12, rate, size, link[1] * 1e9, link[0], per_node, best, flash, precision, backend)


_GPUS = (
    # A100 data sheet; mamf-finder
    _gpu("A100-80", 312, (85.1, 2039), ("NVLink", 300), 8, 0.87, _FLASH_AMPERE),
    # A100 data sheet; mamf-finder
    _gpu("A100-40", 312, (42.4, 1555), ("NVLink", 300), 8, 0.87, _FLASH_AMPERE),
    # H100 SXM data sheet; mamf-finder
    _gpu("H100", 989, (85.0, 3350), ("NVLink", 450), 8, 0.79, _FLASH_HOPPER),
    # H200 data sheet; mamf-finder
    _gpu("H200", 989, (151.0, 4800), ("NVLink", 450), 8, 0.80, _FLASH_HOPPER),
    # 2412.19437; rates as H100
    _gpu("H800", 989, (85.0, 3350), ("NVLink", 200), 8, 0.79, _FLASH_HOPPER),
    # GH200 data sheet; mamf-finder
    _gpu("GH200", 989, (102.0, 4000), ("NVLink", 450), 4, 0.82, _FLASH_HOPPER),
    # HGX B200 data sheet; mamf-finder
    _gpu("B200", 2250, (192.0, 8000), ("NVLink", 900), 8, 0.77, _FLASH_HOPPER),
    # GB200 NVL72 data sheet
    _gpu("GB200", 2500, (192.0, 8000), ("NVLink", 900), 72, 0.74, _FLASH_HOPPER),
    # H20 data sheet
    _gpu("H20", 148, (103.0, 4000), ("NVLink", 450), 8, 0.90, _FLASH_HOPPER),
    # H100 data sheet
    _gpu("H100-PCIe", 756, (85.0, 2000), ("PCIe", 64), 8, 0.79, _FLASH_HOPPER),
    # A800 data sheet; rates as A100
    _gpu("A800", 312, (85.1, 2039), ("NVLink", 200), 8, 0.87, _FLASH_AMPERE),
    # RTX A6000 data sheet
    _gpu("A6000", 155, (51.5, 768), ("PCIe", 32), 8, 0.80, _FLASH_AMPERE),
    # GA102 whitepaper; no peer access: by the host
    _gpu("3090", 71, (25.8, 936), ("PCIe", 16), 8, 0.93, _FLASH_AMPERE),
    # V100 data sheet (32 GB)
    _gpu("V100", 125, (34.1, 900), ("NVLink", 150), 8, 0.75, _FLASH_OTHER, "fp16"),
    # L40S data sheet
    _gpu("L40S", 362, (51.5, 864), ("PCIe", 32), 8, 0.70, _FLASH_AMPERE),
    # Ada whitepaper; no peer access: by the host
    _gpu("4090", 165, (25.3, 1008), ("PCIe", 16), 8, 0.93, _FLASH_AMPERE),
    # RTX Blackwell whitepaper (fp32 sums); no peer access: by the host; best share as 4090
    _gpu("5090", 209.5, (33.7, 1792), ("PCIe", 32), 8, 0.93, _FLASH_AMPERE),
    # RTX PRO Blackwell whitepaper; best share as L40S
    _gpu("RTX-PRO-6000", 503.8, (102.0, 1792), ("PCIe", 64), 8, 0.70, _FLASH_AMPERE),
    # A10G data sheet; best share as A6000
    _gpu("A10G", 70, (23.7, 600), ("PCIe", 32), 8, 0.80, _FLASH_AMPERE),
    # L4 data sheet; best share as L40S
    _gpu("L4", 121, (23.7, 300), ("PCIe", 32), 8, 0.70, _FLASH_AMPERE),
    # DGX Spark data sheet: an eighth of the sparse fp4 rate; 128 GB shared with the CPU; best share as L40S
    _gpu("GB10", 125, (124.0, 273), ("PCIe", 32), 1, 0.70, _FLASH_AMPERE),
    # MI300A data sheet; 128 GB shared with the CPU; best share as MI300X
    _gpu("MI300A", 980.6, (124.0, 5300), ("xGMI", 384), 4, 0.51, _FLASH_OTHER),
    # MI300X data sheet; mamf-finder
    _gpu("MI300X", 1307, (206.0, 5300), ("xGMI", 448), 8, 0.51, _FLASH_OTHER),
    # one of its two dies: data sheet; mamf-finder
    _gpu("MI250X", 191.5, (68.7, 1638), ("xGMI", 50), 8, 0.77, _FLASH_OTHER),
    # round figures of a core, for emulated hosts
    _gpu("CPU", 0.1, (8.0, 10.0), ("loopback", 2), 1, _A100_BEST, _FLASH_OTHER, "fp32", "gloo"),
)

GPUS: Mapping[str, Gpu] = {gpu.name: gpu for gpu in _GPUS}


_IGNORED = (
    r"\b(NVIDIA|AMD|INSTINCT|TESLA|GEFORCE|QUADRO|BLACKWELL|WORKSTATION|SERVER|EDITION)\b|\bRTX|(SXM|HBM)[0-9]?\b"
)
"""Parts of a name of a GPU that are ignored, some of them also without a space: RTX4090, H100SXM5."""
_ALIASES: Mapping[str, str] = {"DGXSPARK": "GB10", "SPARK": "GB10"}
"""Other names, without spaces and hyphens."""
_GIB = 2**30


def find_gpu(text: str) -> Gpu:
    """Return the GPU that `text` names, such as "H100", "A100-SXM4-40GB", "V100-32", "NVIDIA H100 PCIe" or "RTX4090".

    Raises:
        ConfigError: The table has no such GPU.
    """
    words = _words(text)
    sizes = [int(word.rstrip("GIB")) for word in words if re.fullmatch("[0-9]+GI?B?", word)]
    name = "".join(word for word in words if not re.fullmatch("[0-9]+GI?B?", word))
    found = _with_memory(name, sizes)
    if not found and len(words) > 1 and words[-1].isdigit():
        found = _with_memory(name.removesuffix(words[-1]), [*sizes, int(words[-1])])
    if not found:
        raise ConfigError(f"--gpus: {text} is not in the table (allowed: {', '.join(GPUS)}); write one of these")
    return found[0]


def _words(text: str) -> list[str]:
    return re.findall("[0-9A-Z]+", re.sub(_IGNORED, "", re.sub("[-_]", " ", text.upper())))


def _with_memory(name: str, sizes: list[int]) -> list[Gpu]:
    """Return the GPUs of this name, without spaces and hyphens, whose memory is as large as all of `sizes` say."""
    names = {_ALIASES.get(name, name)}
    # The name A100 stands for both sizes of its memory.
    names |= {"A10080", "A10040"} if "A100" in names else set()
    named = (gpu for gpu in GPUS.values() if "".join(_words(gpu.name)) in names)
    return [gpu for gpu in named if all(abs(gpu.memory - size * _GIB) < 0.1 * size * _GIB for size in sizes)]


def worst_of(gpus: Sequence[Gpu]) -> Gpu:
    """Return a GPU with the worst figures of all, because each part of a step lasts as long as on the slowest of them.

    Raises:
        ConfigError: Their libraries of collectives cannot talk to each other.
    """
    slowest = min(gpus, key=lambda gpu: gpu.matmul_rate(Constants()))
    if len({(gpu.backend, gpu.link == "xGMI") for gpu in gpus}) > 1:
        names = " and ".join(gpu.name for gpu in gpus)
        raise ConfigError(f"--gpus: {names} have no common library of collectives; write those of one vendor")
    link = min(gpus, key=lambda gpu: gpu.link_rate)
    return replace(
        slowest,
        name=" + ".join(gpu.name for gpu in gpus),
        memory_rate=min(gpu.memory_rate for gpu in gpus),
        memory=min(gpu.memory for gpu in gpus),
        link_rate=link.link_rate,
        link=link.link,
        # All have fp16, but not all have bf16.
        precision=next((gpu.precision for gpu in gpus if gpu.precision == "fp16"), slowest.precision),
    )
