"""``ds-compress plan cluster``: predict which layout and which compression trains a model first on a cluster.

It prints what one can choose from, all layouts, or the terms of one, and writes the files that start one.
"""

import argparse
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import Choice, choices, islands
from deepspeed_compress.planner.cluster import Cluster, Node, hostfile, read_cluster, read_nodes
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.files import Start, ds_config
from deepspeed_compress.planner.measured import read_constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.search import TOO_LARGE, Candidate, Job, Plan, search
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.plan_cluster_plots import draw_all
from deepspeed_compress.tools.plan_cluster_tables import explain, print_choices, print_plan, print_refused, sequences
from deepspeed_compress.tools.plan_measure import find_measuring_ranks, measure, print_measured
from deepspeed_compress.tools.plan_setup import read_setup
from deepspeed_compress.tools.plots import check_plotting

MOST_SEQUENCES, MOST_TOKENS = 10**9, 1e18
"""Largest batch and longest run."""


def run(options: argparse.Namespace) -> int:
    """Print the best layouts or explain one of them, measure, write the files of the best, draw. Return the exit code.

    Under a launcher, only the first process prints and writes.
    """
    job = _job(options)
    _check(options, job)
    nodes = None if options.nodes is None else read_nodes(options.nodes, job.cluster)
    setup = None if options.config is None else read_setup(options.config, job.cluster.per_node)
    plan, measured = _search(job), None
    if options.measure is not None:
        with find_measuring_ranks(options.emulate, options.timeout, job.cluster.gpus) as ranks:
            if ranks.is_first:
                print_plan(plan, job, None)
            measured = measure(plan, job, ranks, options.model)
        if not ranks.is_first:
            return 0
        write_json(options.measure, measured.to_json())
        job = replace(job, constants=measured.constants)
        plan = _search(job)
        print_measured(measured)
    found = choices(job, plan, setup)
    rows = _rows(found, plan, options.all)
    if options.explain is not None:
        explain(_chosen(rows, plan, "--explain", options.explain), plan, job)
    elif options.all or measured is not None:
        print_plan(plan, job, measured)
    else:
        print_choices(found, tuple(islands(plan)), plan, job)
    _save(rows, plan, job, nodes, options)
    return 0


def _rows(found: Sequence[Choice], plan: Plan, shows_all: bool) -> dict[str, Candidate]:
    """Return the layouts by their numbers in the table: what one can choose from, or every kind."""
    if not shows_all:
        return {str(number): one.candidate for number, one in enumerate((*found, *islands(plan)), 1)}
    blocks = {"": plan.candidates, "I": plan.islands, "M": plan.others}
    return {f"{letter}{number}": one for letter, some in blocks.items() for number, one in enumerate(some, 1)}


def _chosen(rows: Mapping[str, Candidate], plan: Plan, option: str, text: str) -> Candidate:
    """Return the candidate with this number or name.

    Raises:
        ConfigError: There is none.
    """
    names = {str(one.layout): one for one in (*plan.candidates, *plan.islands, *plan.others, *rows.values())}
    found = rows.get(text.upper()) or names.get(text)
    if found is None:
        raise ConfigError(f"{option}: {text} is not in the table; write a number, such as 1, or the name of a layout")
    return found


def _check(options: argparse.Namespace, job: Job) -> None:
    """Check the combination of options.

    Raises:
        ConfigError: An option does not fit another one.
    """
    if options.nodes is not None and options.output is None:
        raise ConfigError(
            "--nodes: is for the hostfile next to ds_config.json; write --output DIR, too, or leave it out"
        )
    if options.config is not None and (options.all or options.measure is not None):
        raise ConfigError("--config: is for the table of choices; leave it out with --all and --measure")
    if options.choose is not None and options.output is None:
        raise ConfigError("--choose: is for the files of a row; write --output DIR, too, or leave it out")
    if options.output is not None and job.engine == "megatron":
        raise ConfigError("--output: Megatron reads no ds_config.json; leave it out, or write --software deepspeed")
    if options.output is not None and options.software == "deepspeed" and not options.model.exists():
        raise ConfigError(
            "--output: launch/train_gpt.py needs a config.json; write its path as --model, or --software hf"
        )
    if options.measure is not None and not options.model.exists():
        raise ConfigError("--measure: trains the model of a config.json; write its path as --model")
    if options.base_bits and not job.model.rank:
        raise ConfigError("--base-bits: only LoRA leaves the model frozen; write --lora-rank, too, or leave it out")
    if job.model.rank and (options.measure or (options.output and options.software != "hf")):
        raise ConfigError(
            "--lora-rank: --measure and launch/train_gpt.py train all parameters; leave out --measure, and write "
            "--software hf with --output"
        )
    if options.measure is not None and options.software != "deepspeed":
        raise ConfigError(f"--measure: takes steps of --software deepspeed, not {options.software}; leave one out")
    if options.measure is not None and not options.measure.parent.is_dir():
        raise ConfigError(f"--measure: {options.measure.parent} is not a directory; create it")
    if options.plot is not None:
        check_plotting("--plot")


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


