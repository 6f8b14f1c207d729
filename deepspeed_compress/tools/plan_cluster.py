"""``ds-compress plan cluster``: predict which layout and which compression trains a model first on a cluster.

It prints what one can choose from, or the terms of a layout, and writes the files that start one. With ranks, it first
measures them: probes of links and kernels, and steps of some layouts.
"""

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.progress import Progress

from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.planner.choices import Choice, choices, others
from deepspeed_compress.planner.cluster import Cluster
from deepspeed_compress.planner.compute import matrix_products
from deepspeed_compress.planner.files import ds_config, start_command
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Measured, Probe, Step, fit_measured
from deepspeed_compress.planner.search import TOO_LARGE, Candidate, Job, Plan, search
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.jobs import JobRanks, Row, find_ranks, has_ranks
from deepspeed_compress.tools.bench.options import Emulation
from deepspeed_compress.tools.bench.workload import group_contenders
from deepspeed_compress.tools.plan_job import check_options, read_job, read_setup
from deepspeed_compress.tools.plan_tables import explain, print_choices, sequences


def run(options: argparse.Namespace) -> int:
    """Measure, print the choices or explain one of them, and write its files. Return the exit code.

    Under a launcher, only the first process prints and writes.
    """
    job = read_job(options)
    check_options(options, job)
    setup = None if options.config is None else read_setup(options.config, job.cluster.per_node)
    plan, measured = _search(job), None
    if options.measure is not None or (has_ranks(options.emulate) and options.constants is None):
        with find_measuring_ranks(options.emulate, options.timeout, job.cluster) as ranks:
            layouts = informative(choices(job, plan, setup), job, options)
            measured = measure(layouts, job, ranks, options.model)
        if not ranks.is_first:
            return 0
        job = replace(job, constants=measured.constants, corrections=measured.corrections)
        plan = _search(job)
    found = choices(job, plan, setup)
    below = tuple(others(job, plan, found[0]))
    rows = [one.candidate for one in (*found, *below)]
    if options.explain is not None:
        explain(_chosen(rows, plan, "--explain", options.explain), job)
    else:
        print_choices(found, below, plan, job, measured)
    if measured is not None and options.measure is not None:
        options.measure.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.measure, measured.to_json())
    if options.output is not None:
        best = plan.recommended if options.choose is None else _chosen(rows, plan, "--choose", options.choose)
        _write(best, job, options)
    return 0


def _chosen(rows: Sequence[Candidate], plan: Plan, option: str, text: str) -> Candidate:
    """Return the candidate with this number in the table, or this name.

    Raises:
        ConfigError: There is none.
    """
    names = {str(one.layout): one for one in (*plan.candidates, *plan.islands, *rows)}
    found = (names | {str(number): one for number, one in enumerate(rows, 1)}).get(text)
    if found is None:
        raise ConfigError(f"{option}: {text} is not in the table; write a number, such as 1, or the name of a layout")
    return found


def _search(job: Job) -> Plan:
    """Return the layouts of a job.

    Raises:
        ConfigError: None fits.
    """
    plan, what = search(job), f"{job.software.name} has no layout of {job.model.name} on {job.cluster}"
    if plan.candidates:
        return plan
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in plan.refused.most_common())
    if reasons:
        print(f"Refused: {reasons}.")
    if plan.refused[TOO_LARGE]:
        raise ConfigError(f"--gpus: {what} that fits into memory; write more GPUs, or GPUs with more memory")
    multiple = f"a multiple of {job.cluster.gpus}, or another --software"
    raise ConfigError(f"--batch: {what} with {sequences(job)} per step, for the reasons above; write {multiple}")


_UNSET = "is not set; on every node, write NODE_RANK=N MASTER_ADDR=ADDRESS $0 (N from 0; the address of the first node)"


def _write(candidate: Candidate, job: Job, options: argparse.Namespace) -> None:
    """Write ds_config.json and launch.sh of a layout."""
    directory: Path = options.output
    layout, config, script = candidate.layout, directory / "ds_config.json", directory / "launch.sh"
    start = start_command(job, layout, config, options.model, options.hostfile)
    directory.mkdir(parents=True, exist_ok=True)
    config.write_text(json.dumps(ds_config(layout, job.cluster), indent=2) + "\n", encoding="utf-8")
    checks = "".join(f': "${{{name}:?{_UNSET}}}"\n' for name in ("NODE_RANK", "MASTER_ADDR") if f"${name}" in start)
    script.write_text(f"#!/usr/bin/env bash\n# {layout}\n{checks}{start}\n", encoding="utf-8")
    script.chmod(0o755)
    print(f"{config}\n{script}: {start}")


SHARES, LONGEST = (1 / 64, 1), 0.1
"""Sizes of messages, as shares of the largest, and the seconds that this may take at the network's rate."""
BATCH_SECONDS = 0.05
"""Seconds in which short messages are repeated, three times."""
STEPS, STEP_SECONDS, MOST_STEPS = 3, 1.5, 15
"""Least measured steps of a layout, seconds that they may take together if they are more than that, and most steps."""
QUICK_SECONDS, QUICK_PARAMETERS = 2.0, 2e8
"""Most seconds of messages in a step, and most parameters of a model, for which steps are taken unless asked for."""
MOST_ELEMENTS = 2**24
"""Largest number of elements that kernels are measured with."""
COMPRESSED_BITS = 4
"""Bits of the compressed step that is measured."""


