"""Output of ``ds-compress plan cluster``: the choices, and the terms of one."""

from collections.abc import Iterator, Sequence

from deepspeed_compress.choice_names import LOSS, TIMES
from deepspeed_compress.config.numbers import short
from deepspeed_compress.planner.choices import FASTER, Choice, Kind, better_batch, divide, fastest_alone, packing_gain
from deepspeed_compress.planner.measured import Measured
from deepspeed_compress.planner.search import MEASURED, TIE, Candidate, Job, Plan, critical_batch
from deepspeed_compress.tools.tables import WIDTH, new_console, new_table, print_table


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


_MEMORY = {
    "tight": "? Memory is tight: it fits only if the estimate is right.",
    "does not fit": "! It does not fit into memory, by the estimate.",
}
"""Notes about memory by verdict, which begin with the mark of those rows."""


def _doubts(now: Candidate, plan: Plan, job: Job) -> Iterator[str]:
    """Yield what packing documents would gain, and what speaks against the batch, or against the prediction."""
    if job.mean_length:
        gain = packing_gain(job, now)
        yield (
            f"{1 - job.trained:.0%} of the tokens are padding. Packed documents with attention inside each "
            f"(FlashAttention's varlen kernels) train {gain:.2g} times as many tokens per second in row 1."
        )
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
    # A narrower table would break the names of layouts.
    new_console(WIDTH).print(table)
    now = found[0].candidate
    for line in (*_notes(found, others, job, measured), *_kind_notes(now, plan, job), *_doubts(now, plan, job)):
        print(line)
    print("--choose N --output DIR writes the files of a row, --explain N shows its terms.")


def _notes(found: Sequence[Choice], others: Sequence[Choice], job: Job, measured: Measured | None) -> Iterator[str]:
    """Yield what the figures of the table mean, and which of them were measured."""
    everything = [*found, *others]
    for verdict, note in _MEMORY.items():
        if any(one.candidate.verdict == verdict for one in everything):
            yield note
    if any(" %" in one.loss for one in everything):
        size = "" if job.model.parameters <= MEASURED else ", not at this size"
        yield f"Loss: measured with up to {short(MEASURED)} parameters{size}."
    if others:
        yield "Below the line, training itself changes."
    yield f'Ranges mostly move together, so "{TIMES}" is more certain than seconds.'
    if measured is not None:
        steps = [f"{step.layout} ({step.seconds:.3g} s)" for step in measured.steps]
        yield f"Measured here: links, matrix products, kernels{', a step of ' * bool(steps)}{', '.join(steps)}."
    if all(one.seconds > FASTER * found[0].seconds for one in found[1:]):
        yield "Nothing that trains as now is more than a tenth faster."


def _choice_cells(choice: Choice, seconds: float, job: Job) -> Sequence[str]:
    candidate, prediction = choice.candidate, choice.candidate.prediction
    (low, high), memory = prediction.interval, prediction.memory
    host = f" + {memory.host / 1e9:.0f} GB of the host" * (memory.host > 0)
    sent = job.cluster.per_node * sum(term.outside for term in prediction.terms)
    return (
        choice.name,
        f"{choice.seconds:.3g} ({low:.3g}-{high:.3g})",
        f"{seconds / choice.seconds:.2g}",
        f"{candidate.days:.3g}",
        f"{memory.total / 1e9:.0f} GB{_MEMORY.get(candidate.verdict, '')[:1]}{host}",
        f"{sent / 1e9:.3g} GB",
        choice.loss,
    )


def _kind_notes(now: Candidate, plan: Plan, job: Job) -> Iterator[str]:
    """Yield which of several kinds of GPUs limits what runs now, and what another division would gain."""
    alone = fastest_alone(job, plan) if job.cluster.kinds else None
    if job.cluster.kinds and now.layout.pipeline > 1:
        yield "All stages of a pipeline are predicted with the worst figures of all kinds of GPUs."
    elif job.cluster.kinds:
        kinds, gain = divide(job, now)
        slowest, fastest = kinds[0], kinds[-1]
        smallest = min((kind.gpu for kind in kinds), key=lambda gpu: gpu.memory)
        yield (
            f"{slowest.gpu.name} limits computing: it takes {slowest.seconds / fastest.seconds:.2g} times as long as "
            f"{fastest.gpu.name}. {smallest.name} limits memory to {smallest.memory / 1e9:.0f} GB."
        )
        yield from _division_notes(kinds, gain, now)
    if alone is not None:
        yield f"The fastest choice on {alone[1].gpus} {alone[1].gpu.name} alone is {alone[0]:.2g} {TIMES} as on all."


def _division_notes(kinds: Sequence[Kind], gain: float, now: Candidate) -> Iterator[str]:
    """Yield the sequences with which all GPUs end together, and how to give them to DeepSpeed."""
    if gain < 1 + TIE:
        yield "Another division of the batch would gain row 1 less than 5 %."
        return
    shares = ", ".join(f"{kind.sequences:.3g} on {kind.gpu.name}" for kind in kinds)
    replica = "each GPU" if now.layout.tensor == 1 else f"every {now.layout.tensor} GPUs"
    yield (
        f"All end together with these sequences per step for {replica}: {shares}. Row 1 is then at most "
        f"{gain:.2g} {TIMES}."
    )
    yield (
        "DeepSpeed divides batches equally. With data loaders of your own, micro-batches may differ if each rank "
        "multiplies its loss by its sequences x ranks / sequences of all."
    )


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
