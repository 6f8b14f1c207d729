#!/usr/bin/env python3
"""Measure the loss that rare exchanges cost: islands of one rank against an exchange in every step.

All runs have the same text, seeds, batches and learning-rate schedule: AdamW with a warm-up of a tenth of the steps,
then a cosine to a tenth of the rate, so that the last loss is that of a complete run. In the first tenth of the steps,
islands exchange in every step. Losses are on held-out text, averaged over islands. The table has the last one that was
measured after an exchange, next to the synchronous run's loss after the same step.
The network is this machine's memory, which does not change any loss. Finished runs are kept and not repeated.

examples, from the root of the repository:
  python -m launch.studies.islands_quality --data data/shakespeare --output-dir runs/islands
  python -m launch.studies.islands_quality --data data/shakespeare --output-dir runs/islands1000 --steps 1000 \\
      --only '^(every step|10 average)' --seeds 0 1 2
"""

import argparse
import copy
import re
import statistics
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from rich.table import Table

from deepspeed_compress.config import SECTION, read_ds_config
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import Contender, group_contenders
from deepspeed_compress.tools.tables import new_console, new_table
from launch.studies.harness import ROOT, add_run_options, add_text_options, new_parser, prepare_data, run_study
from launch.studies.loss_curve import Curve, Job, Run, train_all

FILE = ROOT / "configs" / "zero0_int4.json"
"""Base configuration. The section and the schedule are replaced."""
SYNCHRONOUS = "every step"
INT4 = {"method": "blockwise", "bits": 4}
SPARSE = {"method": "topk", "density": 0.03, "block_size": 4096, "values": {"method": "blockwise", "bits": 2}}
DECAYING = {**SPARSE, "error_feedback": {"decay": 0.95}}
AVERAGE, NESTEROV = {"optimizer": "average"}, {"optimizer": "nesterov", "lr": 0.7, "momentum": 0.9}
EXCHANGES: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    "average, 4 bits": (AVERAGE, INT4),
    "average, top-k": (AVERAGE, SPARSE),
    "nesterov, 4 bits": (NESTEROV, INT4),
    "nesterov, top-k": (NESTEROV, SPARSE),
    "sparseloco": (AVERAGE, DECAYING),
    "nesterov of 0.5, 4 bits": ({**NESTEROV, "momentum": 0.5}, INT4),
    "nesterov of 0.5, uncompressed": ({**NESTEROV, "momentum": 0.5}, {"method": "none"}),
    "nesterov of 0.7, 4 bits": ({**NESTEROV, "momentum": 0.7}, INT4),
}
INTERVALS = (5, 10, 30, 100)
FASTER = (
    "average, 4 bits",
    "average, top-k",
    "sparseloco",
    "nesterov of 0.5, 4 bits",
    "nesterov of 0.5, uncompressed",
    "nesterov of 0.7, 4 bits",
)
"""Exchanges that are also run at other learning rates and with second moments."""
RATES = {", half the rate": 0.5, ", twice the rate": 2}
"""Factors of the inner learning rate. Adam takes shorter steps with the noisier batch of an island."""
MOMENTS: Mapping[str, Any] = {
    "": None,
    ", second moments": {"block_size": 1},
    ", second moments in blocks": {"block_size": 128},
}
MUON = {"type": "Muon", "params": {"muon_lr": 0.02, "adam_lr": 1e-3, "momentum": 0.95, "weight_decay": 0.1}}
"""Optimizer of names with the suffix `INSIDE`: Muon for matrices, and Adam for embeddings and vectors."""
INSIDE = ", muon"
START = 0.1
"""Share of the steps at the start in which islands exchange every time."""
EVAL_EVERY, EVAL_BATCHES = 30, 16
"""With intervals of at most 30 steps, islands exchange in every 30th step."""


def variants(steps: int) -> dict[str, dict[str, Any]]:
    """Return the sections by name."""

    def islands(every: int, name: str, **keys: Any) -> dict[str, Any]:
        outer, exchange = EXCHANGES[name]
        return {
            "gradients": {"method": "none"},
            "islands": {
                "size": 1,
                "sync_every": every,
                "outer": outer,
                "exchange": exchange,
                # Intervals of at most 30 steps begin together.
                "warmup_steps": round(START * steps / EVAL_EVERY) * EVAL_EVERY,
                **keys,
            },
        }

    found = {f"{every} {name}": islands(every, name) for every, name in product(INTERVALS, EXCHANGES)}
    return {
        SYNCHRONOUS: {"gradients": {"method": "none"}},
        f"{SYNCHRONOUS}, 4 bits": {"gradients": INT4},
        **found,
        **{
            f"{every} {name}{moments}{rate}": islands(every, name, second_moments=MOMENTS[moments])
            for every, name, moments, rate in product(INTERVALS, FASTER, MOMENTS, ("", *RATES))
        },
        **{f"{SYNCHRONOUS}{rate}": {"gradients": {"method": "none"}} for rate in (*RATES, INSIDE)},
        f"{SYNCHRONOUS}, 4 bits{INSIDE}": {"gradients": INT4},
        **{
            f"{every} {name}{moments}{INSIDE}": islands(every, name, second_moments=MOMENTS[moments])
            for every, name, moments in product(INTERVALS, FASTER, MOMENTS)
        },
    }


