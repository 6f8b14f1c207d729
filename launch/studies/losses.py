#!/usr/bin/env python3
"""Compare the loss with compressed gradients or activations with that of DeepSpeed, over several seeds.

Each layout compresses one kind of messages: gradients under ZeRO 2, or activations of a model that is divided by tensor
parallelism, into two stages, by both on four ranks, or by parts of sequences. Everything else stays uncompressed. All
runs of a seed start from the same weights and see the same batches. The held-out loss is computed without compression.
The table has its mean over the seeds, the mean change relative to DeepSpeed with its standard error, by how much the
seeds themselves differ (the standard deviation of their losses), and the gradient bytes that a rank sends in a step.

Finished runs are kept and not repeated, and an interrupted study continues.

examples, from the root of the repository:
  python -m launch.studies.losses --data data/shakespeare --output-dir runs/activations
  python -m launch.studies.losses --data data/shakespeare --output-dir runs/both --layouts both --steps 500 \\
      --seq-len 256 --tokens 2048
  python -m launch.studies.losses --data data/shakespeare --output-dir runs/gradients --layouts gradients --steps 600 \\
      --model configs/models/gpt_10m.json
"""

import argparse
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.config import SECTION, read_ds_config
from deepspeed_compress.config.numbers import UNKNOWN, change
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import DEEPSPEED, group_contenders
from deepspeed_compress.tools.tables import new_console, new_table
from launch.studies.harness import ROOT, add_run_options, add_text_options, new_parser, prepare_data, run_study
from launch.studies.loss_curve import EVAL_TOKENS, Curve, Job, Run, train_all

MICRO_BATCH = 2
"""Sequences of a micro-batch."""
OPTIMIZER: Mapping[str, Any] = {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}
DECAYING = ROOT / "configs" / "zero2_none.json"
"""Configuration with the optimizer, the clipping, and the decaying learning rate of the layout `gradients`."""
INT4 = {"method": "blockwise", "bits": 4}
TOP_K = {"method": "topk", "density": 0.01, "values": INT4}
Settings = Mapping[str, Mapping[str, Any]]
"""Keys of the section by name."""


def _activations(settings: Settings) -> Settings:
    return {name: {"gradients": {"method": "none"}, "activations": kinds} for name, kinds in settings.items()}


def _bits(*kinds: str) -> Settings:
    return {f"int{bits}": {kind: {"bits": bits} for kind in kinds} for bits in (8, 4)}


MIXED = {"tensor": {"bits": 4, "backward_bits": 8}, "pipeline": {"bits": 8}}
"""Four bits in the sums of the forward pass only."""
GRADIENTS: Settings = {
    "int8": {"gradients": {"method": "blockwise", "bits": 8}},
    "int4": {"gradients": INT4},
    "topk1_int4": {"gradients": TOP_K},
    "topk1_int4_warmup": {"gradients": TOP_K, "schedule": {"warmup_steps": 60}},
}


@dataclass(frozen=True)
class Layout:
    """Division of the model between ranks.

    Attributes:
        ranks: Number of ranks.
        settings: Compressed settings.
        parallelism: Key of the section.
        native: Keys of DeepSpeed.
        stage: ZeRO stage.
        decays: Whether the optimizer and the learning rate are those of `DECAYING`.
    """

    ranks: int
    settings: Settings
    parallelism: Mapping[str, int] | None = None
    native: Mapping[str, int] = field(default_factory=dict)
    stage: int = 1
    decays: bool = False

    def keys(self, steps: int) -> dict[str, Any]:
        """Return the keys of DeepSpeed for a training of `steps` steps."""
        optimization: dict[str, Any] = {"optimizer": OPTIMIZER}
        if self.decays:
            ds_config = read_ds_config(str(DECAYING))
            ds_config["scheduler"]["params"]["total_num_steps"] = steps
            optimization = {key: ds_config[key] for key in ("optimizer", "scheduler", "gradient_clipping")}
        return {**optimization, "zero_optimization": {"stage": self.stage}, **self.native}


