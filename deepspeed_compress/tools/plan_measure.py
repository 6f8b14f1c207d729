"""Measurements of ``ds-compress plan cluster --measure``: probes, and steps of the best layouts that differ."""

import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.planner.compute import matrix_products
from deepspeed_compress.planner.constants import MEANINGS
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Measured, Step, fit_measured
from deepspeed_compress.planner.probes import Probe
from deepspeed_compress.planner.search import Job, Plan
from deepspeed_compress.tools.bench.options import Emulation

LAYOUTS = 3
"""Number of layouts whose steps are measured."""
STEPS = 5
"""Measured steps of each; one period between exchanges if a layout has islands."""
MOST_ELEMENTS = 2**24
"""Largest number of elements that kernels are measured with."""
_PROBES = "deepspeed_compress.tools.bench.probe_rank"
_STEPS = "deepspeed_compress.tools.bench.step_rank"

Row = dict[str, Any]


class Place(Protocol):
    """Ranks that measure: on emulated hosts, or in the processes of a launcher."""

    @property
    def is_first(self) -> bool:
        """True in the process that prints and writes."""
        ...

    def can_start(self, layout: Layout) -> bool:
        """Return True if the ranks can take steps of a layout."""
        ...

    def probe(self, job: Row) -> list[Row]:
        """Return the rows of `bench.probe_rank`."""
        ...

    def steps(self, group: Any, count: int) -> list[Row]:
        """Return the rows of `bench.step_rank` for a group of contenders."""
        ...

    def close(self) -> None:
        """End the communication of the ranks."""
        ...


@dataclass(frozen=True)
class EmulatedPlace:
    """Emulated hosts on this machine. Every measurement starts new processes."""

    emulation: Emulation
    timeout: float
    is_first: bool = True

    def can_start(self, layout: Layout) -> bool:
        """Return True."""
        return True

    def probe(self, job: Row) -> list[Row]:
        """Return the rows of `bench.probe_rank`."""
        return self._run(_PROBES, job | {"rate": self.emulation.rates[0]})

    def steps(self, group: Any, count: int) -> list[Row]:
        """Return the rows of `bench.step_rank` for a group of contenders."""
        job = {"group": group.to_json(), "rates": [self.emulation.rates[0]], "steps": [count], "traces": None}
        return self._run(_STEPS, job)

    def close(self) -> None:
        """Do nothing, since every measurement ends its processes."""

    def _run(self, program: str, job: Row) -> list[Row]:
        from deepspeed_compress.tools.bench.hosts import signals_as_exceptions
        from deepspeed_compress.tools.bench.rows import run_on_hosts

        with signals_as_exceptions():
            rows, failure = run_on_hosts(
                self.emulation.hosts, program, job, self.timeout, per_host=self.emulation.per_host
            )
        if failure is not None:
            raise CompressError(f"--measure: {failure} on the emulated hosts; the lines above show why")
        return rows


class LaunchedPlace:
    """Processes of a launcher, of which this is one. Their groups are made once, so all layouts divide models alike."""

    def __init__(self, first: Layout) -> None:
        from deepspeed_compress.tools.bench.gauges import join

        ranks = join()
        if ranks.world_size != first.ranks:
            raise ConfigError(
                f"--gpus: {first.ranks} GPUs differ from the {ranks.world_size} processes of the launcher; start one "
                "for each GPU, or change --gpus"
            )
        self.is_first = ranks.is_first
        self._division = (first.tensor, first.pipeline)

    def can_start(self, layout: Layout) -> bool:
        """Return True if the layout has the tensor and pipeline ranks of the first."""
        return (layout.tensor, layout.pipeline) == self._division

    def probe(self, job: Row) -> list[Row]:
        """Return the rows of `bench.probe_rank`."""
        from deepspeed_compress.tools.bench import gauges, probe_rank

        rows: list[Row] = []
        probe_rank.measure(job | {"rate": None}, rows.append, self._log)
        found: list[Row] = gauges.gather(rows)[0]
        return found

    def steps(self, group: Any, count: int) -> list[Row]:
        """Return the rows of `bench.step_rank` for a group of contenders."""
        from deepspeed_compress.tools.bench import gauges, step_rank

        rows: list[Row] = []
        step_rank.measure_group(group, {None: count}, rows.append, self._log)
        found: list[Row] = gauges.gather(rows)[0]
        return found

    def close(self) -> None:
        """Leave the group of all ranks."""
        from deepspeed_compress.training.ranks import end_ranks

        end_ranks()

    def _log(self, text: str) -> None:
        print(f"  {text}", flush=True)


