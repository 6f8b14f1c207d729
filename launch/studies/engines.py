#!/usr/bin/env python3
"""Train one model with every engine: DeepSpeed ZeRO 1, Megatron's distributed optimizer, FSDP2 and DDP.

Each engine trains the same model from the same weights on the same batches, uncompressed and with gradients in 4 bits.
The table has the mean training losses, the final held-out losses, the change due to 4 bits, the ratio of uncompressed
(fp32) to sent gradient bytes by the package's counters, and the seconds per step without a network. The goal is that
the mean losses of all runs are within half a percent of each other.

Uncompressed engines round differently. At a constant learning rate these differences grow to a few tenths of a percent
in single losses and held-out losses. So the goal compares means. The largest difference between uncompressed
engines in the first steps, before rounding shows, is printed below the table.

Megatron's GPTModel gets the weights of the Hugging Face model (`copy_weights` in megatron_stepper.py). Its distributed
optimizer and FSDP2 reduce-scatter gradients. gloo all-reduces instead, so uncompressed they send twice the bytes.

Finished runs are kept and not repeated.

example, from the root of the repository:
  python -m launch.studies.engines --data data/shakespeare --output-dir runs/engines
"""

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from deepspeed_compress.config.numbers import change, shown
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import DEEPSPEED, OURS, Contender, Workload, group_contenders
from deepspeed_compress.tools.tables import print_table
from launch.studies.harness import ROOT, add_run_options, add_text_options, new_parser, prepare_data, run_study
from launch.studies.loss_curve import EVAL_TOKENS, WINDOW, Curve, Job, Run, train_all, trained_as

FILE = ROOT / "configs" / "zero1_int4.json"
"""Configuration of DeepSpeed. The other engines take its optimizer, batch and clipping."""
GOAL = 0.005
"""Largest allowed difference between mean losses, relative to the lowest one."""
FIRST = 20
"""Number of first steps, in which rounding does not show yet."""
ENGINES: Mapping[str, tuple[str, str]] = {
    "DeepSpeed ZeRO 1": (DEEPSPEED, OURS),
    "Megatron, distributed optimizer": ("megatron", "megatron-int4"),
    "FSDP2": ("fsdp2", "fsdp2-int4"),
    "DDP": ("ddp", "ddp-int4"),
}
"""Contenders of each engine: uncompressed, and with 4 bits."""


@dataclass(frozen=True)
class Result:
    """Results of a run. `train` is the mean loss of all batches, and `first` holds the losses of the first steps."""

    train: float
    held_out: float
    first: tuple[float, ...]
    seconds: float
    ratio: float | None

    @classmethod
    def of(cls, curve: Curve) -> "Result":
        """Return the results of a curve."""
        sent = curve.gradient_bytes
        ratio = sent[1] / sent[0] if sent else None
        train = statistics.fmean(curve.train)
        return cls(train, curve.held_out[-1][1], curve.train[:FIRST], curve.step_seconds, ratio)


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, print the table, and return the exit status."""
    return run_study(study, parse_options(argv))


def study(options: argparse.Namespace) -> bool:
    """Train the missing runs and print the table. Return True if all are finished."""
    data, kinds = prepare_data(options), [kind for pair in ENGINES.values() for kind in pair]
    jobs = {kind: job_of(options, kind, data) for kind in kinds}
    runs = {kind: Run(job, options.ranks, options.output_dir / f"{kind}.json") for kind, job in jobs.items()}
    curves = {kind: curve for kind, curve in train_all(runs, options).items() if curve is not None}
    if len(curves) == len(runs):
        report({kind: Result.of(curve) for kind, curve in curves.items()}, options)
    return len(curves) == len(runs)


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser)
    add_run_options(parser, 200)
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--ranks", type=positive_integer, default=2, help="(default: 2)")
    return parser.parse_args(argv)


def job_of(options: argparse.Namespace, kind: str, data: str) -> Job:
    """Return the job of a contender."""
    workload, contender = _contender(options, kind)
    ds_config = trained_as(FILE, options.seed)
    batch = workload.micro_batch * workload.accumulation * options.ranks * options.seq_len
    return Job(
        workload=workload,
        contender=contender,
        native={key: ds_config[key] for key in ("optimizer", "scheduler")},
        start=0,
        steps=options.steps,
        eval_every=options.steps,
        eval_batches=max(1, EVAL_TOKENS // batch),
        window=WINDOW,
        data=data,
    )


def _contender(options: argparse.Namespace, kind: str) -> tuple[Workload, Contender]:
    """Return the common workload and the contender of `kind`."""
    sizes = {"micro_batch": None, "seq_len": options.seq_len, "seed": options.seed}
    [group] = group_contenders([str(FILE)], str(options.model), (DEEPSPEED,), sizes, options.ranks)
    engine = next((contender for contender in group.contenders if contender.kind == kind), None)
    if engine is None:
        return group.workload, Contender(kind, kind)
    schedule = trained_as(FILE, options.seed)["scheduler"]
    return group.workload, Contender(kind, kind, {**(engine.ds_config or {}), "scheduler": schedule})


def report(results: Mapping[str, Result], options: argparse.Namespace) -> None:
    """Print the table and the differences between losses, and write both."""
    columns = ("engine", "training loss", "4 bits", "change", "held-out loss", "4 bits", "change")
    rows = []
    for engine, pair in ENGINES.items():
        alone, ours = (results[kind] for kind in pair)
        losses = [
            cell
            for plain, packed in ((alone.train, ours.train), (alone.held_out, ours.held_out))
            for cell in (f"{plain:.4f}", f"{packed:.4f}", change(packed / plain - 1))
        ]
        rows.append((engine, *losses, shown(ours.ratio, ".2f"), f"{alone.seconds:.3f}", f"{ours.seconds:.3f}"))
    title = f"{options.ranks} ranks, {options.steps} steps, 4 bits for gradients"
    print_table(title, (*columns, "bytes, times fewer", "seconds per step", "4 bits"), rows, ("engine",))
    apart = {name: _apart([getattr(result, name) for result in results.values()]) for name in ("train", "held_out")}
    first = [results[kind].first for kind, _ in ENGINES.values()]
    apart["first"] = max(_apart(losses) for losses in zip(*first, strict=True))
    verdict = "met" if apart["train"] <= GOAL else "missed"
    print(f"training losses differ by at most {apart['train']:.2%} (goal: {GOAL:.1%}; {verdict})")
    print(f"held-out losses by {apart['held_out']:.2%}; uncompressed, in the first steps, by {apart['first']:.1e}")
    runs = {kind: asdict(result) for kind, result in results.items()}
    write_json(options.output_dir / "engines.json", {"runs": runs, "apart": apart, "goal": GOAL})


def _apart(losses: Sequence[float]) -> float:
    return max(losses) / min(losses) - 1


if __name__ == "__main__":
    sys.exit(main())