LAYOUTS: Mapping[str, Layout] = {
    "tensor": Layout(2, _activations({"merged": {"tensor": {}}, **_bits("tensor")}), {"tensor": 2}),
    "pipeline": Layout(2, _activations(_bits("pipeline")), {"pipeline": 2}),
    "both": Layout(4, _activations({**_bits("tensor", "pipeline"), "mixed": MIXED}), {"tensor": 2, "pipeline": 2}),
    "sequence": Layout(2, _activations(_bits("sequence")), native={"sequence_parallel_size": 2}),
    "gradients": Layout(2, GRADIENTS, stage=2, decays=True),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, print the table, and return the exit status."""
    return run_study(study, parse_options(argv))


def study(options: argparse.Namespace) -> bool:
    """Train the missing runs and print the table. Return True if all are finished."""
    curves = train_all(dict(find_runs(options, prepare_data(options))), options)
    print_table(options, curves)
    return None not in curves.values()


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser, "configs/models/llama_1m.json")
    add_run_options(parser, 200, (0, 1, 2))
    activations = [name for name in LAYOUTS if name != "gradients"]
    what = f"(default: {' '.join(activations)})"
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=activations, metavar="LAYOUT", help=what)
    what = "tokens of a replica in a step (default: 256)"
    parser.add_argument("--tokens", type=positive_integer, default=256, help=what)
    options = parser.parse_args(argv)
    if options.tokens % (MICRO_BATCH * options.seq_len):
        parser.error(
            f"--tokens {options.tokens}: micro-batches have {MICRO_BATCH} x --seq-len tokens; write a multiple"
        )
    return options


Key = tuple[str, str, int]
"""Layout, setting and seed of a run."""


def find_runs(options: argparse.Namespace, data: str) -> Iterator[tuple[Key, Run]]:
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
                yield (name, contender.name, seed), Run(job, ranks, file)


def _write_configs(options: argparse.Namespace, name: str) -> list[str]:
    """Write the configuration of each setting of a layout. Return the files."""
    layout, files = LAYOUTS[name], []
    for setting, section in layout.settings.items():
        files.append(options.output_dir / name / "configs" / f"{setting}.json")
        files[-1].parent.mkdir(parents=True, exist_ok=True)
        config = {
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": options.tokens // options.seq_len // MICRO_BATCH,
            **layout.keys(options.steps),
            SECTION: {**section, **({"parallelism": layout.parallelism} if layout.parallelism else {})},
        }
        write_json(files[-1], config)
    return list(map(str, files))


def print_table(options: argparse.Namespace, curves: Mapping[Key, Curve | None]) -> None:
    """Print the losses by layout and setting. Seeds with a missing run in a layout are left out."""
    title = f"held-out loss after {options.steps} steps of {options.tokens:,} tokens"
    names = ("layout", "compressed")
    columns = (*names, "seeds", "loss", "change", "seeds differ by", "gradient bytes")
    table = new_table(title, columns, names)
    for layout in options.layouts:
        settings = (DEEPSPEED, *LAYOUTS[layout].settings)
        rows = [[curves[layout, setting, seed] for setting in settings] for seed in options.seeds]
        complete = [[curve for curve in row if curve is not None] for row in rows if None not in row]
        by_setting = list(zip(*complete, strict=True))
        for setting, found in zip(settings, by_setting, strict=False):  # nothing without a complete seed
            table.add_row(layout, setting, *_cells(found, by_setting[0]))
        table.add_section()
    new_console().print(table)


def _cells(curves: Sequence[Curve], plain: Sequence[Curve]) -> Iterator[str]:
    """Yield the number of seeds, the mean loss, its change with a standard error, their spread, and the bytes."""
    losses, others = ([curve.held_out[-1][1] for curve in some] for some in (curves, plain))
    mean, changes = statistics.fmean(losses), [loss / other - 1 for loss, other in zip(losses, others, strict=True)]
    yield str(len(losses))
    yield f"{mean:.4f}"
    yield f"{change(statistics.fmean(changes))} ± {_deviation(changes, len(losses) ** 0.5)}"
    yield _deviation(losses, mean)
    yield f"{curves[-1].gradient_bytes[0]:,}" if curves[-1].gradient_bytes else UNKNOWN


def _deviation(values: Sequence[float], scale: float) -> str:
    return f"{statistics.stdev(values) / scale:.2%}" if len(values) > 1 else UNKNOWN


if __name__ == "__main__":
    sys.exit(main())
