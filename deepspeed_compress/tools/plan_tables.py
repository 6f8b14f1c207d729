"""Output of ``ds-compress plan cluster``: the choices, all layouts, and the terms of one."""

from collections.abc import Collection, Iterator, Sequence

from deepspeed_compress.choice_names import LOSS, TIMES
from deepspeed_compress.config.numbers import short
from deepspeed_compress.planner.choices import FASTER, Choice, better_batch, packing_gain
from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.measured import Measured
from deepspeed_compress.planner.mixed import Division, divide, fastest_alone
from deepspeed_compress.planner.predict import Prediction
from deepspeed_compress.planner.search import ISLANDS_LOST, MEASURED, TIE, Candidate, Job, Plan, critical_batch
from deepspeed_compress.tools.tables import new_console, new_table, print_table

SHOWN, APART = 10, 3
"""Rows of the table of all layouts: those that train alike, and those with islands."""
WIDTH = 160
"""Least width of tables in characters. A narrower table would break the names of layouts."""
LEGEND = """\
Names: zero1 is the ZeRO stage; d replicas, t tensor ranks, p stages, v interleaved stages; node8 shards within nodes;
b1x16 is the micro-batch and their number; g4, w4 are bits of gradients, weights; i2every30 are 2 islands, 30 steps;
offload_optimizer and offload_all use the memory of hosts."""


def print_plan(plan: Plan, job: Job, measured: Measured | None) -> None:
    """Print the best layouts, with measured steps if there are any, and what the table's marks mean."""
    figures = ("step in s (80 %)", *(["measured"] if measured else []), "tokens/s", "memory", "node sends", "days")
    columns = ("", "layout", *figures, "limited by")
    table = new_table(_title(job), columns, ("", "layout", "limited by"))
    for letter, rows, count in _blocks(plan):
        for number, candidate in enumerate(rows[:count], 1):
            table.add_row(f"{letter}{number}", *_cells(candidate, plan, job, measured))
        table.add_section()
    new_console(WIDTH).print(table)
    print(LEGEND)
    for line in _notes(plan, job):
        print(line)
    print_refused(plan)


def _blocks(plan: Plan) -> tuple[tuple[str, tuple[Candidate, ...], int], ...]:
    """Return the letter before the numbers of each block of the table, its layouts, and how many of them are shown."""
    return ("", plan.candidates, SHOWN), ("I", plan.islands, APART)


def _title(job: Job) -> str:
    trained = f" ({short(job.model.trained_parameters)} of them in adapters)" if job.model.rank else ""
    padded = f" ({job.mean_length} of them in documents)" if job.mean_length else ""
    return (
        f"{job.model.name}, {short(job.model.parameters)} parameters{trained}, on {job.cluster}\n"
        f"{sequences(job)} of {job.seq} tokens{padded} per step, {short(job.tokens)} tokens in all"
    )


def sequences(job: Job) -> str:
    """Return the batch of a step in words."""
    return f"{job.batch} sequence{'s' if job.batch > 1 else ''}"


def _cells(candidate: Candidate, plan: Plan, job: Job, measured: Measured | None) -> Sequence[str]:
    prediction = candidate.prediction
    low, high = prediction.interval
    tie = "* " if candidate in plan.candidates and plan.is_tied(candidate) else ""
    return (
        f"{tie}{candidate.layout}",
        f"{prediction.seconds:.3g} ({low:.3g}-{high:.3g})",
        *([] if measured is None else [_seconds_of(candidate.layout, measured)]),
        f"{job.trained * prediction.rate:,.0f}",
        _memory(candidate),
        _sent(candidate, job),
        f"{candidate.days:.3g}",
        _limits(prediction),
    )


_MARKS = {"fits": "", "tight": "?", "does not fit": "!"}
"""Marks of memory by verdict."""


def _memory(candidate: Candidate) -> str:
    memory = candidate.prediction.memory
    host = f" + {memory.host / 1e9:.0f} GB of the host" * (memory.host > 0)
    return f"{memory.total / 1e9:.0f} GB{_MARKS[candidate.verdict]}{host}"


def _sent(candidate: Candidate, job: Job) -> str:
    """Return the bytes that a node sends to others in a step."""
    return f"{job.cluster.per_node * sum(term.outside for term in candidate.prediction.terms) / 1e9:.3g} GB"


