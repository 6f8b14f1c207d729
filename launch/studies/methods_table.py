"""Train a small GPT-2 with every compression method, and write loss, bytes and time as a table.

Each run is a process with threads as ranks (see methods_lab). Finished runs are kept and not repeated, and the table
shows all of them. Remove the runs of a method after you change its code.

examples, from the root of the repository:
  python -m launch.studies.methods_table --data data/shakespeare --output-dir runs/table --jobs 2
  python -m launch.studies.methods_table --data data/shakespeare --output-dir runs/table --only 'demo|powersgd' \\
      --seeds 0 1 2
"""

import argparse
import math
import multiprocessing
import re
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from rich.progress import Progress

from deepspeed_compress.config.numbers import shown
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.tables import print_table
from launch.studies.harness import (
    ROOT,
    add_run_options,
    add_text_options,
    cache_dir,
    markdown,
    new_parser,
    prepare_data,
    read_result,
    run_study,
)
from launch.studies.methods_lab import Spec, digest, run
from launch.studies.methods_settings import ADAM, BASELINE, SETTINGS

ZERO_1_BITS = 48
"""Bits per element and step of 16-bit training with DeepSpeed, which all-reduces gradients and gathers weights."""


def main(argv: Sequence[str] | None = None) -> int:
    """Train the missing runs, write the table, and return the exit status."""
    return run_study(study, parse_options(argv))


def study(options: argparse.Namespace) -> bool:
    """Train the missing runs, and write the table of all. Return True if none has failed."""
    specs = _specs(options, prepare_data(options))
    failures = _run_missing(options, specs)
    rows = table_rows({name: _results(options, specs, name) for name in SETTINGS})
    if rows:
        title = f"{options.steps} steps, {options.ranks} ranks; bits per parameter and step, CPU time per rank and step"
        print_table(title, HEAD, map(cells, rows), HEAD[:1])
        (options.output_dir / "table.md").write_text(markdown(HEAD, map(cells, rows)), encoding="utf-8")
    return not failures


def parse_options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = new_parser(__doc__)
    add_text_options(parser, str(ROOT / "configs/models/gpt_2m.json"))
    add_run_options(parser, 400, (0,))
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="settings to run")
    parser.add_argument("--jobs", type=int, default=1, help="number of parallel runs; each takes one to four cores")
    parser.add_argument("--ranks", type=int, choices=range(2, 17), default=4, metavar="N")
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per rank and step (default: 4)")
    return parser.parse_args(argv)


Run = tuple[str, int]
"""Setting and seed of a run."""


def _file(options: argparse.Namespace, name: str, seed: int) -> Path:
    path: Path = options.output_dir / name / f"seed{seed}.json"
    return path


def _specs(options: argparse.Namespace, data: str) -> dict[Run, Spec]:
    common = {"steps": options.steps, "ranks": options.ranks, "micro_batch": options.micro_batch}
    common |= {"seq_len": options.seq_len, "model": digest(options.model), "data": data}
    specs = {}
    for name, setting in SETTINGS.items():
        section = {key: value for key, value in setting.items() if key != "betas"}
        for seed in options.seeds:
            specs[name, seed] = Spec(section=section, betas=setting.get("betas", ADAM), seed=seed, **common)
    return specs


def _run_missing(options: argparse.Namespace, specs: Mapping[Run, Spec]) -> int:
    """Run the missing runs. Return the number of failures."""
    asked = [chosen for chosen in specs if chosen[0] == BASELINE or options.only.search(chosen[0])]
    missing = [chosen for chosen in asked if read_result(_file(options, *chosen), "spec", specs[chosen]) is None]
    failures = 0
    # Use a fresh process for every run, so that no run slows down the next one.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.jobs, spawn, max_tasks_per_child=1) as pool, Progress() as progress:
        task = progress.add_task("runs", total=len(asked), completed=len(asked) - len(missing))
        places = (options.model, cache_dir(options))
        futures = {pool.submit(_run, specs[chosen], *places, _file(options, *chosen)): chosen for chosen in missing}
        for future in as_completed(futures):
            name, seed = futures[future]
            if error := future.exception():
                failures += 1
                progress.console.print(f"{name}, seed {seed}: {type(error).__name__}: {error}", style="red")
            progress.update(task, advance=1, description=f"{name}, seed {seed} done")
    return failures


def _run(spec: Spec, model: Path, cache_dir: Path, file: Path) -> None:
    """Train a run and write its complete result."""
    result = {"spec": asdict(spec), **run(spec, model, cache_dir)}
    file.parent.mkdir(parents=True, exist_ok=True)
    write_json(file, result)


def _results(options: argparse.Namespace, specs: Mapping[Run, Spec], name: str) -> dict[int, dict[str, Any]]:
    """Return the finished runs of a setting by seed."""
    found = {seed: read_result(_file(options, name, seed), "spec", specs[name, seed]) for seed in options.seeds}
    return {seed: result for seed, result in found.items() if result is not None}


@dataclass(frozen=True)
class Row:
    """Means over the seeds of a setting. `gaps` are the losses above the baseline's with the same seed, in percent."""

    name: str
    gradients: float
    weights: float
    with_warmup: float
    gaps: tuple[float, ...]
    compress_ms: float
    decompress_ms: float

    @property
    def bits(self) -> float:
        """Bits of gradients and weights."""
        return self.gradients + self.weights

    @property
    def gap(self) -> float:
        """Mean gap, or NaN without a baseline."""
        return fmean(self.gaps) if self.gaps else math.nan

    @property
    def spread(self) -> float:
        """Standard deviation over the seeds, or 0 for one seed."""
        return stdev(self.gaps) if len(self.gaps) > 1 else 0.0


def table_rows(results: Mapping[str, Mapping[int, Mapping[str, Any]]]) -> list[Row]:
    """Return the rows of all settings with results, fewest bits first."""
    base = {seed: result["eval_loss"] for seed, result in results[BASELINE].items()}
    rows = [_row(name, by_seed, base) for name, by_seed in results.items() if by_seed]
    return sorted(rows, key=lambda row: row.bits)


def _row(name: str, by_seed: Mapping[int, Mapping[str, Any]], base: Mapping[int, float]) -> Row:
    keys = ("bits_gradients", "bits_weights", "bits_with_warmup", "compress_ms", "decompress_ms")
    gradients, weights, total, *times = (fmean(result[key] for result in by_seed.values()) for key in keys)
    gaps = tuple(100 * (result["eval_loss"] / base[seed] - 1) for seed, result in by_seed.items() if seed in base)
    return Row(name, gradients, weights, total, gaps, *times)


HEAD = (
    "setting",
    "gradients, bits",
    "weights, bits",
    "fewer bytes than ZeRO 1",
    "with dense start, bits",
    "gap",
    "seeds",
    "compress, ms",
    "decompress, ms",
)


def cells(row: Row) -> list[str]:
    """Return the cells of `row` in the columns of `HEAD`."""
    spread = f" ± {row.spread:.2f}" if len(row.gaps) > 1 else ""
    gap = f"{row.gap:+.2f}{spread} %" if math.isfinite(row.gap) else "diverged" if row.gaps else "-"
    return [
        row.name,
        f"{row.gradients:.3f}",
        f"{row.weights:.3f}",
        shown(ZERO_1_BITS / row.bits, ".1f", suffix="x"),
        f"{row.with_warmup:.3f}",
        gap,
        str(len(row.gaps)),
        f"{row.compress_ms:.1f}",
        f"{row.decompress_ms:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(main())
