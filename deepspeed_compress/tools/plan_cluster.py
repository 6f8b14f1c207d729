"""``ds-compress plan cluster``: predict which layout and which compression trains a model first on a cluster.

It prints the best layouts, or the terms of one of them, and writes the files that start the best.
"""

import argparse
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from deepspeed_compress.config.numbers import short
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Cluster, Node, hostfile, read_cluster, read_nodes
from deepspeed_compress.planner.constants import Constants
from deepspeed_compress.planner.files import Start, ds_config
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.learning import critical_batch
from deepspeed_compress.planner.measured import Measured, read_constants
from deepspeed_compress.planner.model import read_model
from deepspeed_compress.planner.predict import Prediction
from deepspeed_compress.planner.search import TOO_LARGE, Candidate, Job, Plan, search, turns
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.safe_files import write_json
from deepspeed_compress.tools.plan_cluster_plots import draw_all
from deepspeed_compress.tools.plan_measure import find_measuring_ranks, measure, print_measured
from deepspeed_compress.tools.plots import check_plotting
from deepspeed_compress.tools.tables import new_console, new_table, print_table

MOST_SEQUENCES, MOST_TOKENS = 10**9, 1e18
"""Largest batch and longest run."""


def run(options: argparse.Namespace) -> int:
    """Print the best layouts or explain one of them, measure, write the files of the best, draw. Return the exit code.

    Under a launcher, only the first process prints and writes.
    """
    job = _job(options)
    _check(options, job)
    nodes = None if options.nodes is None else read_nodes(options.nodes, job.cluster)
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
    _show(plan, job, measured, options)
    _save(plan, job, nodes, options)
    return 0


def _check(options: argparse.Namespace, job: Job) -> None:
    """Check the combination of options.

    Raises:
        ConfigError: An option does not fit another one.
    """
    if options.nodes is not None and options.output is None:
        raise ConfigError(
            "--nodes: is for the hostfile next to ds_config.json; write --output DIR, too, or leave it out"
        )
    if options.output is not None and job.engine == "megatron":
        raise ConfigError("--output: Megatron reads no ds_config.json; leave it out, or write --software deepspeed")
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


def _show(plan: Plan, job: Job, measured: Measured | None, options: argparse.Namespace) -> None:
    if options.explain is None:
        print_plan(plan, job, measured)
    else:
        explain(options.explain, plan, job)


def _save(plan: Plan, job: Job, nodes: Sequence[Node] | None, options: argparse.Namespace) -> None:
    if options.output is not None:
        _write(plan.recommended, job, nodes, options)
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


SHOWN, OTHERS = 10, 3
"""Rows of the table: layouts that the program can start, and layouts that only Megatron can."""
SAME = 0.005
"""Relative difference below which two layouts are as fast as each other."""
WIDTH = 160
"""Least width of tables in characters. A narrower table would break the names of layouts."""
LEGEND = """\
Names: zero1 is the ZeRO stage; d replicas, t tensor ranks, p stages, v interleaved stages; node8 shards within nodes;
b1x16 is the micro-batch and their number; g4, w4 are bits of gradients, weights; i2every30 are 2 islands, 30 steps."""


def print_plan(plan: Plan, job: Job, measured: Measured | None) -> None:
    """Print the best layouts, with measured steps if there are any, and what the table's marks mean."""
    trained = f" ({short(job.model.trained_parameters)} of them in adapters)" if job.model.rank else ""
    title = f"{job.model.name}, {short(job.model.parameters)} parameters{trained}, on {job.cluster}"
    batch = f"{sequences(job)} of {job.seq} tokens per step, {short(job.tokens)} tokens in all"
    figures = ("step in s (80 %)", *(["measured"] if measured else []), "tokens/s", "memory", "node sends", "days")
    columns = ("", "layout", *figures, "limited by")
    table = new_table(f"{title}\n{batch}", columns, ("", "layout", "limited by"))
    for number, candidate in enumerate(plan.candidates[:SHOWN], 1):
        table.add_row(str(number), *_cells(candidate, plan, job, measured))
    table.add_section()
    for number, candidate in enumerate(plan.others[:OTHERS], 1):
        table.add_row(f"M{number}", *_cells(candidate, plan, job, measured))
    new_console(WIDTH).print(table)
    print(LEGEND)
    for line in _notes(plan, job):
        print(line)
    print_refused(plan)


def sequences(job: Job) -> str:
    """Return the batch of a step in words."""
    return f"{job.batch} sequence{'s' if job.batch > 1 else ''}"


def _cells(candidate: Candidate, plan: Plan, job: Job, measured: Measured | None) -> Sequence[str]:
    prediction = candidate.prediction
    low, high = prediction.interval
    tie = "* " if candidate.layout.engine == job.engine and plan.is_tied(candidate) else ""
    tight = "?" if candidate.verdict == "tight" else ""
    sent = job.cluster.per_node * sum(term.outside for term in prediction.terms)
    return (
        f"{tie}{candidate.layout}",
        f"{prediction.seconds:.3g} ({low:.3g}-{high:.3g})",
        *([] if measured is None else [_seconds_of(candidate.layout, measured)]),
        f"{prediction.rate:,.0f}",
        f"{prediction.memory.total / 1e9:.0f} GB{tight}",
        f"{sent / 1e9:.3g} GB",
        f"{candidate.days:.3g}",
        _limits(prediction),
    )


