"""Measurements of ``ds-compress plan cluster``: probes of links and kernels, and steps of some layouts."""

import argparse
import json
import math
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.progress import Progress

from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.planner.choices import Choice
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import matrix_products
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Measured, Probe, Step, fit_measured
from deepspeed_compress.planner.search import Job, Plan
from deepspeed_compress.tools.bench.jobs import JobRanks, Row, find_ranks
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.bench.workload import group_contenders
from deepspeed_compress.tools.tables import print_table

LAYOUTS = 3
"""Number of layouts whose steps `--measure` takes."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Extent of a measurement.

    Attributes:
        shares: Sizes of messages, as shares of the largest.
        longest: Seconds that the largest message may take at the network's rate.
        batch_seconds: Seconds in which short messages are repeated, three times.
        steps: Measured steps of a layout; one period between exchanges if it has islands.
        step_seconds: Seconds that steps of a layout may take together if they are more than that.
    """

    shares: tuple[float, ...]
    longest: float
    batch_seconds: float
    steps: int
    step_seconds: float = 0.0

    def count(self, layout: Layout, job: Job) -> int:
        """Return the number of steps to measure. Short steps are repeated, since they vary most."""
        if layout.islands > 1:
            return 1
        return max(self.steps, min(MOST_STEPS, round(self.step_seconds / job.predictor().predict(layout).seconds)))


THOROUGH = Effort((1 / 512, 1 / 64, 1 / 8, 1), math.inf, 0.3, 5)
BRIEF = Effort((1 / 64, 1), 0.1, 0.05, 3, 1.5)
"""Half a minute at most, on hosts that start within ten seconds."""
BRIEF_SECONDS, BRIEF_PARAMETERS = 2.0, 2e8
"""Most seconds of messages in a step, and most parameters of a model, for which a brief measurement takes steps."""
MOST_STEPS = 15
"""Most steps of a layout that are measured."""
MOST_ELEMENTS = 2**24
"""Largest number of elements that kernels are measured with."""
COMPRESSED_BITS = 4
"""Bits of the compressed step that a brief measurement takes."""


@contextmanager
def find_measuring_ranks(emulation: Emulation | None, timeout: float, cluster: Cluster) -> Iterator[JobRanks]:
    """Yield the ranks of `cluster`, which measure.

    Raises:
        ConfigError: There are none, not as many as GPUs, or they have different kinds of GPUs.
    """
    with find_ranks(emulation, timeout, "plan cluster") as ranks:
        if ranks.count != cluster.gpus:
            raise ConfigError(
                f"--gpus: {cluster.gpus} GPUs differ from the {ranks.count} processes of the launcher; start one for "
                "each GPU, or change --gpus"
            )
        kinds = Counter(ranks.gather(cluster.gpu.name))
        if len(kinds) > 1:
            found = "+".join(f"{count}x{name}" for name, count in kinds.items())
            raise ConfigError(
                f"--gpus: ranks have several kinds of GPUs, which are not measured; write --gpus {found}, without a "
                "launcher"
            )
        yield ranks


def measure(layouts: Sequence[Layout], job: Job, ranks: JobRanks, model: Path, effort: Effort) -> Measured:
    """Measure probes and steps of `layouts`, with a progress bar. Return them with the constants that fit them.

    Raises:
        CompressError: A program failed.
    """
    probed = _probes(job, effort) | {"rate": ranks.rates[0]}
    rows: list[Row] = []
    with Progress(transient=True, disable=not ranks.is_first) as progress:
        for steps in progress.track(_step_jobs(layouts, job, ranks, model, effort) or [[]], description="ranks"):
            rows += _rows(ranks, steps if rows else [probed, *steps])
    probes = [Probe(row["kind"], tuple(row["sizes"]), row["seconds"]) for row in rows if "kind" in row]
    return fit_measured(job, probes, _steps(rows, layouts))


def measure_steps(
    layouts: Sequence[Layout], job: Job, ranks: JobRanks, model: Path, effort: Effort = THOROUGH
) -> list[Step]:
    """Return the median seconds of a step of each layout.

    Raises:
        CompressError: A program failed.
    """
    rows: list[Row] = []
    for steps in _step_jobs(layouts, job, ranks, model, effort):
        rows += _rows(ranks, steps)
    return _steps(rows, layouts)


