"""``ds-compress plan cluster``: predict which layout and which compression trains a model first on a cluster.

It prints what one can choose from, all layouts, or the terms of one, and writes the files that start one.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import Choice, Setup, choices, others
from deepspeed_compress.planner.files import Start, ds_config
from deepspeed_compress.planner.measured import Measured
from deepspeed_compress.planner.search import TOO_LARGE, Candidate, Job, Plan, search
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.jobs import JobRanks, has_ranks
from deepspeed_compress.tools.plan_job import check_options, read_job, read_setup
from deepspeed_compress.tools.plan_measure import (
    BRIEF,
    THOROUGH,
    brief_layouts,
    differing,
    find_measuring_ranks,
    measure,
    print_measured,
)
from deepspeed_compress.tools.plan_tables import explain, print_choices, print_plan, print_refused, sequences


def run(options: argparse.Namespace) -> int:
    """Print the best layouts or explain one of them, measure, write the files of the best. Return the exit code.

    Under a launcher, only the first process prints and writes.
    """
    job = read_job(options)
    check_options(options, job)
    setup = None if options.config is None else read_setup(options.config, job.cluster.per_node)
    plan, measured = _search(job), None
    if options.measure is not None or (has_ranks(options.emulate) and options.constants is None):
        with find_measuring_ranks(options.emulate, options.timeout, job.cluster) as ranks:
            measured = _measure(ranks, plan, job, setup, options)
        if not ranks.is_first:
            return 0
        # With `--measure`, the table compares predictions with measured steps.
        corrections = measured.corrections if options.measure is None else {}
        job = replace(job, constants=measured.constants, corrections=corrections)
        plan = _search(job)
    found = choices(job, plan, setup)
    rows = _rows(found, plan, job, options.all)
    if options.explain is not None:
        explain(_chosen(rows, plan, "--explain", options.explain), job)
    elif options.all or options.measure is not None:
        print_plan(plan, job, measured)
    else:
        print_choices(found, tuple(others(job, plan, found[0])), plan, job, measured)
    if options.output is not None:
        best = plan.recommended if options.choose is None else _chosen(rows, plan, "--choose", options.choose)
        _write(best, job, options)
    return 0


def _measure(ranks: JobRanks, plan: Plan, job: Job, setup: Setup | None, options: argparse.Namespace) -> Measured:
    """Return measurements: with `--measure`, those of several layouts, which are printed and written.

    Without it, links, kernels, and a few steps of what runs now, unless they would take long.
    """
    if options.measure is None:
        return measure(brief_layouts(choices(job, plan, setup), job, options), job, ranks, options.model, BRIEF)
    if ranks.is_first:
        print_plan(plan, job, None)
    measured = measure(list(differing(plan, ranks)), job, ranks, options.model, THOROUGH)
    if ranks.is_first:
        options.measure.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.measure, measured.to_json())
        print_measured(measured)
    return measured


def _rows(found: Sequence[Choice], plan: Plan, job: Job, shows_all: bool) -> dict[str, Candidate]:
    """Return the layouts by their numbers in the table: what one can choose from, or every kind."""
    if not shows_all:
        return {str(number): one.candidate for number, one in enumerate((*found, *others(job, plan, found[0])), 1)}
    blocks = {"": plan.candidates, "I": plan.islands}
    return {f"{letter}{number}": one for letter, some in blocks.items() for number, one in enumerate(some, 1)}


def _chosen(rows: Mapping[str, Candidate], plan: Plan, option: str, text: str) -> Candidate:
    """Return the candidate with this number or name.

    Raises:
        ConfigError: There is none.
    """
    names = {str(one.layout): one for one in (*plan.candidates, *plan.islands, *rows.values())}
    found = rows.get(text.upper()) or names.get(text)
    if found is None:
        raise ConfigError(f"{option}: {text} is not in the table; write a number, such as 1, or the name of a layout")
    return found


def _search(job: Job) -> Plan:
    """Return the layouts of a job.

    Raises:
        ConfigError: None fits.
    """
    plan = search(job)
    if not plan.candidates:
        print_refused(plan)
        raise ConfigError(_impossible(plan, job))
    return plan


def _impossible(plan: Plan, job: Job) -> str:
    """Return the message for a job without any layout."""
    what = f"{job.software.name} has no layout of {job.model.name} on {job.cluster}"
    if plan.refused[TOO_LARGE]:
        return f"--gpus: {what} that fits into memory; write more GPUs, or GPUs with more memory"
    return (
        f"--batch: {what} with {sequences(job)} per step, for the reasons above; write a multiple of "
        f"{job.cluster.gpus}, or another --software"
    )


_UNSET = "is not set; on every node, write NODE_RANK=N MASTER_ADDR=ADDRESS $0 (N from 0; the address of the first node)"


def _write(candidate: Candidate, job: Job, options: argparse.Namespace) -> None:
    """Write ds_config.json and launch.sh of a layout."""
    directory: Path = options.output
    layout, steps = candidate.layout, max(1, round(job.tokens / (job.batch * job.seq * job.trained)))
    is_trainer = options.software == "hf"
    start = Start(layout, job.cluster, directory, options.model, job.seq, steps, is_trainer, options.hostfile).command()
    directory.mkdir(parents=True, exist_ok=True)
    config = json.dumps(ds_config(layout, job.cluster), indent=2)
    (directory / "ds_config.json").write_text(config + "\n", encoding="utf-8")
    script = directory / "launch.sh"
    checks = "".join(f': "${{{name}:?{_UNSET}}}"\n' for name in ("NODE_RANK", "MASTER_ADDR") if f"${name}" in start)
    script.write_text(f"#!/usr/bin/env bash\n# {layout}\n{checks}{start}\n", encoding="utf-8")
    script.chmod(0o755)
    print(f"{directory / 'ds_config.json'}\n{script}: {start}")
