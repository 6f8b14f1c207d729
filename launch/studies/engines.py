#!/usr/bin/env python3
"""One model through every engine: DeepSpeed ZeRO 1, Megatron's distributed optimizer, FSDP2 and DDP.

Each trains the same model from the same weights on the same batches, alone and with gradients in 4 bits. The table has
mean losses of all training steps, held-out losses at the end, the difference that 4 bits make, how many times fewer
bytes of gradients a rank sends than the engine would alone (in fp32, by the package's counters), and seconds of a step
without a network. The goal is that the mean losses of all runs are within half a percent of one another.

Alone, engines differ by how they round; at a constant rate such differences grow, until losses of single steps, and
held-out losses too, are apart by a few tenths of a percent. So the means decide, and the first steps tell how equal the
engines are: below the table is by how much losses of engines alone differ in them at most.

Megatron's GPTModel gets the weights of the Hugging Face model (deepspeed_compress.models.megatron). Its distributed
optimizer and FSDP2 reduce-scatter gradients, and gloo all-reduces for that, so alone they send twice what others would.

Finished runs are kept and not repeated.

example, from the root of the repository:
  python -m launch.studies.engines --data data/shakespeare --output-dir runs/engines
"""

import argparse
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from deepspeed_compress.config.numbers import change, shown
from deepspeed_compress.tools.arguments import positive_integer
from deepspeed_compress.tools.bench.workload import DEEPSPEED, OURS, Contender, Workload, group_contenders
from deepspeed_compress.tools.files import write_json
from launch.studies.loss_curve import Curve, Job, finished, run_job
from launch.studies.text import cache_dir, prepare_data
from launch.studies.time_to_loss import CPU, EVAL_TOKENS, WINDOW, trained_as

FILE = Path("configs/zero1_int4.json")
"""What DeepSpeed is told; optimizer, batch and clipping of all others too."""
GOAL = 0.005
"""Of the least loss: what the others may differ by."""
FIRST = 20
"""Steps before rounding shows."""
ENGINES: Mapping[str, tuple[str, str]] = {
    "DeepSpeed ZeRO 1": (DEEPSPEED, OURS),
    "Megatron, distributed optimizer": ("megatron", "megatron-int4"),
    "FSDP2": ("fsdp2", "fsdp2-int4"),
    "DDP": ("ddp", "ddp-int4"),
}
"""The contenders of each: alone, and with 4 bits."""


@dataclass(frozen=True)
class Result:
    """What a run gave. `train`: mean loss of all batches. `first`: losses of the first steps."""

    train: float
    held_out: float
    first: tuple[float, ...]
    seconds: float
    ratio: float | None

    @classmethod
    def of(cls, curve: Curve) -> "Result":
        sent = curve.gradient_bytes
        ratio = sent[1] / sent[0] if sent else None
        train = statistics.fmean(curve.train)
        return cls(train, curve.held_out[-1][1], curve.train[:FIRST], curve.step_seconds, ratio)


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    os.environ |= CPU
    data, kinds = prepare_data(options), [kind for pair in ENGINES.values() for kind in pair]
    for kind in track(kinds, "runs", console=Console(stderr=True)):
        run_job(_job(options, kind, data), options.ranks, cache_dir(options), _file(options, kind))
    curves = {kind: finished(_file(options, kind)) for kind in kinds}
    failed = [kind for kind, curve in curves.items() if curve is None]
    if failed:
        print(f"failed, see their .log in {options.output_dir}: {', '.join(failed)}", file=sys.stderr)
        return 1
    report({kind: Result.of(curve) for kind, curve in curves.items() if curve is not None}, options)
    return 0


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m launch.studies.engines",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--data", type=Path, nargs="+", required=True, help="text files or directories")
    parser.add_argument("--output-dir", type=Path, required=True, help="curves, and the table as engines.json")
    parser.add_argument("--model", type=Path, default=Path("configs/models/gpt_10m.json"))
    parser.add_argument("--ranks", type=positive_integer, default=2, help="(default: 2)")
    parser.add_argument("--steps", type=positive_integer, default=200, help="(default: 200)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seq-len", type=positive_integer, default=64)
    return parser.parse_args(argv)


def _file(options: argparse.Namespace, kind: str) -> Path:
    path: Path = options.output_dir / f"{kind}.json"
    return path


def _job(options: argparse.Namespace, kind: str, data: str) -> Job:
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
    """What every engine computes in a step, and who does."""
    sizes = {"micro_batch": None, "seq_len": options.seq_len, "seed": options.seed}
    [group] = group_contenders([str(FILE)], str(options.model), (DEEPSPEED,), sizes, options.ranks)
    found = next((one for one in group.contenders if one.kind == kind), None)
    if found is None:
        return group.workload, Contender(kind, kind)
    schedule = trained_as(FILE, options.seed)["scheduler"]
    return group.workload, Contender(kind, kind, {**(found.ds_config or {}), "scheduler": schedule})


def report(results: Mapping[str, Result], options: argparse.Namespace) -> None:
    """Print the table and how far losses are apart, and write both."""
    table = Table(title=f"{options.ranks} ranks, {options.steps} steps, 4 bits for gradients", title_justify="left")
    columns = ("engine", "training alone", "4 bits", "difference", "held-out alone", "4 bits", "difference")
    for column in (*columns, "bytes, times fewer", "seconds alone", "4 bits"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for engine, pair in ENGINES.items():
        alone, ours = (results[kind] for kind in pair)
        losses = [
            cell
            for one, two in ((alone.train, ours.train), (alone.held_out, ours.held_out))
            for cell in (f"{one:.4f}", f"{two:.4f}", change(two / one - 1))
        ]
        table.add_row(engine, *losses, shown(ours.ratio, ".2f"), f"{alone.seconds:.3f}", f"{ours.seconds:.3f}")
    Console(width=150).print(table)
    apart = {name: _apart([getattr(one, name) for one in results.values()]) for name in ("train", "held_out")}
    first = [results[kind].first for kind, _ in ENGINES.values()]
    apart["first"] = max(_apart(losses) for losses in zip(*first, strict=True))
    verdict = "met" if apart["train"] <= GOAL else "missed"
    print(f"training losses are within {apart['train']:.2%} of one another (goal: {GOAL:.1%}; {verdict})")
    print(f"held-out losses within {apart['held_out']:.2%}; engines alone, in the first steps, {apart['first']:.1e}")
    found = {kind: asdict(one) for kind, one in results.items()}
    write_json(options.output_dir / "engines.json", {"runs": found, "apart": apart, "goal": GOAL})


def _apart(losses: Sequence[float]) -> float:
    return max(losses) / min(losses) - 1


if __name__ == "__main__":
    sys.exit(main())