def _step_jobs(
    layouts: Sequence[Layout], job: Job, ranks: JobRanks, model: Path, effort: Effort
) -> list[list[dict[str, Any]]]:
    """Return the jobs of `bench.step_rank`: a list for each division of ranks, which processes make only once."""
    by_division: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for layout in layouts:
            file = Path(directory) / f"{layout}.json"
            file.write_text(json.dumps(ds_config(layout, job.cluster)), encoding="utf-8")
            sizes = {"micro_batch": None, "seq_len": job.seq, "seed": 0, "lora_rank": job.model.rank}
            [group] = group_contenders([str(file)], str(model.absolute()), (), sizes, layout.ranks)
            steps = group.to_job({ranks.rates[0]: effort.count(layout, job)}, bare=False)
            by_division.setdefault(_division(layout), []).append(steps)
    return list(by_division.values())


def _steps(rows: Sequence[Row], layouts: Sequence[Layout]) -> list[Step]:
    """Return the steps in measured rows, in the order of `layouts`."""
    seconds = {row["contender"]["name"]: row["step_s"]["median"] for row in rows if "contender" in row}
    return [Step(layout, seconds[str(layout)]) for layout in layouts]


def _rows(ranks: JobRanks, jobs: Sequence[Row]) -> list[Row]:
    rows, failure = ranks.run(jobs)
    if failure is not None:
        raise CompressError(f"measurement: {failure} on the emulated hosts; the lines above show why")
    return rows


def differing(plan: Plan, ranks: JobRanks) -> Iterator[Layout]:
    """Yield the best layouts that differ in tensor ranks, stages or ZeRO stage.

    Processes of a launcher divide all models as in the first layout, since their groups are made once.
    """
    first, seen = plan.candidates[0].layout, set[tuple[int, int, int]]()
    for layout in (candidate.layout for candidate in plan.candidates):
        kind = (layout.tensor, layout.pipeline, layout.zero)
        can_start = ranks.starts_processes or kind[:2] == (first.tensor, first.pipeline)
        if kind not in seen and len(seen) < LAYOUTS and can_start:
            seen.add(kind)
            yield layout


def brief_layouts(found: Sequence[Choice], job: Job, options: argparse.Namespace) -> list[Layout]:
    """Return what runs now, the same with few bits, and the fastest choice that shards otherwise.

    Each tells what the others cannot: the step of the program, the cost of compression, and that of another ZeRO stage.
    Nothing is returned if a few steps take long.

    Only `--software deepspeed` has steps that can be measured here, with the model of a config.json.
    """
    now, terms = found[0].candidate.layout, found[0].candidate.prediction.terms
    sent = sum(term.outside for term in terms) * job.cluster.per_node / job.cluster.network
    is_small = sent < BRIEF_SECONDS and job.model.parameters < BRIEF_PARAMETERS
    if not is_small or options.software != "deepspeed" or not options.model.exists():
        return []
    layouts = [one.candidate.layout for one in sorted(found[1:], key=lambda one: one.seconds)]
    fewer = [one for one in layouts if _sharding(one) == _sharding(now) and one.gradient_bits == COMPRESSED_BITS]
    others = [one for one in layouts if _sharding(one) != _sharding(now) and _division(one) == _division(now)]
    return [now, *fewer[:1], *others[:1]]


def _division(layout: Layout) -> tuple[int, int]:
    return layout.tensor, layout.pipeline


def _sharding(layout: Layout) -> tuple[int, int]:
    return layout.zero, layout.shard_within


def _probes(job: Job, effort: Effort) -> Row:
    """Return the job of `bench.rank.measure_probes`: sizes that occur in training."""
    model = job.model
    tokens = max(1, min(job.batch, 8)) * job.seq
    products: Sequence[tuple[float, ...]] = [sizes for sizes, _ in matrix_products(model, tokens, 1)]
    whole = job.cluster.gpu.element * min(model.parameters, job.software.bucket)
    largest = min(whole, effort.longest * job.cluster.network)
    return {
        "measure": "probes",
        "element": job.cluster.gpu.element,
        "products": sorted({tuple(map(round, sizes)) for sizes in products}),
        "numel": max(2**16, min(model.parameters, MOST_ELEMENTS)),
        "sizes": [max(1024, round(largest * share)) for share in effort.shares],
        "batch_seconds": effort.batch_seconds,
        "per_host": job.cluster.per_node,
    }


def print_measured(measured: Measured) -> None:
    """Print the measured steps next to the predicted ones."""
    rows = []
    for step in measured.steps:
        predicted = measured.predicted(step)
        error = f"{100 * (predicted / step.seconds - 1):+.0f} %"
        rows.append((str(step.layout), f"{step.seconds:.3g}", f"{predicted:.3g}", error))
    print_table("Seconds of a step", ("layout", "measured", "predicted", "error"), rows, ("layout",))