@contextmanager
def find_measuring_ranks(emulation: Emulation | None, timeout: float, cluster: Cluster) -> Iterator[JobRanks]:
    """Yield the ranks of `cluster`, which measure.

    Raises:
        ConfigError: There are none, not as many as GPUs, or they have different kinds of GPUs.
    """
    with find_ranks(emulation, timeout, "plan cluster") as ranks:
        if ranks.count != cluster.gpus:
            raise ConfigError(
                f"--gpus: {cluster.gpus}, but {ranks.count} processes; start one for each GPU, or change --gpus"
            )
        kinds = Counter(ranks.gather(cluster.gpu.name))
        if len(kinds) > 1:
            found = "+".join(f"{count}x{name}" for name, count in kinds.items())
            raise ConfigError(f"--gpus: several kinds are not measured; write --gpus {found}, without a launcher")
        yield ranks


def measure(layouts: Sequence[Layout], job: Job, ranks: JobRanks, model: Path, least: int = STEPS) -> Measured:
    """Measure probes, and at least `least` steps of `layouts`. Return them with the constants that fit them.

    Raises:
        CompressError: A program failed.
    """
    probed = _probes(job) | {"rate": ranks.rates[0]}
    rows: list[Row] = []
    with Progress(transient=True, disable=not ranks.is_first) as progress:
        for steps in progress.track(_step_jobs(layouts, job, ranks, model, least) or [[]], description="ranks"):
            found, failure = ranks.run(steps if rows else [probed, *steps])
            if failure is not None:
                raise CompressError(f"measurement: {failure} on the emulated hosts; the lines above show why")
            rows += found
    probes = [Probe(row["kind"], tuple(row["sizes"]), row["seconds"]) for row in rows if "kind" in row]
    seconds = {row["contender"]["name"]: row["step_s"]["median"] for row in rows if "contender" in row}
    return fit_measured(job, probes, [Step(layout, seconds[str(layout)]) for layout in layouts])


def _step_jobs(
    layouts: Sequence[Layout], job: Job, ranks: JobRanks, model: Path, least: int
) -> list[list[dict[str, Any]]]:
    """Return the jobs of `bench.step_rank`: a list for each division of ranks, which processes make only once."""
    by_division: dict[tuple[int, int], list[dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for layout in layouts:
            file = Path(directory) / f"{layout}.json"
            file.write_text(json.dumps(ds_config(layout, job.cluster)), encoding="utf-8")
            sizes = {"micro_batch": None, "seq_len": job.seq, "seed": 0, "lora_rank": job.model.rank}
            [group] = group_contenders([str(file)], str(model.absolute()), (), sizes, layout.ranks)
            # More steps the shorter they are, since short ones vary most; of islands, one period.
            count = max(least, min(MOST_STEPS, round(STEP_SECONDS / job.predict(layout).seconds)))
            steps = group.to_job({ranks.rates[0]: 1 if layout.islands > 1 else count}, bare=False)
            by_division.setdefault(_division(layout), []).append(steps)
    return list(by_division.values())


def informative(found: Sequence[Choice], job: Job, options: argparse.Namespace) -> list[Layout]:
    """Return what runs now, the same with few bits, and the fastest choice that shards otherwise.

    Each tells what the others cannot: the step of the program, the cost of compression, and that of another ZeRO stage.
    Nothing is returned if a few steps take long, unless `--measure` asks for them.

    Only `--software deepspeed` has steps that can be measured here, with the model of a config.json.
    """
    now, terms = found[0].candidate.layout, found[0].candidate.prediction.terms
    sent = sum(term.outside for term in terms) * job.cluster.per_node / job.cluster.network
    is_quick = sent < QUICK_SECONDS and job.model.parameters < QUICK_PARAMETERS
    if not (is_quick or options.measure) or options.software != "deepspeed" or not options.model.exists():
        return []
    layouts = [one.candidate.layout for one in sorted(found[1:], key=lambda one: one.seconds)]
    fewer = [one for one in layouts if _sharding(one) == _sharding(now) and one.gradient_bits == COMPRESSED_BITS]
    others = [one for one in layouts if _sharding(one) != _sharding(now) and _division(one) == _division(now)]
    return [now, *fewer[:1], *others[:1]]


def _division(layout: Layout) -> tuple[int, int]:
    return layout.tensor, layout.pipeline


def _sharding(layout: Layout) -> tuple[int, int]:
    return layout.zero, layout.shard_within


def _probes(job: Job) -> Row:
    """Return the job of `bench.rank.measure_probes`: sizes that occur in training."""
    model = job.model
    tokens = max(1, min(job.batch, 8)) * job.seq
    products: Sequence[tuple[float, ...]] = [sizes for sizes, _ in matrix_products(model, tokens, 1)]
    whole = job.cluster.gpu.element * min(model.parameters, job.software.bucket)
    largest = min(whole, LONGEST * job.cluster.network)
    return {
        "measure": "probes",
        "element": job.cluster.gpu.element,
        "products": sorted({tuple(map(round, sizes)) for sizes in products}),
        "numel": max(2**16, min(model.parameters, MOST_ELEMENTS)),
        "sizes": [max(1024, round(largest * share)) for share in SHARES],
        "batch_seconds": BATCH_SECONDS,
        "per_host": job.cluster.per_node,
    }