def _save(
    rows: Mapping[str, Candidate], plan: Plan, job: Job, nodes: Sequence[Node] | None, options: argparse.Namespace
) -> None:
    """Write the files of the chosen layout, or else of the best one, and the pictures, if that is asked for."""
    if options.output is not None:
        best = plan.recommended if options.choose is None else _chosen(rows, plan, "--choose", options.choose)
        _write(best, job, nodes, options)
    if options.plot is not None:
        print(*draw_all(plan, job, options.plot), sep="\n")


def _job(options: argparse.Namespace) -> Job:
    """Return the job of the options.

    Raises:
        ConfigError: An option cannot be read, or sequences are longer than the model allows.
    """
    model = replace(read_model(options.model), rank=options.lora_rank or 0, base_bits=options.base_bits or 0.0)
    if options.seq > model.longest:
        raise ConfigError(
            f"--seq: {options.seq} tokens are more than the {model.longest} positions of {options.model}; write fewer, "
            "or change the model"
        )
    batch = read_batch(options.batch, options.seq)
    tokens = read_count(options.tokens) if options.tokens else 20.0 * model.trained_parameters
    software = replace(SOFTWARE[options.software], attention=options.attention)
    cluster = _cluster(options)
    constants = read_constants(options.constants, cluster.gpu.name) if options.constants else Constants()
    return Job(cluster, model, software, options.seq, batch, tokens, constants)


def _cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster of --gpus and --network, or of the emulated hosts.

    Raises:
        ConfigError: Both are given, or none.
    """
    emulated, given = options.emulate, (options.gpus, options.network)
    if emulated is None:
        if None in given:
            raise ConfigError("--gpus and --network: are missing; write both, or --emulate HOSTSxRANKS,RATE")
        return read_cluster(*given, options.gpus_per_node)
    if any(given) or options.gpus_per_node or len(emulated.rates) > 1 or emulated.rates == ("none",):
        raise ConfigError(
            "--emulate: describes all hosts and one rate; write 2x2,1gbit, for example, and leave out --gpus, "
            "--gpus-per-node and --network"
        )
    return read_cluster(f"{emulated.ranks}xCPU", emulated.rates[0], emulated.per_host)


def read_batch(text: str, seq: int) -> int:
    """Return the sequences of a step, from a number such as "1024" or from tokens such as "4M-tokens".

    Units of tokens are powers of 1,024 here, as in the batches of published runs.

    Raises:
        ConfigError: The text is neither, or less than a sequence.
    """
    match = re.fullmatch(r"([0-9.]+)([km]?)-?tokens", text.strip().lower())
    try:
        sequences = float(match[1]) * {"": 1, "k": 2**10, "m": 2**20}[match[2]] / seq if match else int(text)
    except ValueError:
        sequences = 0
    if not 0.5 < sequences <= MOST_SEQUENCES:
        raise ConfigError(
            f"--batch: {text!r} is not a batch of 1 to {MOST_SEQUENCES:,} sequences; write 1024, or 4M-tokens"
        )
    return round(sequences)


def read_count(text: str) -> float:
    """Return a number such as 300B, with decimal units.

    Raises:
        ConfigError: The text is no such number.
    """
    match = re.fullmatch(r"([0-9.]+)([kmbt]?)", text.strip().lower())
    try:
        number = float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}[match[2]] if match else 0.0
    except ValueError:
        number = 0.0
    if not 0 < number < MOST_TOKENS:
        raise ConfigError(f"--tokens: {text!r} is not a number below {MOST_TOKENS:g}; write 300B, for example")
    return number


_UNSET = "is not set; on every node, write NODE_RANK=N MASTER_ADDR=ADDRESS $0 (N from 0; the address of the first node)"


def _write(candidate: Candidate, job: Job, nodes: Sequence[Node] | None, options: argparse.Namespace) -> None:
    directory: Path = options.output
    layout, steps = candidate.layout, max(1, round(job.tokens / (job.batch * job.seq)))
    has_nodes, is_trainer = nodes is not None, options.software == "hf"
    start = Start(layout, job.cluster, directory, options.model, job.seq, steps, is_trainer, has_nodes).command()
    directory.mkdir(parents=True, exist_ok=True)
    if nodes is not None:
        lines = hostfile(nodes, job.cluster, layout)
        (directory / "hostfile").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = json.dumps(ds_config(layout, job.cluster), indent=2)
    (directory / "ds_config.json").write_text(config + "\n", encoding="utf-8")
    script = directory / "launch.sh"
    checks = "".join(f': "${{{name}:?{_UNSET}}}"\n' for name in ("NODE_RANK", "MASTER_ADDR") if f"${name}" in start)
    script.write_text(f"#!/usr/bin/env bash\n# {layout}\n{checks}{start}\n", encoding="utf-8")
    script.chmod(0o755)
    print(f"{directory / 'ds_config.json'}\n{script}: {start}")