def _seconds_of(layout: Layout, measured: Measured) -> str:
    """Return the measured seconds of a step, or an empty text if the layout was not measured."""
    return next((f"{step.seconds:.3g}" for step in measured.steps if step.layout == layout), "")


def _limits(prediction: Prediction) -> str:
    """Return the two kinds of terms that take most of the step, with their shares."""
    shares = {term.kind: prediction.share(term.kind) for term in prediction.terms}
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    return ", ".join(f"{kind} {100 * shares[kind]:.0f} %" for kind in largest if shares[kind] >= 0.05)


def _notes(plan: Plan, job: Job) -> Iterator[str]:
    ties = sum(map(plan.is_tied, plan.candidates))
    if ties > 1:
        yield f"* The prediction cannot tell these {ties} apart: measure them."
    if any(one.verdict == "tight" for one in (*plan.candidates[:SHOWN], *plan.others[:OTHERS])):
        yield "? Memory is tight: it fits only if the estimate is right."
    if plan.others:
        yield "M: only Megatron can start it."
    limit = critical_batch(job.tokens)
    if job.batch * job.seq > limit:
        yield f"The batch exceeds the critical one of about {short(limit)} tokens, so the run needs more tokens."
    outside = list(job.outside(plan.candidates[0].layout))
    if outside:
        yield f"Outside of the calibration: {'; '.join(outside)}."
    yield f"{plan.considered:,} layouts predicted; --explain 1 shows the terms of the first."


def print_refused(plan: Plan) -> None:
    """Print why layouts were refused, and how many for each reason."""
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in plan.refused.most_common())
    if reasons:
        print(f"Refused: {reasons}.")


def _chosen(plan: Plan, text: str) -> Candidate:
    """Return the candidate with this number or name.

    Raises:
        ConfigError: There is none.
    """
    numbers = {str(number): one for number, one in enumerate(plan.candidates, 1)}
    numbers |= {f"M{number}": one for number, one in enumerate(plan.others, 1)}
    names = {str(one.layout): one for one in numbers.values()}
    found = numbers.get(text.upper()) or names.get(text)
    if found is None:
        raise ConfigError(f"--explain: {text} is not in the table; write a number from 1 to {len(plan.candidates)}")
    return found


def explain(text: str, plan: Plan, job: Job) -> None:
    """Print the terms of the layout with the number or name `text`, and what would make another one faster.

    Raises:
        ConfigError: There is no such layout.
    """
    candidate = _chosen(plan, text)
    prediction = candidate.prediction
    rows = []
    for term in sorted(prediction.terms, key=lambda term: -term.seconds):
        sizes = (f"{size / 1e9:.3g}" if size else "" for size in (term.inside, term.outside))
        times = (f"{term.seconds:.3g}", f"{term.busy:.3g}")
        rows.append((term.name, *times, *sizes, term.kind, term.formula, term.source))
    texts = ("resource", "formula", "source")
    columns = ("term", "s", "busy s", "GB in node", "GB out", *texts)
    print_table(f"{candidate.layout}: {prediction.seconds:.4g} s", columns, rows, ("term", *texts), WIDTH)
    for line in (*_summary(candidate, job), *_rivals(candidate, plan, job)):
        print(line)


def _summary(candidate: Candidate, job: Job) -> Iterator[str]:
    memory, peak = candidate.prediction.memory, job.cluster.gpus * job.cluster.gpu.peak
    parts = {
        "states": memory.states,
        "activations": memory.activations,
        "logits": memory.logits,
        "buffers": memory.buffers,
    }
    sizes = ", ".join(f"{name} {size / 1e9:.1f}" for name, size in parts.items())
    yield f"Memory: {memory.total / 1e9:.1f} GB of {job.cluster.gpu.memory / 1e9:.1f} ({sizes}): {candidate.verdict}."
    used = job.model.flops_per_token(job.seq) * candidate.prediction.rate / peak
    yield f"Model FLOPs: {100 * used:.0f} % of the GPUs' peak."
    yield f"Tokens: {100 * candidate.extra:.1f} % more than without compression, for the same loss."


def _rivals(candidate: Candidate, plan: Plan, job: Job) -> Iterator[str]:
    """Yield what would have to change for this candidate to win, or for the second to win over the first."""
    first, *others = plan.candidates
    if candidate.days < first.days:
        return
    rivals = others if candidate is first else [candidate]
    second = next((one for one in rivals if one.days > first.days * (1 + SAME)), None)
    if second is None:
        if candidate is not first:
            yield f"{candidate.layout} is as fast as {first.layout}."
        return
    yield f"{second.layout} ({second.days:.3g} days) would be faster than {first.layout} ({first.days:.3g} days)"
    for turn in turns(job, first.layout, second.layout):
        yield f"  with {turn.factor:.2g} times the rate of {turn.what}"
    yield f"  if the latter took {100 * (second.days / first.days - 1):.0f} % longer than predicted"
