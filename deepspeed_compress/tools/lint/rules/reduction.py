"""Rules on the reduction of gradients: scaling, operation, dtype."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule
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

_FORMATS = ("fp16", "bf16", "fp32")
_OPERATIONS = ("mean", "sum")
_OP = "gradient_allreduce_op"
_FACTOR = "gradient_predivide_factor"


def _scatters(document: Document) -> bool:
    """Return True if gradients are reduce-scattered, which stages 2 and 3 do by default."""
    return stage(document) in (2, 3) and truth(document.get(ZERO, "reduce_scatter", default=True)) is True


@rule(
    code="DSC320",
    name="prescale-with-reduce-scatter",
    severity="error",
    family="reduction",
    summary="prescale_gradients with stage 2 or 3 and reduce_scatter.",
    reason="Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).",
    wrong=zero(2, also={"prescale_gradients": True}),
    right=zero(2, reduce_scatter=False, also={"prescale_gradients": True}),
    proof=raises("pre-scale gradients is not yet supported"),
)
def prescale_with_reduce_scatter(document: Document, context: Context) -> Iterator[Diagnostic]:
    if document.get("prescale_gradients") is True and _scatters(document):
        what = f"true is not supported with reduce_scatter and stage {stage(document)} (allowed: false)"
        yield Diagnostic(at("prescale_gradients"), what, write('false, or "reduce_scatter": false'))


@rule(
    code="DSC321",
    name="predivide-with-reduce-scatter",
    severity="error",
    family="reduction",
    summary="gradient_predivide_factor with stage 2 or 3 and reduce_scatter.",
    reason="Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).",
    wrong=zero(3, also={"gradient_predivide_factor": 2.0}),
    right=zero(3, also={"gradient_predivide_factor": 1.0}),
    proof=raises("gradient_predivide_factor != 1.0 is not yet supported"),
)
def predivide_with_reduce_scatter(document: Document, context: Context) -> Iterator[Diagnostic]:
    factor = number(document.get(_FACTOR))
    if factor is not None and factor not in (0, 1) and _scatters(document):
        what = f"{show(factor)} is not supported with reduce_scatter and stage {stage(document)} (allowed: 1.0)"
        yield Diagnostic(at(_FACTOR), what, write('1.0, or "reduce_scatter": false'))


@rule(
    code="DSC322",
    name="predivide-by-zero",
    severity="error",
    family="reduction",
    summary="gradient_predivide_factor is 0.",
    reason="Gradients are divided by it before they are reduced (runtime/engine.py); nothing checks it.",
    wrong=config(gradient_predivide_factor=0),
    right=config(gradient_predivide_factor=1.0),
    proof=accepts("the first reduction divides by zero"),
)
def predivide_by_zero(document: Document, context: Context) -> Iterator[Diagnostic]:
    if number(document.get(_FACTOR)) == 0:
        yield Diagnostic(at(_FACTOR), "0 divides gradients by zero (allowed: other numbers)", write("1.0"))


@rule(
    code="DSC323",
    name="predivide-with-prescale",
    severity="warning",
    family="reduction",
    summary="gradient_predivide_factor has no effect with prescale_gradients.",
    reason=(
        "The factor is read only where gradients are scaled after the reduction (allreduce_bucket, runtime/engine.py)."
    ),
    wrong=config(prescale_gradients=True, gradient_predivide_factor=2.0),
    right=config(prescale_gradients=True),
    proof=accepts("the factor has no effect"),
)
def predivide_with_prescale(document: Document, context: Context) -> Iterator[Diagnostic]:
    factor = number(document.get(_FACTOR))
    if factor is not None and factor not in (0, 1) and document.get("prescale_gradients") is True:
        what = f"{show(factor)} has no effect with prescale_gradients, which divides by the number of ranks"
        yield Diagnostic(at(_FACTOR), what, write('1.0, or "prescale_gradients": false'))


@rule(
    code="DSC324",
    name="allreduce-op-unknown",
    severity="error",
    family="reduction",
    summary="gradient_allreduce_op is neither mean nor sum.",
    reason="Checked when the configuration is read (runtime/config.py).",
    wrong=config(gradient_allreduce_op="avg"),
    right=config(gradient_allreduce_op="mean"),
    proof=raises("Invalid gradient_allreduce_op"),
)
def allreduce_op_unknown(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get(_OP, default="mean")
    if value != AUTO and not (isinstance(value, str) and value.lower() in _OPERATIONS):
        yield Diagnostic(at(_OP), f"{show(value)} is not known (allowed: mean, sum)", write('"mean" or "sum"'))


def _sums(document: Document) -> bool:
    value = document.get(_OP)
    return isinstance(value, str) and value.lower() == "sum"


@rule(
    code="DSC325",
    name="sum-with-stage-3",
    severity="error",
    family="reduction",
    summary="Gradients are to be summed with stage 3.",
    reason="Checked when the configuration is read (runtime/config.py).",
    wrong=zero(3, also={"gradient_allreduce_op": "sum"}),
    right=zero(2, also={"gradient_allreduce_op": "sum"}),
    proof=raises("is not supported with ZeRO stage 3"),
)
def sum_with_stage_3(document: Document, context: Context) -> Iterator[Diagnostic]:
    if _sums(document) and stage(document) == 3:
        yield Diagnostic(
            at(_OP), '"sum" is not supported with stage 3 (allowed: mean)', write('"mean", or stage 0 to 2')
        )


@rule(
    code="DSC326",
    name="sum-with-zenflow",
    severity="error",
    family="reduction",
    summary="Gradients are to be summed with ZenFlow.",
    reason="Checked when the configuration is read (runtime/config.py).",
    wrong=zero(2, zenflow={}, offload_optimizer={"device": "cpu"}, also={"gradient_allreduce_op": "sum"}),
    right=zero(2, zenflow={}, offload_optimizer={"device": "cpu"}),
    proof=raises("is not supported with ZenFlow"),
)
def sum_with_zenflow(document: Document, context: Context) -> Iterator[Diagnostic]:
    if _sums(document) and isinstance(document.get(ZERO, "zenflow"), dict) and stage(document) != 3:
        yield Diagnostic(at(_OP), '"sum" is not supported with ZenFlow (allowed: mean)', write('"mean"'))


@rule(
    code="DSC327",
    name="sum-with-deepcompile",
    severity="error",
    family="reduction",
    summary="Gradients are to be summed with DeepCompile.",
    reason="Checked when the configuration is read (runtime/config.py).",
    wrong=config(gradient_allreduce_op="sum", compile={"deepcompile": True}),
    right=config(gradient_allreduce_op="mean", compile={"deepcompile": True}),
    proof=raises("is not supported with DeepCompile"),
)
def sum_with_deepcompile(document: Document, context: Context) -> Iterator[Diagnostic]:
    zenflow = isinstance(document.get(ZERO, "zenflow"), dict)
    if _sums(document) and is_true(document, "compile", "deepcompile") and stage(document) != 3 and not zenflow:
        yield Diagnostic(at(_OP), '"sum" is not supported with DeepCompile (allowed: mean)', write('"mean"'))


@rule(
    code="DSC328",
    name="communication-dtype-unknown",
    severity="error",
    family="reduction",
    summary="A communication format that DeepSpeed does not know.",
    reason="Only the short names are known here, unlike under data_types (runtime/config.py).",
    wrong=config(communication_data_type="float16"),
    right=config(communication_data_type="fp16"),
    proof=raises("Invalid communication_data_type"),
)
def communication_dtype_unknown(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = document.get(key)
        if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _FORMATS):
            names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
            meant = names.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
            what = f"{show(value)} is not known (allowed: fp16, bf16, fp32)"
            correction = fix("Use DeepSpeed's name", replace(document, (key,), meant)) if meant else None
            yield Diagnostic(at(key), what, write(show(meant) if meant else '"bf16", "fp16" or "fp32"'), fix=correction)


@rule(
    code="DSC329",
    name="fp16-communication-of-bf16",
    severity="warning",
    family="reduction",
    summary="Gradients in bf16 are sent as fp16.",
    reason="bf16 reaches 3e38, fp16 65504, and without a loss scale nothing keeps gradients below (runtime/engine.py).",
    wrong=zero(2, also={"bf16": {"enabled": True}, "communication_data_type": "fp16"}),
    right=zero(2, also={"bf16": {"enabled": True}, "communication_data_type": "bf16"}),
    proof=accepts("large gradients become infinite on the way"),
)
def fp16_communication_of_bf16(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get("communication_data_type")
    if bf16(document) and isinstance(value, str) and value.lower() == "fp16":
        what = '"fp16" cannot hold the range of gradients in bf16: large ones become infinite (allowed: bf16, fp32)'
        yield Diagnostic(at("communication_data_type"), what, write('"bf16" or "fp32"'))
