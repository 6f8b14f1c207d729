"""Comparison of a kernel with plain torch: the inputs of both, and how results are compared."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import reference

Kernels = Any
"""Module of `deepspeed_compress.compression.kernels` that implements the operations."""
Run = Callable[[Kernels, Tensor, int], tuple[Tensor, ...]]
"""Function `run(kernels, x, first)` that returns the results for `x`.

`x` is a flat fp32 tensor that holds the elements from `first` on of a longer vector. All other inputs are derived from
`x` element by element, so that a part of the vector gives a part of the results.
"""
Rule = Callable[[Sequence[Tensor], Sequence[Tensor]], str]
"""Function `rule(actual, expected)` that describes a relevant difference, or returns ""."""

CHUNK = 1 << 24
"""Number of elements whose results are compared at once."""
_ALIKE = 300
"""Least number of elements of vectors whose elements are alike."""
_ON_CPU = 1 << 17
"""Largest number of elements for which plain torch, the reference on every device, computes on the CPU."""


def same_bits(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Return how the bits differ, including the sign of zero, or "". All NaNs are regarded as equal."""
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
    """Return integers that are equal if the bits of `x` are equal or both are NaN."""
    if not x.is_floating_point():
        return x
    integers = {2: torch.int16, 4: torch.int32}[x.itemsize]
    return torch.where(x.isnan(), torch.full_like(x, math.nan), x).view(integers)


def within(tolerance: float) -> Rule:
    """Return a rule by which no result differs by more than `tolerance` times the largest element."""

    def rule(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
        errors = [_error(*pair) for pair in zip(actual, expected, strict=True)]
        worst = float(torch.tensor([0.0, *errors]).amax())  # NaN if one of them is
        return "" if worst <= tolerance else f"off by {worst:.1e} of the largest element, more than {tolerance:.0e}"

    return rule


def _error(actual: Tensor, expected: Tensor) -> float:
    if actual.equal(expected):
        return 0.0
    largest = float(expected.abs().amax())
    return float((actual - expected).abs().amax()) / largest if largest else math.inf


@dataclass(frozen=True)
class Comparison:
    """Row of the table of comparisons.

    Attributes:
        operation: Name in the module of kernels.
        name: Name in the table.
        run: Function that computes the results.
        rates: Number of entries of each result per element.
        unit: Number of elements of which chunks start at multiples.
        rule: Rule that compares the results.
        plain: Whether the input has neither numbers that are not finite nor very different magnitudes.
        sizes: Sizes in addition to those of all rows.
        large: Whether a size beyond 2**31 is also compared, if `bytes` per element are free.
        bytes: Bytes of device memory per element that a large comparison needs.
        promised: Whether equal bits are promised. If not, a difference is reported as missed, not as failed.
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
        """Return how the results of `kernels` differ from plain torch for `numel` elements, or ""."""
        return self._differs_for((ordinary if self.plain else awkward)(numel, device), kernels)

    def differs_if_alike(self, kernels: Kernels, device: torch.device) -> str:
        """Return the same for vectors whose elements are all alike."""
        found = ((name, self._differs_for(x, kernels)) for name, x in alike(max(_ALIKE, self.unit), device, self.plain))
        return next((f"only {name}: {difference}" for name, difference in found if difference), "")

    def _differs_for(self, x: Tensor, kernels: Kernels) -> str:
        before = x.clone() if x.numel() <= CHUNK else None
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
            parts = results if last - first == x.numel() else self._parts(results, first, last)
            found = self.rule([part.to(place) for part in parts], expected)
            yield f"from element {first:,}: {found}" if found and first else found

    def _parts(self, results: Sequence[Tensor], first: int, last: int) -> Iterator[Tensor]:
        for result, rate in zip(results, self.rates, strict=True):
            yield result[int(first * rate) : math.ceil(last * rate)]


def ordinary(numel: int, device: torch.device) -> Tensor:
    """Return normally distributed numbers, the same on all devices of a kind."""
    return torch.randn(numel, generator=torch.Generator(device).manual_seed(numel), device=device)


def awkward(numel: int, device: torch.device) -> Tensor:
    """Return numbers of many magnitudes, with denormals, huge numbers, zeros, ties, and some infinities and NaNs."""
    x = ordinary(numel, device)
    x[: min(numel, CHUNK)] *= 10.0 ** torch.linspace(-3, 3, min(numel, CHUNK), device=device)
    for place, factor in ((64, 1e-42), (130, 1e37), (200, 1e-30), (260, 0.0), (330, -0.0)):
        x[place : place + 60] *= factor
    x[384:448] = -3.5
    x[450::13] = 0.5
    for place, value in ((1930, math.inf), (2570, -math.inf), (700, math.nan), (4500, torch.finfo(torch.float32).max)):
        x[place : place + 1] = value
    return x


def alike(numel: int, device: torch.device, plain: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield vectors whose elements are equal or of one kind, and what they are; if `plain`, only ordinary ones."""
    x = ordinary(numel, device)
    yield "zeros", torch.zeros_like(x)
    yield "equal numbers", torch.full_like(x, -3.5)
    yield "negative numbers", -x.abs()
    if plain:
        return
    yield "denormal numbers", x * 1e-42
    yield "huge numbers", x * 1e38
    for value in (math.nan, math.inf, -math.inf):
        yield f"{value}", torch.full_like(x, value)


def check(
    row: Comparison,
    kernels: Kernels,
    device: torch.device,
    sizes: tuple[int, ...],
    record_property: Callable[[str, object], None],
) -> None:
    """Fail at the first size at which `kernels` differ from plain torch, or if they do for elements that are alike."""
    record_property("goal", "as plain torch")
    for numel in sizes:
        record_property("figure", f"{numel:,} elements")
        _judge(row, row.differs(kernels, device, numel))
    _judge(row, row.differs_if_alike(kernels, device))
    record_property("figure", f"{len(sizes)} sizes up to {max(sizes):,}")


def _judge(row: Comparison, difference: str) -> None:
    if difference:
        (pytest.fail if row.promised else pytest.xfail)(difference)
