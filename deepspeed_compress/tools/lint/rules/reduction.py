"""Rules on the reduction of gradients: scaling, operation, dtype."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import finding
from deepspeed_compress.tools.lint.values import AUTO, show

_FORMATS = ("fp16", "bf16", "fp32")
_OPERATIONS = ("mean", "sum")
_OP = "gradient_allreduce_op"
_FACTOR = "gradient_predivide_factor"


@rule("DSC320", "error")
def prescale_with_reduce_scatter(document: Document, context: Context) -> Findings:
    """prescale_gradients is true with stage 2 or 3 and reduce_scatter.

    Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "prescale_gradients": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true}
    Proof: raises pre-scale gradients is not yet supported
    """
    if document.get("prescale_gradients") is True and document.scatters:
        what = f"true is not supported with reduce_scatter and stage {document.stage} (allowed: false)"
        yield finding(("prescale_gradients",), what, 'false, or "reduce_scatter": false')


@rule("DSC321", "error")
def predivide_with_reduce_scatter(document: Document, context: Context) -> Findings:
    """gradient_predivide_factor is given with stage 2 or 3 and reduce_scatter.

    Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2.0}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "gradient_predivide_factor": 1.0}
    Proof: raises gradient_predivide_factor != 1.0 is not yet supported
    """
    factor = document.number(_FACTOR)
    if factor is not None and factor not in (0, 1) and document.scatters:
        what = f"{show(factor)} is not supported with reduce_scatter and stage {document.stage} (allowed: 1.0)"
        yield finding((_FACTOR,), what, '1.0, or "reduce_scatter": false')


@rule("DSC322", "error")
def predivide_by_zero(document: Document, context: Context) -> Findings:
    """gradient_predivide_factor is 0.

    Gradients are divided by it before they are reduced (runtime/engine.py), without a check.

    Wrong: {"train_batch_size": 8, "gradient_predivide_factor": 0}
    Right: {"train_batch_size": 8, "gradient_predivide_factor": 1.0}
    Proof: accepts the first reduction divides by zero
    """
    if document.number(_FACTOR) == 0:
        yield finding((_FACTOR,), "0 causes a division of gradients by zero (allowed: other numbers)", "1.0")


@rule("DSC323", "warning")
def predivide_with_prescale(document: Document, context: Context) -> Findings:
    """gradient_predivide_factor has no effect with prescale_gradients.

    The factor is read only if gradients are scaled after the reduction (allreduce_bucket, runtime/engine.py).

    Wrong: {"train_batch_size": 8, "prescale_gradients": true, "gradient_predivide_factor": 2.0}
    Right: {"train_batch_size": 8, "prescale_gradients": true}
    Proof: accepts the factor has no effect
    """
    factor = document.number(_FACTOR)
    if factor is not None and factor not in (0, 1) and document.get("prescale_gradients") is True:
        what = f"{show(factor)} has no effect with prescale_gradients, which divides by the number of ranks"
        yield finding((_FACTOR,), what, '1.0, or "prescale_gradients": false')


@rule("DSC324", "error")
def allreduce_op_unknown(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is neither mean nor sum.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "gradient_allreduce_op": "avg"}
    Right: {"train_batch_size": 8, "gradient_allreduce_op": "mean"}
    Proof: raises Invalid gradient_allreduce_op
    """
    value = document.get(_OP, default="mean")
    if value != AUTO and not (isinstance(value, str) and value.lower() in _OPERATIONS):
        yield finding((_OP,), f"{show(value)} is not known (allowed: mean, sum)", '"mean" or "sum"')


def _sums(document: Document) -> bool:
    """Return True if gradients are to be summed."""
    return document.string(_OP).lower() == "sum"


@rule("DSC325", "error")
def sum_with_stage_3(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is sum with stage 3.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}
    Proof: raises is not supported with ZeRO stage 3
    """
    if _sums(document) and document.stage == 3:
        yield finding((_OP,), '"sum" is not supported with stage 3 (allowed: mean)', '"mean", or stage 0 to 2')


@rule("DSC326", "error")
def sum_with_zenflow(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is sum with ZenFlow.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}},
        "gradient_allreduce_op": "sum"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    Proof: raises is not supported with ZenFlow
    """
    if _sums(document) and document.zenflow and document.stage != 3:
        yield finding((_OP,), '"sum" is not supported with ZenFlow (allowed: mean)', '"mean"')


@rule("DSC327", "error")
def sum_with_deepcompile(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is sum with DeepCompile.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "gradient_allreduce_op": "sum", "compile": {"deepcompile": true}}
    Right: {"train_batch_size": 8, "gradient_allreduce_op": "mean", "compile": {"deepcompile": true}}
    Proof: raises is not supported with DeepCompile
    """
    alone = document.stage != 3 and not document.zenflow
    if _sums(document) and document.is_true("compile", "deepcompile") and alone:
        yield finding((_OP,), '"sum" is not supported with DeepCompile (allowed: mean)', '"mean"')


@rule("DSC328", "error")
def communication_dtype_unknown(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know the dtype of communication.

    Here, DeepSpeed knows only the short names, unlike under data_types (runtime/config.py).

    Wrong: {"train_batch_size": 8, "communication_data_type": "float16"}
    Right: {"train_batch_size": 8, "communication_data_type": "fp16"}
    Proof: raises Invalid communication_data_type
    """
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = document.get(key)
        if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _FORMATS):
            names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
            meant = names.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
            what = f"{show(value)} is not known (allowed: fp16, bf16, fp32)"
            correction = fix("Use DeepSpeed's name", replace(document, (key,), meant)) if meant else None
            yield finding((key,), what, show(meant) if meant else '"bf16", "fp16" or "fp32"', correction)


@rule("DSC329", "warning")
def fp16_communication_of_bf16(document: Document, context: Context) -> Findings:
    """Gradients in bf16 are sent as fp16.

    The largest number is 3e38 in bf16 and 65504 in fp16. Without a loss scale, nothing keeps gradients below that
    (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp16"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "bf16"}
    Proof: accepts large gradients become infinite on the way
    """
    if document.bf16 and document.string("communication_data_type").lower() == "fp16":
        what = '"fp16" cannot hold the range of gradients in bf16: large ones become infinite (allowed: bf16, fp32)'
        yield finding(("communication_data_type",), what, '"bf16" or "fp32"')
