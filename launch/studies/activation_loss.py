#!/usr/bin/env python3
"""Compare the loss of a Llama with compressed activations with that of DeepSpeed, over several seeds.

The model is divided by tensor parallelism, into two stages, by both on four ranks, and by parts of sequences. Gradients
and weights stay uncompressed. All runs of a seed start from the same weights and see the same batches. The held-out
loss is computed without compression. The table has its mean over the seeds, the mean change relative to DeepSpeed with
its standard error, and by how much the seeds themselves differ (the standard deviation of their losses).

Finished runs are kept and not repeated, and an interrupted study continues.

examples, from the root of the repository:
  python -m launch.studies.activation_loss --data data/shakespeare --output-dir runs/activation_loss
  python -m launch.studies.activation_loss --data data/shakespeare --output-dir runs/both --layouts both --steps 500 \\
      --seq-len 256 --tokens 2048
"""

import argparse
import os
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from deepspeed_compress.config import SECTION
from deepspeed_compress.config.numbers import UNKNOWN, change
from deepspeed_compress.errors import CompressError
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import DEEPSPEED, group_contenders
from launch.studies.loss_curve import Job, finished, run_job
from launch.studies.text import cache_dir, prepare_data
from launch.studies.time_to_loss import CPU, EVAL_TOKENS

MICRO_BATCH = 2
"""Sequences of a micro-batch."""
OPTIMIZER: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
Activations = Mapping[str, Any]


MIXED: Activations = {"tensor": {"bits": 4, "backward_bits": 8}, "pipeline": {"bits": 8}}
"""Four bits in the sums of the forward pass only."""


def _bits(*kinds: str) -> dict[str, Activations]:
    return {f"int{bits}": {kind: {"bits": bits} for kind in kinds} for bits in (8, 4)}


@dataclass(frozen=True)
class Layout:
    """Division of the model between ranks.

    Attributes:
        ranks: number of ranks.
        settings: values of `activations`, by name.
        parallelism: key of the section.
        native: keys of DeepSpeed.
    """

    ranks: int
    settings: Mapping[str, Activations]
    parallelism: Mapping[str, int] | None = None
    native: Mapping[str, int] = field(default_factory=dict)


