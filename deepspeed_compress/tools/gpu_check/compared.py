"""A kernel beside plain torch: what the two are given, and how their results are compared."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference

__all__ = ["Comparison", "Kernels", "Rule", "awkward", "same_bits", "within"]

Kernels = Any
"""A module of `deepspeed_compress.compression.kernels` that implements the operations."""
Run = Callable[[Kernels, Tensor, int], tuple[Tensor, ...]]
"""`run(kernels, x, first)`: the results for `x`, flat fp32, elements `first` and on of a longer vector. All else that
the operation takes is made of `x` element by element, so that a part of the vector gives a part of the results."""
Rule = Callable[[Sequence[Tensor], Sequence[Tensor]], str]
"""`rule(actual, expected)`: what differs, "" when nothing that matters does."""

CHUNK = 1 << 24
"""Elements whose results are compared at once."""
_ON_CPU = 1 << 17
"""Up to so many elements plain torch computes on the CPU, above on the same device: it is its definition everywhere."""


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Equal bits, the sign of zero included; of NaN only that it is one."""
    found = (_difference(index, *pair) for index, pair in enumerate(zip(actual, expected, strict=True)))
    return next(filter(None, found), "")


def _difference(index: int, actual: Tensor, expected: Tensor) -> str:
    if actual.shape != expected.shape:
        return f"result {index} has {tuple(actual.shape)} entries for {tuple(expected.shape)}"
    unequal = _bits(actual) != _bits(expected)
    count = int(unequal.sum())
    if not count:
        return ""
    place = int(unequal.flatten().to(torch.uint8).argmax())
    seen, wanted = (float(one.flatten()[place]) for one in (actual, expected))
    return f"result {index} differs in {count:,} of {unequal.numel():,}, first at {place:,}: {seen!r} for {wanted!r}"


def _bits(x: Tensor) -> Tensor:
    """Integers that are equal where the bits of `x` are, or both are NaN."""
    if not x.is_floating_point():
        return x
    integers = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(integers)


def within(tolerance: float) -> Rule:
    """A rule: no result is off by more than `tolerance` of the largest element."""

    def rule(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
        worst = max((_error(*pair) for pair in zip(actual, expected, strict=True)), default=0.0)
        return "" if worst <= tolerance else f"off by {worst:.1e} of the largest element, more than {tolerance:.0e}"

    return rule


def _error(actual: Tensor, expected: Tensor) -> float:
    largest = float(expected.abs().amax()) if expected.numel() else 0.0
    return float((actual - expected).abs().amax()) / largest if largest else 0.0


@dataclass(frozen=True)
class Comparison:
    """One row: `operation` is the name in the module of kernels.

    `unit`: chunks begin at its multiples. `rates`: entries of each result for an element. `plain`: without numbers that
    are not finite, of one magnitude. `sizes`: besides those that all have. `large`: also at 2**31 and some elements,
    where `bytes` for each of them are free. `promised`: whether the same bits are promised, or only wished for.
    """

    operation: str
    name: str
    run: Run
    rates: tuple[Fraction, ...]
    unit: int = 1
    rule: Rule = same_bits
    plain: bool = False
    sizes: tuple[int, ...] = ()
    large: bool = False
    bytes: int = 0
    promised: bool = True

    def differs(self, kernels: Kernels, device: torch.device, numel: int) -> str:
        """What `kernels` return otherwise than plain torch for `numel` elements; "" when nothing."""
        x = (ordinary if self.plain else awkward)(numel, device)
        before = x.clone() if numel <= CHUNK else None
        results = self.run(kernels, x, 0)
        if before is not None and not _bits(before).equal(_bits(x)):
            return "what it was given is changed"
        return next(filter(None, self._chunks(results, x)), "")

    def _chunks(self, results: Sequence[Tensor], x: Tensor) -> Iterator[str]:
        step = CHUNK // self.unit * self.unit
        place = x.device if x.numel() > _ON_CPU else torch.device("cpu")
        for first in range(0, max(x.numel(), 1), step):
            last = min(first + step, x.numel())
            expected = self.run(reference, x[first:last].to(place), first)
            found = self.rule([part.to(place) for part in self._parts(results, first, last)], expected)
            yield f"from element {first:,}: {found}" if found and first else found

    def _parts(self, results: Sequence[Tensor], first: int, last: int) -> Iterator[Tensor]:
        for result, rate in zip(results, self.rates, strict=True):
            yield result[int(first * rate) : math.ceil(last * rate)]


def ordinary(numel: int, device: torch.device) -> Tensor:
    """Normal numbers, the same wherever the device is one of a kind."""
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(numel), device=device)


def awkward(numel: int, device: torch.device) -> Tensor:
    """Numbers of many magnitudes; runs of denormals, huge ones, zeros and ties; here and there infinity and NaN."""
    x = ordinary(numel, device)
    x[: min(numel, CHUNK)] *= 10.0 ** torch.linspace(-3, 3, min(numel, CHUNK), device=device)
    for place, factor in ((64, 1e-42), (130, 1e37), (200, 1e-30), (260, 0.0), (330, -0.0)):
        x[place : place + 60] *= factor
    x[450::13] = 0.5
    for place, value in ((1930, math.inf), (2570, -math.inf), (700, math.nan), (4500, torch.finfo(torch.float32).max)):
        x[place : place + 1] = value
    return x
