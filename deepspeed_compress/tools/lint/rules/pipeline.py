"""Pipelines: a `pipeline` section, or stages in ours, tell that the model is a PipelineModule."""

from collections.abc import Callable, Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, warns
from deepspeed_compress.tools.lint.rules.common import (
    ZERO,
    hugging_face,
    integer,
    is_true,
    number,
    show,
    stage,
    stages,
    trained,
    truth,
    zero,
)

_FAMILY = "pipeline"
_PIPELINE = {"pipeline": {"activation_checkpoint_interval": 1}}
_TWO = {"world_size": 2}

Check = Callable[[Document, Context], Iterator[Hit]]


def _pipelined(document: Document) -> bool:
    return document.has("pipeline") or stages(document) > 1


def _where_it_counts(check: Check) -> Check:
    """`check`, but for programs in which the section `pipeline` has no effect."""

    def checked(document: Document, context: Context) -> Iterator[Hit]:
        if not (hugging_face(context) and document.has("pipeline")):
            yield from check(document, context)

    return checked


@_where_it_counts
def _zero23(document: Document, context: Context) -> Iterator[Hit]:
    # Stages of our own section are compared with ZeRO by that section's rules.
    if document.has("pipeline") and stage(document) in (2, 3):
        what = f"stage {stage(document)} does not work with pipelines (allowed: 0, 1)"
        correction = fix("Write stage 1", replace(document, (ZERO, "stage"), 1), safe=False)
        yield Hit((ZERO, "stage"), what, "1", fix=correction)


@_where_it_counts
def _overlap(document: Document, context: Context) -> Iterator[Hit]:
    if _pipelined(document) and is_true(document, ZERO, "overlap_comm") and stage(document) == 1:
        correction = fix("Write false", replace(document, (ZERO, "overlap_comm"), False))
        yield Hit((ZERO, "overlap_comm"), "true has no effect with pipelines", "false", fix=correction)