def find_place(emulation: Emulation | None, timeout: float, first: Layout) -> Place:
    """Return the ranks that measure.

    Raises:
        ConfigError: There are none, or not as many as the layout has.
    """
    if emulation is not None:
        from deepspeed_compress.tools.bench.links import check_machine

        check_machine()
        return EmulatedPlace(emulation, timeout)
    if "RANK" not in os.environ:
        raise ConfigError(
            "--measure: a single process has nothing to communicate with; write --emulate HOSTSxRANKS,RATE, such as "
            "--emulate 2x2,1gbit, or start it with torchrun --no-python --nproc-per-node N ds-compress plan cluster ..."
        )
    return LaunchedPlace(first)


def measure(plan: Plan, job: Job, place: Place, model: Path) -> Measured:
    """Measure probes and steps, with a progress bar. Return them with the constants that fit them.

    Raises:
        CompressError: A program failed.
    """
    from rich.progress import Progress

    layouts = list(differing(plan, place))
    with Progress(transient=True, disable=not place.is_first) as progress:
        task = progress.add_task("probes", total=1 + len(layouts))
        probes = [Probe(row["kind"], tuple(row["sizes"]), row["seconds"]) for row in place.probe(_probes(job))]
        steps = []
        for layout in layouts:
            progress.update(task, advance=1, description=str(layout))
            steps.append(measure_step(layout, job, place, model))
    return fit_measured(job, probes, steps)


def differing(plan: Plan, place: Place) -> Iterator[Layout]:
    """Yield the best layouts that differ in tensor ranks, stages or ZeRO stage, and that can start.

    Islands are left out, because their steps repeat only after an exchange.
    """
    seen: set[tuple[int, int, int]] = set()
    for layout in (one.layout for one in plan.candidates):
        kind = (layout.tensor, layout.pipeline, layout.zero)
        if kind not in seen and len(seen) < LAYOUTS and layout.islands == 1 and place.can_start(layout):
            seen.add(kind)
            yield layout


def measure_step(layout: Layout, job: Job, place: Place, model: Path) -> Step:
    """Return the median seconds of a layout's step."""
    from deepspeed_compress.tools.bench.workload import group_contenders

    with tempfile.TemporaryDirectory() as directory:
        file = Path(directory) / f"{layout}.json"
        file.write_text(json.dumps(ds_config(layout, job.cluster)), encoding="utf-8")
        sizes = {"micro_batch": None, "seq_len": job.seq, "seed": 0}
        [group] = group_contenders([str(file)], str(model.absolute()), (), sizes, layout.ranks)
    [row] = place.steps(group, 1 if layout.islands > 1 else STEPS)
    return Step(layout, row["step_s"]["median"])


def _probes(job: Job) -> Row:
    """Return the job of `bench.probe_rank`: sizes that occur in training."""
    model = job.model
    tokens = max(1, min(job.batch, 8)) * job.seq
    products: Sequence[tuple[float, ...]] = [sizes for sizes, _ in matrix_products(model, tokens, 1)]
    largest = job.cluster.gpu.element * min(model.parameters, job.software.bucket)
    return {
        "element": job.cluster.gpu.element,
        "products": sorted({tuple(map(round, sizes)) for sizes in products}),
        "numel": max(2**16, min(model.parameters, MOST_ELEMENTS)),
        "sizes": [max(1024, round(largest / share)) for share in (512, 64, 8, 1)],
        "per_host": job.cluster.per_node,
    }


def print_measured(measured: Measured) -> None:
    """Print the constants before and after the fit, and the measured steps next to the predicted ones."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    constants = Table(title="Constants", title_justify="left", box=box.SIMPLE)
    for head in ("", "before", "from probes", "with steps", "meaning"):
        constants.add_column(head, justify="left" if head in ("", "meaning") else "right")
    for name, meaning in MEANINGS.items():
        values = (getattr(one, name) for one in (measured.job.constants, measured.probed, measured.constants))
        constants.add_row(name, *(f"{value:.3g}" for value in values), meaning)
    steps = Table(title="Seconds of a step", title_justify="left", box=box.SIMPLE)
    for head in ("layout", "measured", "from probes", "with steps", "error"):
        steps.add_column(head, justify="left" if head == "layout" else "right", no_wrap=True)
    for step in measured.steps:
        seconds = [measured.predicted(step, one) for one in (measured.probed, measured.constants)]
        figures = (f"{one:.3g}" for one in (step.seconds, *seconds))
        steps.add_row(str(step.layout), *figures, f"{100 * (seconds[-1] / step.seconds - 1):+.0f} %")
    console = Console(width=max(Console().width, 132))
    console.print(constants)
    console.print(steps)