def job_of(name: str, seed: int, options: argparse.Namespace, data: str) -> Job:
    """Return the job of a run."""
    steps = options.steps
    ds_config = read_ds_config(str(FILE))
    schedule = {"total_num_steps": steps, "warmup_num_steps": steps // 10, "cos_min_ratio": 0.1}
    ds_config |= {
        "scheduler": {"type": "WarmupCosineLR", "params": schedule | {"warmup_type": "linear"}},
        SECTION: variants(steps)[name] | {"seed": seed, "monitor": {"every": 1000}},
    }
    ds_config["optimizer"]["params"]["lr"] *= next((times for end, times in RATES.items() if name.endswith(end)), 1)
    if name.endswith(INSIDE):
        ds_config["optimizer"] = copy.deepcopy(MUON)
    ds_config["optimizer"]["params"]["betas"] = [0.9, options.beta2]
    ds_config["gradient_clipping"] = options.clipping
    sizes = {"micro_batch": options.micro_batch, "seq_len": options.seq_len, "seed": seed}
    (group,) = group_contenders([str(FILE)], str(options.model), (), sizes, options.hosts)
    ds_config["train_micro_batch_size_per_gpu"] = group.workload.micro_batch
    return Job(
        workload=group.workload,
        contender=Contender(name, name, ds_config),
        native={key: ds_config[key] for key in ("optimizer", "scheduler")},
        start=0,
        steps=steps,
        eval_every=EVAL_EVERY,
        eval_batches=EVAL_BATCHES,
        window=50,
        data=data,
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, print the table, and return the exit status."""
    return run_study(study, parse_options(argv))


def study(options: argparse.Namespace) -> bool:
    """Train the missing runs and print the table. Return True if all are finished."""
    data, sections = prepare_data(options), variants(options.steps)
    runs = {
        (name, seed): Run(job_of(name, seed, options, data), options.hosts, file_of(options, name, seed))
        for seed, name in product(options.seeds, filter(options.only.search, sections))
    }
    curves = {key: run.curve() for key, run in runs.items()} if options.train_none else train_all(runs, options)
    new_console().print(table({key: curve for key, curve in curves.items() if curve is not None}, sections))
    return None not in curves.values()


def file_of(options: argparse.Namespace, name: str, seed: int) -> Path:
    """Return the file of a run."""
    path: Path = options.output_dir / f"seed{seed}" / f"{re.sub('[^a-z0-9]+', '_', name)}.json"
    return path


def table(curves: Mapping[tuple[str, int], Curve], sections: Mapping[str, Mapping[str, Any]]) -> Table:
    """Return the table of last losses: means over seeds, and relative to an exchange in every step.

    A run is compared with the synchronous run of the same seed, optimizer and learning rate.
    """
    shown = new_table("", ("exchanges", "seeds", "after step", "held-out loss", "of synchronous"), ("exchanges",))
    losses: dict[str, dict[int, Mapping[float, float]]] = {}
    for (name, seed), curve in curves.items():
        losses.setdefault(name, {})[seed] = dict(curve.held_out)
    for name, loss in losses.items():
        ending = next((end for end in (*RATES, INSIDE) if name.endswith(end)), "")
        synchronous = losses.get(f"{SYNCHRONOUS}{ending}", {})
        step = last_exchange(sections[name], next(iter(loss.values())))
        shown.add_row(name, *(_row(loss, synchronous, step) if step else (str(len(loss)), "no exchange", "-", "-")))
    return shown


def _row(
    losses: Mapping[int, Mapping[float, float]], synchronous: Mapping[int, Mapping[float, float]], step: float
) -> tuple[str, ...]:
    """Return the cells of a row after its name. Losses are given by seed, and then by step."""
    ratios = [losses[seed][step] / synchronous[seed][step] - 1 for seed in losses if seed in synchronous]
    mean = statistics.fmean(loss[step] for loss in losses.values())
    ratio = f"{100 * statistics.fmean(ratios):+.2f} %" if ratios else "-"
    return str(len(losses)), f"{step:,.0f}", f"{mean:.4f}", ratio


def last_exchange(section: Mapping[str, Any], losses: Mapping[float, float]) -> float | None:
    """Return the last evaluated step in which all islands exchanged, if any. Between exchanges, islands drift apart."""
    every = section.get("islands", {}).get("sync_every", 1)
    return max((step for step in losses if step % every == 0), default=None)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser)
    add_run_options(parser, 300, (0,))
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="names to train")
    parser.add_argument("--train-none", action="store_true", help="only print the table of finished runs")
    parser.add_argument("--hosts", type=positive_integer, default=4, help="islands of one rank (default: 4)")
    parser.add_argument("--micro-batch", type=positive_integer, help="sequences per island (default: as in the file)")
    parser.add_argument("--beta2", type=float, default=0.95, help="beta2 of the inner optimizer (default: 0.95)")
    parser.add_argument("--clipping", type=float, default=1.0, help="largest norm of the inner gradients (default: 1)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
