"""`bench kernels`: the compression operations that training uses here, compared with a copy of the same memory."""

import argparse
import math
import platform
import re
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from deepspeed_compress.compression.kernels import implementations
from deepspeed_compress.compression.kernels.arguments import (
    FIRST,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    single,
)
from deepspeed_compress.compression.kernels.compiled import instruction_set, load_library
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.tools.bench.jobs import Row, new_document, save_document
from deepspeed_compress.tools.tables import new_console, new_table

BLOCK = 256
TOP_K_BLOCK, DENSITY = 4096, 0.01
KEYS = Keys(0x1234_5678_9ABC_DEF0, 0)
INT8, INT4, SIGN = (
    BlockFormat("absmax", 127, 8, BLOCK),
    BlockFormat("absmax", 7, 4, BLOCK),
    BlockFormat("mean", 1, 1, BLOCK),
)

Kernels = Any
"""Module of `deepspeed_compress.compression.kernels` that implements the operations."""


Prepare = Callable[[Kernels, Tensor], Callable[[], object]]
"""Function that takes the kernels and a flat fp32 tensor and returns the call to be timed."""


def _quantize(
    form: BlockFormat, kernels: Kernels, x: Tensor, stochastic: bool = False, memory: torch.dtype | None = None
) -> Callable[[], object]:
    """Return a call that computes scales and packed codes of `x`, with error feedback if a dtype for it is given."""
    table, out = _message(form, x)
    kept = torch.zeros(x.numel(), dtype=memory, device=x.device) if memory is not None else None
    feedback = ResidualBuffers(kept, 1.0, kept) if kept is not None else None
    keys = KEYS if stochastic else None
    return lambda: kernels.quantize_messages(x, FIRST, form, out, table, keys, feedback)


def _sum(form: BlockFormat, kernels: Kernels, x: Tensor, ranks: int = 1) -> Callable[[], object]:
    """Return a call that adds the messages of `ranks` ranks, each with as many elements as `x`, to a sum."""
    table, out = _message(form, x)
    kernels.quantize_messages(x, FIRST, form, out, table, None, None)
    payloads, total = out.repeat(ranks, 1), torch.zeros_like(x)
    return lambda: kernels.dequantize_messages(payloads, form, table, total, FIRST, 0.5, True)


def _message(form: BlockFormat, x: Tensor) -> tuple[MessageTable, Tensor]:
    """Return the table of one message of `x`, and a buffer for it."""
    size = form.message_bytes(x.numel())
    return single(x.numel(), size), torch.empty(size, dtype=torch.uint8, device=x.device)


