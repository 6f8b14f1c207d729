"""Reduction of gradients: scaling, operation, format."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    ZERO,
    bf16,
    config,
    is_true,
    number,
    show,
    stage,
    truth,
    zero,
)

_FAMILY = "reduction"


_FORMATS = ("fp16", "bf16", "fp32")


_OPERATIONS = ("mean", "sum")


_OP = "gradient_allreduce_op"


_FACTOR = "gradient_predivide_factor"


def _scatters(document: Document) -> bool:
    """Whether gradients are reduce-scattered, as stages 2 and 3 do unless told otherwise."""
    return stage(document) in (2, 3) and truth(document.get(ZERO, "reduce_scatter", default=True)) is True


def _prescale(document: Document, context: Context) -> Iterator[Hit]:
    if document.get("prescale_gradients") is True and _scatters(document):
        what = f"true is not supported with reduce_scatter and stage {stage(document)} (allowed: false)"
        yield Hit(("prescale_gradients",), what, 'false, or "reduce_scatter": false')


def _predivide(document: Document, context: Context) -> Iterator[Hit]:
    factor = number(document.get(_FACTOR))
    if factor is not None and factor not in (0, 1) and _scatters(document):
        what = f"{show(factor)} is not supported with reduce_scatter and stage {stage(document)} (allowed: 1.0)"
        yield Hit((_FACTOR,), what, '1.0, or "reduce_scatter": false')


def _predivide_zero(document: Document, context: Context) -> Iterator[Hit]:
    if number(document.get(_FACTOR)) == 0:
        yield Hit((_FACTOR,), "0 divides gradients by zero (allowed: other numbers)", "1.0")


def _predivide_alone(document: Document, context: Context) -> Iterator[Hit]:
    factor = number(document.get(_FACTOR))
    if factor is not None and factor not in (0, 1) and document.get("prescale_gradients") is True:
        what = f"{show(factor)} has no effect with prescale_gradients, which divides by the number of ranks"
        yield Hit((_FACTOR,), what, '1.0, or "prescale_gradients": false')


def _operation(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(_OP, default="mean")
    if value != AUTO and not (isinstance(value, str) and value.lower() in _OPERATIONS):
        yield Hit((_OP,), f"{show(value)} is not known (allowed: mean, sum)", '"mean" or "sum"')


def _sums(document: Document) -> bool:
    value = document.get(_OP)
    return isinstance(value, str) and value.lower() == "sum"


def _sum_stage3(document: Document, context: Context) -> Iterator[Hit]:
    if _sums(document) and stage(document) == 3:
        yield Hit((_OP,), '"sum" is not supported with stage 3 (allowed: mean)', '"mean", or stage 0 to 2')


def _sum_zenflow(document: Document, context: Context) -> Iterator[Hit]:
    if _sums(document) and isinstance(document.get(ZERO, "zenflow"), dict) and stage(document) != 3:
        yield Hit((_OP,), '"sum" is not supported with ZenFlow (allowed: mean)', '"mean"')


def _sum_compile(document: Document, context: Context) -> Iterator[Hit]:
    zenflow = isinstance(document.get(ZERO, "zenflow"), dict)
    if _sums(document) and is_true(document, "compile", "deepcompile") and stage(document) != 3 and not zenflow:
        yield Hit((_OP,), '"sum" is not supported with DeepCompile (allowed: mean)', '"mean"')


def _format(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = document.get(key)
        if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _FORMATS):
            names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
            meant = names.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
            what = f"{show(value)} is not known (allowed: fp16, bf16, fp32)"
            correction = fix("Use DeepSpeed's name", replace(document, (key,), meant)) if meant else None
            yield Hit((key,), what, show(meant) if meant else '"bf16", "fp16" or "fp32"', fix=correction)


def _fp16_for_bf16(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("communication_data_type")
    if bf16(document) and isinstance(value, str) and value.lower() == "fp16":
        what = '"fp16" cannot hold the range of gradients in bf16: large ones become infinite (allowed: bf16, fp32)'
        yield Hit(("communication_data_type",), what, '"bf16" or "fp32"')


RULES = (
    Rule(
        "DSC320",
        "prescale-with-reduce-scatter",
        "error",
        _FAMILY,
        "prescale_gradients with stage 2 or 3 and reduce_scatter.",
        "Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).",
        zero(2, also={"prescale_gradients": True}),
        zero(2, reduce_scatter=False, also={"prescale_gradients": True}),
        _prescale,
        raises("pre-scale gradients is not yet supported"),
    ),
    Rule(
        "DSC321",
        "predivide-with-reduce-scatter",
        "error",
        _FAMILY,
        "gradient_predivide_factor with stage 2 or 3 and reduce_scatter.",
        "Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).",
        zero(3, also={"gradient_predivide_factor": 2.0}),
        zero(3, also={"gradient_predivide_factor": 1.0}),
        _predivide,
        raises("gradient_predivide_factor != 1.0 is not yet supported"),
    ),
    Rule(
        "DSC322",
        "predivide-by-zero",
        "error",
        _FAMILY,
        "gradient_predivide_factor is 0.",
        "Gradients are divided by it before they are reduced (runtime/engine.py); nothing checks it.",
        config(gradient_predivide_factor=0),
        config(gradient_predivide_factor=1.0),
        _predivide_zero,
        accepts("the first reduction divides by zero"),
    ),
    Rule(
        "DSC323",
        "predivide-with-prescale",
        "warning",
        _FAMILY,
        "gradient_predivide_factor has no effect with prescale_gradients.",
        "The factor is read only where gradients are scaled after the reduction (allreduce_bucket, runtime/engine.py).",
        config(prescale_gradients=True, gradient_predivide_factor=2.0),
        config(prescale_gradients=True),
        _predivide_alone,
        accepts("the factor has no effect"),
    ),
    Rule(
        "DSC324",
        "allreduce-op-unknown",
        "error",
        _FAMILY,
        "gradient_allreduce_op is neither mean nor sum.",
        "Checked when the configuration is read (runtime/config.py).",
        config(gradient_allreduce_op="avg"),
        config(gradient_allreduce_op="mean"),
        _operation,
        raises("Invalid gradient_allreduce_op"),
    ),
    Rule(
        "DSC325",
        "sum-with-stage-3",
        "error",
        _FAMILY,
        "Gradients are to be summed with stage 3.",
        "Checked when the configuration is read (runtime/config.py).",
        zero(3, also={"gradient_allreduce_op": "sum"}),
        zero(2, also={"gradient_allreduce_op": "sum"}),
        _sum_stage3,
        raises("is not supported with ZeRO stage 3"),
    ),
    Rule(
        "DSC326",
        "sum-with-zenflow",
        "error",
        _FAMILY,
        "Gradients are to be summed with ZenFlow.",
        "Checked when the configuration is read (runtime/config.py).",
        zero(2, zenflow={}, offload_optimizer={"device": "cpu"}, also={"gradient_allreduce_op": "sum"}),
        zero(2, zenflow={}, offload_optimizer={"device": "cpu"}),
        _sum_zenflow,
        raises("is not supported with ZenFlow"),
    ),
    Rule(
        "DSC327",
        "sum-with-deepcompile",
        "error",
        _FAMILY,
        "Gradients are to be summed with DeepCompile.",
        "Checked when the configuration is read (runtime/config.py).",
        config(gradient_allreduce_op="sum", compile={"deepcompile": True}),
        config(gradient_allreduce_op="mean", compile={"deepcompile": True}),
        _sum_compile,
        raises("is not supported with DeepCompile"),
    ),
    Rule(
        "DSC328",
        "communication-dtype-unknown",
        "error",
        _FAMILY,
        "A communication format that DeepSpeed does not know.",
        "Only the short names are known here, unlike under data_types (runtime/config.py).",
        config(communication_data_type="float16"),
        config(communication_data_type="fp16"),
        _format,
        raises("Invalid communication_data_type"),
    ),
    Rule(
        "DSC329",
        "fp16-communication-of-bf16",
        "warning",
        _FAMILY,
        "Gradients in bf16 are sent as fp16.",
        "bf16 reaches 3e38, fp16 65504, and without a loss scale nothing keeps gradients below (runtime/engine.py).",
        zero(2, also={"bf16": {"enabled": True}, "communication_data_type": "fp16"}),
        zero(2, also={"bf16": {"enabled": True}, "communication_data_type": "bf16"}),
        _fp16_for_bf16,
        accepts("large gradients become infinite on the way"),
    ),
)