LAYOUTS: Mapping[str, Layout] = {
    "tensor": Layout(2, {"merged": {"tensor": {}}, **_bits("tensor")}, {"tensor": 2}),
    "pipeline": Layout(2, _bits("pipeline"), {"pipeline": 2}),
    "both": Layout(4, _bits("tensor", "pipeline") | {"mixed": MIXED}, {"tensor": 2, "pipeline": 2}),
    "sequence": Layout(2, _bits("sequence"), native={"sequence_parallel_size": 2}),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs and print the table. Return 1 if a run failed, or 2 if an option is wrong."""
    options = _options(argv)
    os.environ |= CPU
    try:
        runs = list(find_runs(options, prepare_data(options)))
        for run in track(runs, "runs", console=Console(stderr=True)):
            if run.loss is None and not run_job(run.job, LAYOUTS[run.layout].ranks, cache_dir(options), run.file):
                print(f"{run.file}: failed, see {run.file.with_suffix('.log')}", file=sys.stderr)
        losses = {(run.layout, run.setting, run.seed): run.loss for run in runs}
    except CompressError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    Console(width=100).print(table_of(options, losses))
    return int(None in losses.values())


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.activation_loss",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--output-dir", type=Path, required=True, help="directory for the curves")
    parser.add_argument(
        "--model", type=Path, default=Path("configs/models/llama_1m.json"), help="(default: a Llama of bytes)"
    )
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), metavar="LAYOUT")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="(default: 0 1 2)")
    parser.add_argument("--steps", type=positive_integer, default=200, help="(default: 200)")
    parser.add_argument("--seq-len", type=positive_integer, default=64, help="(default: 64)")
    parser.add_argument("--tokens", type=positive_integer, default=256, help="tokens of a step (default: 256)")
    options = parser.parse_args(argv)
    if options.tokens % (MICRO_BATCH * options.seq_len):
        parser.error(
            f"--tokens {options.tokens}: micro-batches have {MICRO_BATCH} x --seq-len tokens; write a multiple"
        )
    return options


@dataclass(frozen=True)
class Run:
    """Training of one setting with one seed. Its curve is in `file` when it is finished."""

    layout: str
    setting: str
    seed: int
    job: Job
    file: Path

    @property
    def loss(self) -> float | None:
        """Return the held-out loss; None if the run is not finished."""
        curve = finished(self.job, self.file)
        return None if curve is None else curve.held_out[-1][1]


def find_runs(options: argparse.Namespace, data: str) -> Iterator[Run]:
    """Yield all runs of the options on the tokens of the key `data`, seed by seed."""
    for seed in options.seeds:
        sizes = {"micro_batch": None, "seq_len": options.seq_len, "seed": seed}
        for name in options.layouts:
            files, ranks = _write_configs(options, name), LAYOUTS[name].ranks
            [group] = group_contenders(files, str(options.model), (DEEPSPEED,), sizes, ranks)
            for contender in group.contenders:
                job = Job(
                    workload=group.workload,
                    contender=contender,
                    native={"optimizer": OPTIMIZER},
                    start=0,
                    steps=options.steps,
                    eval_every=options.steps,
                    eval_batches=max(1, EVAL_TOKENS // options.tokens),
                    window=1,
                    data=data,
                )
                file = options.output_dir / name / f"{contender.name}-{seed}.json"
                yield Run(name, contender.name, seed, job, file)


def _write_configs(options: argparse.Namespace, name: str) -> list[str]:
    """Write the configuration of each setting of a layout. Return the files."""
    layout, files = LAYOUTS[name], []
    for setting, activations in layout.settings.items():
        files.append(options.output_dir / name / "configs" / f"{setting}.json")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        section = {"gradients": {"method": "none"}, "activations": activations}
        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": options.tokens // options.seq_len // MICRO_BATCH,
            "optimizer": OPTIMIZER,
            "zero_optimization": {"stage": 1},
            **layout.native,
            SECTION: section | ({"parallelism": layout.parallelism} if layout.parallelism else {}),
        }
        write_json(files[-1], config)
    return list(map(str, files))


def table_of(options: argparse.Namespace, losses: Mapping[tuple[str, str, int], float | None]) -> Table:
    """Return the table of the losses by layout, setting and seed. Seeds with a missing run in a layout are left out."""
    title = f"held-out loss after {options.steps} steps of {options.tokens:,} tokens"
    table = Table("layout", "activations", "seeds", "loss", "change", "seeds differ by", title=title)
    for layout in options.layouts:
        settings = (DEEPSPEED, *LAYOUTS[layout].settings)
        rows = [[losses[layout, setting, seed] for setting in settings] for seed in options.seeds]
        complete = [[loss for loss in row if loss is not None] for row in rows if None not in row]
        columns = list(zip(*complete, strict=True))
        for setting, column in zip(settings, columns, strict=False):  # no columns without a complete seed
            table.add_row(layout, setting, *_cells(column, columns[0]))
        table.add_section()
    return table


def _cells(losses: Sequence[float], plain: Sequence[float]) -> Iterator[str]:
    """Yield the number of seeds, the mean loss, its change with a standard error, and the spread of the seeds."""
    mean, changes = statistics.fmean(losses), [loss / other - 1 for loss, other in zip(losses, plain, strict=True)]
    yield str(len(losses))
    yield f"{mean:.4f}"
    yield f"{change(statistics.fmean(changes))} ± {_deviation(changes, len(losses) ** 0.5)}"
    yield _deviation(losses, mean)


def _deviation(values: Sequence[float], scale: float) -> str:
    return f"{statistics.stdev(values) / scale:.2%}" if len(values) > 1 else UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