def _seconds_of(layout: Layout, measured: Measured) -> str:
    """Return the measured seconds of a step, or an empty text if the layout was not measured."""
    return next((f"{step.seconds:.3g}" for step in measured.steps if step.layout == layout), "")


_KINDS = {"memory": "memory traffic"}
"""Names of kinds of terms that would be taken for something else."""


def _limits(prediction: Prediction) -> str:
    """Return the two kinds of terms that take most of the step, with their shares."""
    shares = {term.kind: prediction.share(term.kind) for term in prediction.terms}
    largest = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    return ", ".join(f"{_KINDS.get(kind, kind)} {100 * shares[kind]:.0f} %" for kind in largest if shares[kind] >= 0.05)


def _notes(plan: Plan, job: Job) -> Iterator[str]:
    """Yield what the marks of the table of all layouts mean."""
    shown = [one for _, rows, count in _blocks(plan) for one in rows[:count]]
    ties = sum(map(plan.is_tied, plan.candidates))
    if ties > 1:
        yield f"* The prediction cannot tell these {ties} apart: measure them."
    yield from _memory_notes(shown)
    if plan.islands:
        yield f"I: islands train in another way. In our own runs, the loss was {ISLANDS_LOST} higher."
    yield from _doubts(plan, job)
    yield f"{plan.considered:,} layouts predicted; --all --explain 1 shows the terms of the first."


def _memory_notes(shown: Collection[Candidate]) -> Iterator[str]:
    verdicts = {one.verdict for one in shown}
    if "tight" in verdicts:
        yield "? Memory is tight: it fits only if the estimate is right."
    if "does not fit" in verdicts:
        yield "! It does not fit into memory, by the estimate."


def _doubts(plan: Plan, job: Job) -> Iterator[str]:
    """Yield what speaks against the batch, or against the prediction."""
    better = better_batch(job, plan)
    if better is not None:
        yield f"With {better[0]} sequences per step, {better[1]:.0%} more tokens would be trained per second."
    limit = critical_batch(job.tokens)
    if job.batch * job.seq * job.trained > limit:
        yield f"The batch exceeds the critical one of about {short(limit)} tokens, so the run needs more tokens."
    outside = list(job.outside(plan.candidates[0].layout))
    if outside:
        yield f"Outside of the calibration: {'; '.join(outside)}."


def print_choices(
    found: Sequence[Choice], others: Sequence[Choice], plan: Plan, job: Job, measured: Measured | None
) -> None:
    """Print what one can choose from, first what runs now, and below a line what changes training (`others`)."""
    columns = ("", "", "step in s (80 %)", TIMES, "days", "memory", "a node sends", LOSS)
    table = new_table(_title(job), columns, ("", LOSS))
    for number, choice in enumerate((*found, *others), 1):
        if number == len(found) + 1:
            table.add_section()
        table.add_row(str(number), *_choice_cells(choice, found[0].seconds, job))
    new_console(WIDTH).print(table)
    everything = [*found, *others]
    for line in _memory_notes([one.candidate for one in everything]):
        print(line)
    if any(" %" in one.loss for one in everything):
        size = "" if job.model.parameters <= MEASURED else ", not at this size"
        print(f"Loss: measured with up to {short(MEASURED)} parameters{size}.")
    if others:
        print("Below the line, training itself changes.")
    print(f'Ranges mostly move together, so "{TIMES}" is more certain than seconds.')
    if measured is not None:
        steps = [f"{step.layout} ({step.seconds:.3g} s)" for step in measured.steps]
        print(f"Measured here: links, matrix products, kernels{', a step of ' * bool(steps)}{', '.join(steps)}.")
    if all(one.seconds > FASTER * found[0].seconds for one in found[1:]):
        print("Nothing that trains as now is more than a tenth faster.")
    for line in (*_kind_notes(found[0].candidate, plan, job), *_padding_notes(found[0], job), *_doubts(plan, job)):
        print(line)
    print("--choose N --output DIR writes the files of a row, --explain N shows its terms, --all shows other layouts.")


def _choice_cells(choice: Choice, seconds: float, job: Job) -> Sequence[str]:
    candidate = choice.candidate
    low, high = candidate.prediction.interval
    return (
        choice.name,
        f"{choice.seconds:.3g} ({low:.3g}-{high:.3g})",
        f"{seconds / choice.seconds:.2g}",
        f"{candidate.days:.3g}",
        _memory(candidate),
        _sent(candidate, job),
        choice.loss,
    )


