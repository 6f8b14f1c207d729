"""Part 1: every kernel against plain torch, at sizes around the borders of its tiles and beyond 2**31."""

import time
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import torch

from deepspeed_compress.tools.gpu_check.compared import Comparison, Kernels
from deepspeed_compress.tools.gpu_check.findings import Finding, Task, Verdict
from deepspeed_compress.tools.gpu_check.operations import COMPARISONS

__all__ = ["compare", "findings"]

_BORDERS = (0, 1, 2, 63, 65, 2047, 2048, 2049, 4096, 5000, 100_003, (1 << 22) + 7)
"""Sizes around the borders of tiles, which have 2048 elements or are blocks of up to 4096."""
_INTERPRETED = (0, 1, 65, 2049, 5000)
_FEW = (1, 2049, 5000)
_HUGE = (1 << 31) + 5
_SPARE = 1.3
"""Factor by which a comparison may exceed the memory it states, because chunks of plain torch need memory too."""
_RESERVE = 8.0
"""Seconds before the limit at which no new comparison is started."""


def findings(task: Task) -> Iterator[Finding]:
    """Yield a finding for each row of the table of comparisons."""
    from deepspeed_compress.compression.kernels import gpu  # must follow the setting of TRITON_INTERPRET

    until = time.monotonic() + task.seconds - _RESERVE
    device = torch.device(task.device)
    for row in _few() if task.small else COMPARISONS:
        if time.monotonic() > until:
            yield Finding(row.name, "not run", why="no time was left")
        else:
            yield compare(row, gpu, device, sizes_of(row, task))
    if task.on_gpu and not task.small:
        yield from _huge(gpu, device, until)


def _few() -> list[Comparison]:
    """Return the first and the last row of every operation."""
    first, last = ({row.operation: row for row in rows} for rows in (reversed(COMPARISONS), COMPARISONS))
    return [row for operation in last for row in dict.fromkeys((first[operation], last[operation]))]


def sizes_of(row: Comparison, task: Task) -> tuple[int, ...]:
    """Return the numbers of elements at which `row` is compared."""
    if task.small:
        return _FEW
    return (*(_BORDERS if task.on_gpu else _INTERPRETED), *row.sizes)


def compare(row: Comparison, kernels: Kernels, device: torch.device, sizes: tuple[int, ...]) -> Finding:
    """Return the first size at which `kernels` differ from plain torch, or that there is none, as a finding."""
    for numel in sizes:
        try:
            found = row.differs(kernels, device, numel)
        except Exception as error:
            found = f"{type(error).__name__}: {str(error).strip()[:300]}"
        if found:
            verdict: Verdict = "fail" if row.promised else "missed"
            return Finding(row.name, verdict, f"{numel:,} elements", "as plain torch", found)
    return Finding(row.name, "pass", f"{len(sizes)} sizes up to {max(sizes):,}", "as plain torch")


def _huge(gpu: ModuleType, device: torch.device, until: float) -> Iterator[Finding]:
    for row in (row for row in COMPARISONS if row.large):
        name, needed = f"{row.name}, {_HUGE:,} elements", _SPARE * row.bytes * _HUGE
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(device)
        if time.monotonic() > until:
            yield Finding(name, "not run", why="no time was left")
        elif free < needed:
            yield Finding(name, "not run", why=f"{free / 2**30:.0f} GiB are free, {needed / 2**30:.0f} are needed")
        else:
            yield replace(compare(row, gpu, device, (_HUGE,)), what=name)
