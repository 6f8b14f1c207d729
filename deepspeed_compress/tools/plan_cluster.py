"""``ds-compress plan cluster``: predict which layout and which compression trains a model first on a cluster.

It prints what one can choose from, or the terms of a layout, and writes the files that start one.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import choices, others
from deepspeed_compress.planner.files import ds_config, start_command
from deepspeed_compress.planner.search import TOO_LARGE, Candidate, Job, Plan, search
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.bench.jobs import has_ranks
from deepspeed_compress.tools.plan_job import check_options, read_job, read_setup
from deepspeed_compress.tools.plan_measure import find_measuring_ranks, informative, measure
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
