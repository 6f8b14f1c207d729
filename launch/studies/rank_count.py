"""Measure the host's work for one bucket against the number of ranks, and draw it.

    python launch/studies/rank_count.py measure --output after.json
    python launch/studies/rank_count.py draw before.json after.json --output rank-count.png

A mirror stands for all other ranks, so messages take no time. A bucket of a million elements in bf16 is reduced for its
owners, with 4 bits and error feedback, and then gathered. Processor time and the calls of kernels are those of one
thread, without those of the mirror. With another checkout in PYTHONPATH, `measure` measures that one.
"""

import argparse
import inspect
import json
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.exchange import Link
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise, Cast
from deepspeed_compress.compression.feedback import ErrorFeedback
from deepspeed_compress.compression.kernels import for_device
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.monitor import Meter
from deepspeed_compress.tools.bench.mirror import Mirror

RANKS = (2, 4, 8, 16, 32, 64, 128, 256, 512)
SIZES = tuple((f"{kind}{layer}", numel) for layer in range(4) for kind, numel in (("norm", 512), ("weight", 261_632)))
STEPS = 30


class TimedMirror(Mirror):
    """Mirror that adds up the processor time of its own copies, which a network does not need."""

    seconds = 0.0

    def _timed(self, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.process_time()
        work = call(*arguments)
        self.seconds += time.process_time() - begin
        return work

    def alltoall_base(self, *arguments: Any) -> Any:
        return self._timed(super().alltoall_base, *arguments)

    def allgather(self, *arguments: Any) -> Any:
        return self._timed(super().allgather, *arguments)

    def _allgather_base(self, *arguments: Any) -> Any:
        return self._timed(super()._allgather_base, *arguments)


def measure(ranks: int) -> dict[str, float]:
    """Return the processor time of a bucket in milliseconds, and its calls of kernels."""
    store = Residuals("bf16", transactional=True)
    channels = (
        Channel(Codec(Cast(torch.bfloat16)), uncompressed=True),
        Channel(Codec(Blockwise(4, 64)), ErrorFeedback(store)),
    )
    group: Any = TimedMirror(0, ranks)
    messages = Messages(channels, {name: 1 for name, _ in SIZES if name.startswith("weight")})
    reducer = PayloadReducer(Link(group), messages, Run(StepClock(), Meter(timed=False)))
    partition, times = even_partition(SIZES, ranks), []
    bucket = torch.randn(partition.numel).to(torch.bfloat16)

    def step(number: int) -> None:
        reducer.run.clock.begin(number)
        reducer.reduce_scatter(bucket, partition, 1 / ranks)
        reducer.all_gather(bucket, partition)
        store.commit()

    for number in range(STEPS):
        begin = time.process_time() - group.seconds
        step(number)
        times.append(time.process_time() - group.seconds - begin)
    module = for_device(torch.device("cpu"))
    with ExitStack() as stack:
        kernels = [
            stack.enter_context(patch.object(module, name, wraps=operation))
            for name, operation in inspect.getmembers(module, inspect.isfunction)
            if name[0] != "_" and "compression.kernels" in operation.__module__
        ]
        step(STEPS)
    calls = sum(kernel.call_count for kernel in kernels)
    return {"ranks": ranks, "ms": 1e3 * statistics.median(times[3:]), "kernels": calls}


def draw(files: list[Path], output: Path) -> None:
    """Draw processor time and calls of kernels of each of `files`, named by its stem."""
    from matplotlib import pyplot, ticker

    figure, axes = pyplot.subplots(1, 2, figsize=(8, 3))
    for file in files:
        rows = json.loads(file.read_text(encoding="utf-8"))
        for axis, key in zip(axes, ("ms", "kernels"), strict=True):
            axis.plot([row["ranks"] for row in rows], [row[key] for row in rows], marker="o", label=file.stem)
    for axis, title in zip(axes, ("processor time per bucket, ms", "calls of kernels per bucket"), strict=True):
        axis.set(xscale="log", yscale="log", xlabel="ranks", title=title)
        axis.set_xticks(RANKS, [str(ranks) for ranks in RANKS])
        axis.yaxis.set_major_locator(ticker.LogLocator(2, numticks=20))
        axis.yaxis.set_major_formatter(ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(output, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["measure", "draw"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    if options.action == "draw":
        draw(options.files, options.output)
        return
    torch.set_num_threads(1)
    rows = []
    for ranks in RANKS:
        rows.append(measure(ranks))
        print(rows[-1], flush=True)
        options.output.write_text(json.dumps(rows, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