def _kind_notes(now: Candidate, plan: Plan, job: Job) -> Iterator[str]:
    """Yield which of several kinds of GPUs limits what runs now, and what another division would gain."""
    alone = fastest_alone(job, plan) if job.cluster.kinds else None
    if job.cluster.kinds and now.layout.pipeline > 1:
        yield "All stages of a pipeline are predicted with the worst figures of all kinds of GPUs."
    elif job.cluster.kinds:
        division = divide(job, now)
        slowest, fastest = division.kinds[0], division.kinds[-1]
        smallest = min((kind.gpu for kind in division.kinds), key=lambda gpu: gpu.memory)
        yield (
            f"{slowest.gpu.name} limits computing: it takes {slowest.seconds / fastest.seconds:.2g} times as long as "
            f"{fastest.gpu.name}. {smallest.name} limits memory to {smallest.memory / 1e9:.0f} GB."
        )
        yield from _division_notes(division, now)
    if alone is not None:
        yield f"The fastest choice on {alone[1].gpus} {alone[1].gpu.name} alone is {alone[0]:.2g} {TIMES} as on all."


def _division_notes(division: Division, now: Candidate) -> Iterator[str]:
    """Yield the sequences with which all GPUs end together, and how to give them to DeepSpeed."""
    if division.gain < 1 + TIE:
        yield "Another division of the batch would gain row 1 less than 5 %."
        return
    each = zip(division.sequences, division.kinds, strict=True)
    shares = ", ".join(f"{sequences:.3g} on {kind.gpu.name}" for sequences, kind in each)
    replica = "each GPU" if now.layout.tensor == 1 else f"every {now.layout.tensor} GPUs"
    yield (
        f"All end together with these sequences per step for {replica}: {shares}. Row 1 is then at most "
        f"{division.gain:.2g} {TIMES}."
    )
    yield (
        "DeepSpeed divides batches equally. With data loaders of your own, micro-batches may differ if each rank "
        "multiplies its loss by its sequences x ranks / sequences of all."
    )


def _padding_notes(now: Choice, job: Job) -> Iterator[str]:
    """Yield what packing documents would gain, if they are padded."""
    if job.mean_length:
        gain = packing_gain(job, now.candidate)
        yield (
            f"{1 - job.trained:.0%} of the tokens are padding. Packed documents with attention inside each "
            f"(FlashAttention's varlen kernels) train {gain:.2g} times as many tokens per second in row 1."
        )


def print_refused(plan: Plan) -> None:
    """Print why layouts were refused, and how many for each reason."""
    reasons = ", ".join(f"{reason} ({count:,})" for reason, count in plan.refused.most_common())
    if reasons:
        print(f"Refused: {reasons}.")


def explain(candidate: Candidate, job: Job) -> None:
    """Print the terms of a layout, its memory, and its use of the GPUs."""
    prediction = candidate.prediction
    rows = []
    for term in sorted(prediction.terms, key=lambda term: -term.seconds):
        sizes = (f"{size / 1e9:.3g}" if size else "" for size in (term.inside, term.outside))
        times = (f"{term.seconds:.3g}", f"{term.busy:.3g}")
        rows.append((term.name, *times, *sizes, term.kind, term.formula, term.source))
    texts = ("resource", "formula", "source")
    columns = ("term", "s", "busy s", "GB of a rank to its node", "GB of a rank to others", *texts)
    print_table(f"{candidate.layout}: {prediction.seconds:.4g} s", columns, rows, ("term", *texts), WIDTH)
    memory, peak = prediction.memory, job.cluster.peak
    kinds = ("states", "activations", "logits", "buffers")
    parts = ", ".join(f"{name} {getattr(memory, name) / 1e9:.1f}" for name in kinds)
    print(f"Memory: {memory.total / 1e9:.1f} GB of {job.cluster.gpu.memory / 1e9:.1f} ({parts}): {candidate.verdict}.")
    print(f"Model FLOPs: {100 * job.model.flops_per_token(job.seq) * prediction.rate / peak:.0f} % of the GPUs' peak.")
    print(f"Tokens: {100 * candidate.extra:.1f} % more than without compression, for the same loss.")