@_where_it_counts
def _partitioned(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("pipe_partitioned", "grad_partitioned"):
        value = document.get("pipeline", key, default=True)
        if not isinstance(value, bool):
            meant = truth(value)
            correction = None if meant is None else fix("Write a boolean", replace(document, ("pipeline", key), meant))
            yield Hit(("pipeline", key), f"{show(value)} is no boolean (allowed: true, false)", "true", fix=correction)


@_where_it_counts
def _interval(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("pipeline", "activation_checkpoint_interval", default=0)
    if number(value) is None:
        path = ("pipeline", "activation_checkpoint_interval")
        meant = integer(value)
        correction = None if meant is None else fix("Write a number", replace(document, path, meant))
        yield Hit(path, f"{show(value)} is no number (allowed: 0 or more)", "1", fix=correction)


@_where_it_counts
def _world(document: Document, context: Context) -> Iterator[Hit]:
    count, world = integer(document.get("pipeline", "stages")), context.world_size
    if count is not None and count > 0 and world is not None and world % count:
        yield Hit(("pipeline", "stages"), f"{count} stages do not divide {world} ranks", f"a divisor of {world}")


@_where_it_counts
def _few_batches(document: Document, context: Context) -> Iterator[Hit]:
    count, steps = stages(document), integer(document.get("gradient_accumulation_steps", default=1))
    given = document.has("gradient_accumulation_steps") or document.get("train_batch_size") is None
    if count > 1 and steps is not None and 0 < steps < count and given:
        idle = round(100 * (count - 1) / (steps + count - 1))
        what = f"{steps} micro-batches in {count} stages leave each rank idle for {idle} % of the time"
        yield Hit(("gradient_accumulation_steps",), what, f"{4 * count} or more")


@_where_it_counts
def _unmanaged(document: Document, context: Context) -> Iterator[Hit]:
    if _pipelined(document) and document.get("managed_gradient_accumulation", default=True) is False:
        yield Hit(("managed_gradient_accumulation",), "false is refused with pipelines", "true")


@_where_it_counts
def _layers(document: Document, context: Context) -> Iterator[Hit]:
    layers, count = integer((context.model or {}).get("num_hidden_layers")), stages(document)
    if layers is not None and count > layers + 2:
        where = ("pipeline", "stages") if document.has("pipeline", "stages") else ("deepspeed_compress", "parallelism")
        what = f"{count} stages are more than the {layers} layers, embedding and head of the model"
        yield Hit(where, what, f"{layers + 2} or fewer")


_OURS = {"deepspeed_compress": {"parallelism": {"pipeline": 2}, "gradients": {"method": "none"}}}
_MICRO = {"train_micro_batch_size_per_gpu": 1}

RULES = (
    Rule(
        "DSC600",
        "pipeline-with-zero-2-or-3",
        "error",
        _FAMILY,
        "ZeRO 2 or 3 with a pipeline.",
        "Partitioned gradients cannot wait for the other micro-batches (runtime/pipe/engine.py).",
        zero(2, also={**_MICRO, **_PIPELINE}),
        zero(1, also={**_MICRO, **_PIPELINE}),
        _zero23,
        raises("ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism"),
        _TWO,
    ),
    Rule(
        "DSC601",
        "pipeline-overlap-ignored",
        "warning",
        _FAMILY,
        "overlap_comm with a pipeline.",
        "The engine turns it off and warns (runtime/engine.py).",
        zero(1, overlap_comm=True, also={**_MICRO, **_PIPELINE}),
        zero(1, overlap_comm=False, also={**_MICRO, **_PIPELINE}),
        _overlap,
        warns("Pipeline parallelism does not support overlapped communication"),
        _TWO,
    ),
    Rule(
        "DSC602",
        "pipeline-partition-boolean",
        "error",
        _FAMILY,
        "pipe_partitioned or grad_partitioned is no boolean.",
        "Asserted without a message (runtime/pipe/engine.py).",
        trained(**_MICRO, pipeline={"pipe_partitioned": "true"}),
        trained(**_MICRO, pipeline={"pipe_partitioned": True}),
        _partitioned,
        raises("AssertionError"),
        _TWO,
    ),
    Rule(
        "DSC603",
        "pipeline-interval-number",
        "error",
        _FAMILY,
        "pipeline.activation_checkpoint_interval is no number.",
        "Compared with 0 without a check (runtime/pipe/engine.py).",
        trained(**_MICRO, pipeline={"activation_checkpoint_interval": "1"}),
        trained(**_MICRO, pipeline={"activation_checkpoint_interval": 1}),
        _interval,
        raises("TypeError"),
        _TWO,
    ),
    Rule(
        "DSC604",
        "pipeline-divides-world",
        "error",
        _FAMILY,
        "The number of stages does not divide the number of ranks.",
        "Checked by PipelineModule (runtime/pipe/module.py), which is given the number by the program.",
        trained(**_MICRO, gradient_accumulation_steps=8, pipeline={"stages": 3}),
        trained(**_MICRO, gradient_accumulation_steps=8, **_PIPELINE),
        _world,
        raises("must divide distributed world size"),
        _TWO,
    ),
    Rule(
        "DSC605",
        "few-micro-batches",
        "info",
        _FAMILY,
        "Fewer micro-batches than pipeline stages.",
        "Micro-batches are gradient_accumulation_steps (runtime/pipe/engine.py); while the pipeline fills and drains, "
        "ranks are idle.",
        trained(**_MICRO, gradient_accumulation_steps=1, **_OURS),
        trained(**_MICRO, gradient_accumulation_steps=8, **_OURS),
        _few_batches,
        accepts("ranks are idle most of the time"),
        _TWO,
    ),
    Rule(
        "DSC606",
        "unmanaged-pipeline",
        "error",
        _FAMILY,
        "managed_gradient_accumulation is false with a pipeline.",
        "Asserted by the engine (runtime/engine.py).",
        trained(**_MICRO, managed_gradient_accumulation=False, **_PIPELINE),
        trained(**_MICRO, **_PIPELINE),
        _unmanaged,
        raises("is not supported with pipeline parallelism"),
        _TWO,
    ),
    Rule(
        "DSC607",
        "more-stages-than-layers",
        "warning",
        _FAMILY,
        "More stages than the model has layers.",
        "Some stages get no layer (runtime/pipe/module.py), and their ranks only pass activations on.",
        trained(
            **_MICRO,
            gradient_accumulation_steps=16,
            deepspeed_compress={"parallelism": {"pipeline": 4}, "gradients": {"method": "none"}},
        ),
        trained(**_MICRO, gradient_accumulation_steps=16, **_OURS),
        _layers,
        accepts("ranks without layers do nothing useful"),
        {"world_size": 4, "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4}},
    ),
)