def _top_k(kernels: Kernels, x: Tensor, block: int | None) -> Callable[[], object]:
    """Return a call that finds the indices of the largest elements of each block, or of all elements without one."""
    block = block or x.numel()
    rows = x[: x.numel() // block * block].view(-1, block)
    k = math.ceil(DENSITY * block)
    return lambda: kernels.top_k_rows(rows, k)


def _transform(name: str, kernels: Kernels, x: Tensor, side: int) -> Callable[[], object]:
    """Return a call that transforms tiles of `side` x `side` consecutive elements."""
    tiles = x[: x.numel() // side**2 * side**2].view(-1, 1, side, side)
    out, transform = torch.empty_like(tiles), getattr(kernels, name)
    return lambda: transform(tiles, out, False)


def _rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the blocks of `x` and the largest magnitude in each."""
    rows = x[: x.numel() // BLOCK * BLOCK].view(-1, BLOCK)
    return rows, rows.abs().amax(dim=1)


def _quantize_rows(kernels: Kernels, x: Tensor) -> Callable[[], object]:
    """Return a call that computes one-byte codes of blocks with known scales."""
    rows, scales = _rows(x)
    return lambda: kernels.quantize_rows(rows, scales, 7, None)


def _quantize_between(kernels: Kernels, x: Tensor) -> Callable[[], object]:
    """Return a call that computes one-byte codes of blocks with known extremes."""
    rows, largest = _rows(x)
    smallest = -largest
    return lambda: kernels.quantize_rows_between(rows, smallest, largest, 255, None)


def _dequantize_rows(kernels: Kernels, x: Tensor) -> Callable[[], object]:
    """Return a call that adds one-byte codes, multiplied by their scales, to a sum."""
    rows, scales = _rows(x)
    codes, total = torch.ones_like(rows, dtype=torch.int8), torch.zeros_like(rows)
    return lambda: kernels.dequantize_rows_add(scales, codes, total, 0.5)


OPERATIONS: Mapping[str, Prepare] = {
    "quantize int8": partial(_quantize, INT8),
    "quantize int4": partial(_quantize, INT4),
    "quantize int4, stochastic": partial(_quantize, INT4, stochastic=True),
    "quantize sign": partial(_quantize, SIGN),
    "quantize int8, bf16 memory": partial(_quantize, INT8, memory=torch.bfloat16),
    "quantize int4, bf16 memory": partial(_quantize, INT4, memory=torch.bfloat16),
    "quantize sign, bf16 memory": partial(_quantize, SIGN, memory=torch.bfloat16),
    "decode-accumulate int8": partial(_sum, INT8),
    "decode-accumulate int4": partial(_sum, INT4),
    "decode-accumulate sign": partial(_sum, SIGN),
    "decode-accumulate int4, 8 ranks": partial(_sum, INT4, ranks=8),
    "block top-k 1 % of 4096": partial(_top_k, block=TOP_K_BLOCK),
    "top-k 1 % of all": partial(_top_k, block=None),
    "DCT, tiles of 64 x 64": partial(_transform, "dct_tiles", side=64),
    "Hadamard, blocks of 1024": partial(_transform, "hadamard_tiles", side=32),
    "quantize rows": _quantize_rows,
    "quantize rows between extremes": _quantize_between,
    "decode-accumulate rows": _dequantize_rows,
}
"""Operations in the order of the table."""


COPY = "copy"
SEED = 0
_LAUNCH_CYCLES = 1_000_000
"""Clock cycles of the GPU to wait before a timed call: more than half a millisecond."""


def run(options: argparse.Namespace) -> int:
    """Measure, print and write. Return the exit code."""
    device = torch.device(options.device)
    rows = measure(options.numel, device, options.repeats, options.only)
    heading = f"{options.numel:,} fp32 elements on {_name(device)}"
    new_console().print(_table(heading, rows))
    if options.json:
        save_document(new_document(rows) | {"device": heading}, options.json)
    return 0


def measure(numel: int, device: torch.device, repeats: int, only: re.Pattern[str] | None = None) -> list[Row]:
    """Measure a copy and every operation whose name matches `only`, on one core or GPU.

    Rates are those of the least times, and copies before every call are what they are compared with.

    Raises:
        ConfigError: No operation matches, or `numel` is too small.
        UnsupportedError: The device is not available.
    """
    chosen = [name for name in OPERATIONS if only is None or only.search(name)]
    if not chosen:
        shown = only.pattern if only else ""
        raise ConfigError(f"--only {shown}: matches none of {', '.join(OPERATIONS)}; write a part of one")
    if numel < TOP_K_BLOCK:
        raise ConfigError(f"--numel {numel}: is too small; write at least {TOP_K_BLOCK}, the block of top-k")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnsupportedError("--device cuda: torch finds no GPU; write --device cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return list(_measured(numel, device, repeats, chosen))
    finally:
        torch.set_num_threads(threads)


def _measured(numel: int, device: torch.device, repeats: int, chosen: list[str]) -> Iterator[Row]:
    x = torch.randn(numel, generator=torch.Generator().manual_seed(SEED)).to(device)
    copy_x = partial(torch.empty_like(x).copy_, x)
    copy = _row(COPY, "torch", x, seconds([copy_x], device, repeats)[0], 2 * x.nbytes)
    yield copy | {"of_copy": 1.0, "moved_of_copy": 1.0}
    name, module = next(iter(implementations(device).items()))
    for operation in chosen:
        moved = bytes_moved(operation, module, x)
        taken, copies = seconds([OPERATIONS[operation](module, x), copy_x], device, repeats)
        row, base = _row(operation, name, x, taken, moved), _row(COPY, "torch", x, copies, 2 * x.nbytes)
        ratios = (row[key] / base[key] for key in ("gb_per_s", "moved_gb_per_s"))
        yield row | dict(zip(("of_copy", "moved_of_copy"), ratios, strict=True))


def bytes_moved(operation: str, kernels: Kernels, x: Tensor) -> int:
    """Return the bytes that an operation reads and writes: each tensor once, and twice those that it adds to."""
    counting = CountingKernels(kernels)
    OPERATIONS[operation](counting, x)()
    return counting.moved


def _row(operation: str, implementation: str, x: Tensor, taken: list[float], moved: int) -> Row:
    """Return a row whose rates are those of the least time."""
    return {
        "operation": operation,
        "implementation": implementation,
        "numel": x.numel(),
        "seconds": {"median": statistics.median(taken), "min": min(taken), "max": max(taken)},
        "gb_per_s": 4e-9 * x.numel() / min(taken),
        "bytes_moved": moved,
        "moved_gb_per_s": 1e-9 * moved / min(taken),
    }


def seconds(calls: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    """Return the seconds of each of `repeats` calls of each of `calls`, which take turns.

    Untimed calls before them compile and touch memory.
    """
    for call in calls:
        call()
    clock = _on_gpu if device.type == "cuda" else _on_cpu
    rounds = [[clock(call) for call in calls] for _ in range(repeats)]
    return [list(taken) for taken in zip(*rounds, strict=True)]


def _on_cpu(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _on_gpu(call: Callable[[], object]) -> float:
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    # The GPU waits until the call has been launched, because launching may take longer than the kernel.
    torch.cuda._sleep(_LAUNCH_CYCLES)  # type: ignore[no-untyped-call]
    first.record()
    call()
    last.record()
    last.synchronize()
    return 1e-3 * float(first.elapsed_time(last))


def _name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    path = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.+)", path.read_text() if path.is_file() else "")
    core = f"one core of {found[1] if found else platform.processor() or platform.machine()}"
    return f"{core} with {instruction_set(load_library())}" if "cpu" in implementations(device) else core


def _table(heading: str, rows: list[Row]) -> Table:
    caption = (
        "GB/s of input: 4 bytes an element; moved: all bytes that are read and written; both also relative to a copy"
    )
    texts, figures = ("operation", "implementation"), ("ms", "GB/s", "/ copy", "moved GB/s", "/ copy")
    table = new_table(heading, (*texts, *figures), texts, caption)
    for row in rows:
        rates = (row[name] for name in ("gb_per_s", "of_copy", "moved_gb_per_s", "moved_of_copy"))
        cells = (f"{figure:.2f}" for figure in (4e-6 * row["numel"] / row["gb_per_s"], *rates))
        table.add_row(row["operation"], row["implementation"], *cells)
    return table


_ADDING = {"add", "dequantize"}
"""Words in the names of kernels that add to their last argument."""


class CountingKernels:
    """Kernels that record the bytes of the last call: `moved`.

    Every tensor among the arguments and results is counted once, and the target of an addition twice.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels
        self.moved = 0

    def __getattr__(self, name: str) -> Any:
        kernel = getattr(self._kernels, name)

        def call(*args: Any, **keywords: Any) -> Any:
            result = kernel(*args, **keywords)
            self.moved = sum(map(_size, (*args, *keywords.values(), result)))
            if _ADDING & set(name.split("_")):
                self.moved += _size([arg for arg in args if isinstance(arg, Tensor)][-1])
            return result

        return call


def _size(value: Any) -> int:
    if isinstance(value, ResidualBuffers):
        return value.before.nbytes + value.after.nbytes
    if isinstance(value, list | tuple):
        return sum(map(_size, value))
    return value.nbytes if isinstance(value, Tensor) else 0
