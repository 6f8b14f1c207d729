"""Tables of ``ds-compress plan cluster``: the best layouts, and the terms of one of them."""

from collections.abc import Iterator, Sequence

from deepspeed_compress.config.numbers import short
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.learning import critical_batch
from deepspeed_compress.planner.measured import Measured
from deepspeed_compress.planner.predict import Prediction
from deepspeed_compress.planner.search import Candidate, Job, Plan, turns
from deepspeed_compress.tools.tables import new_console, new_table, print_table

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
