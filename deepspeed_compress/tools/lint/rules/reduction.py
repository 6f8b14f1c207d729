"""Rules on the reduction of gradients: scaling, operation, dtype, and what it leaves out."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, finding
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


def _no_norm(document: Document) -> bool:
    return document.truth(ZERO, "compute_grad_norm", default=True) is False


_NORM = (ZERO, "compute_grad_norm")


@rule("DSC330", "error")
def no_grad_norm_stage(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false with a stage other than 1 and 2.

    Checked when the configuration is read (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "compute_grad_norm": false}, "gradient_clipping": 0}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 0}
    Proof: raises supported only with ZeRO Stage 1 or 2
    """
    if _no_norm(document) and document.stage in (0, 3):
        what = f"false is refused with stage {document.stage} (allowed: with stages 1 and 2)"
        yield finding(_NORM, what, "true, or stage 1 or 2")


def _norm_with_others(document: Document) -> bool:
    """Return True if the norm is left out with a stage that allows it."""
    return _no_norm(document) and document.stage in (1, 2)


@rule("DSC331", "error")
def no_grad_norm_with_clipping(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false while gradients are clipped.

    gradient_clipping is 1.0 by default (runtime/constants.py), so it must be set to 0 (runtime/zero/stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 0}
    Proof: raises requires gradient_clipping=0
    """
    clipping = document.number("gradient_clipping", default=1.0)
    if _norm_with_others(document) and clipping is not None and clipping > 0 and not document.chooses_bf16_optimizer:
        given = "" if document.has("gradient_clipping") else ", its default"
        what = f"false needs gradient_clipping 0, and it is {show(clipping)}{given}"
        yield finding(_NORM, what, '"gradient_clipping": 0 as well, or true')


@rule("DSC332", "error")
def no_grad_norm_bf16_optimizer(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false with bf16, stage 1 and accumulation in fp32.

    This combination chooses BF16_Optimizer, which needs the norm (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "compute_grad_norm": false}, "gradient_clipping": 0,
        "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 0,
        "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Proof: raises does not support ZeRO Stage 1 with BF16
    """
    if _norm_with_others(document) and document.chooses_bf16_optimizer:
        what = "false is refused with bf16, stage 1 and accumulation in fp32"
        yield finding(_NORM, what, "true, or stage 2")


@rule("DSC333", "error")
def no_grad_norm_with_offload(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false with offload_optimizer.

    The offloading optimizer uses the norm (runtime/zero/stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false, "offload_optimizer": {"device": "cpu"}},
        "gradient_clipping": 0}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}, "gradient_clipping": 0}
    Proof: raises does not support optimizer offload
    """
    if _norm_with_others(document) and document.offload("offload_optimizer"):
        yield finding(_NORM, "false is refused with offload_optimizer", "true")


def _managed(document: Document) -> bool:
    return document.get("managed_gradient_accumulation", default=True) is not False


_MANAGED = ("managed_gradient_accumulation",)


@rule("DSC334", "error")
def unmanaged_with_overlap(document: Document, context: Context) -> Findings:
    """managed_gradient_accumulation is false with overlap_comm below stage 2.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Proof: raises supports ZeRO overlap_comm only with ZeRO stage 2
    """
    if not _managed(document) and document.is_true(ZERO, "overlap_comm") and document.stage in (0, 1):
        what = "false is refused with overlap_comm below stage 2"
        yield finding(_MANAGED, what, 'true, or "overlap_comm": false')


@rule("DSC335", "error")
def unmanaged_with_deepcompile(document: Document, context: Context) -> Findings:
    """managed_gradient_accumulation is false with DeepCompile.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "managed_gradient_accumulation": false, "compile": {"deepcompile": true}}
    Right: {"train_batch_size": 8, "compile": {"deepcompile": true}}
    Proof: raises is not supported with DeepCompile
    """
    if not _managed(document) and document.is_true("compile", "deepcompile"):
        yield finding(_MANAGED, "false is refused with DeepCompile", "true")


@rule("DSC336", "warning")
def quantized_communication_without_stage_3(document: Document, context: Context) -> Findings:
    """ZeRO++ quantization has no effect below stage 3; the section deepspeed_compress works with every stage.

    Only the optimizer of stage 3 receives these settings (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "zero_quantized_gradients": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: accepts gradients travel uncompressed
    """
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if document.is_true(ZERO, key) and document.stage in (0, 1, 2):
            ours = 'the section "deepspeed_compress", which compresses with every stage'
            what = f"true has no effect with stage {document.stage} (useful: with stage 3)"
            yield finding((ZERO, key), what, ours if key == "zero_quantized_gradients" else "stage 3, or false")


@rule("DSC337", "warning")
def quantized_gradients_on_one_node(document: Document, context: Context) -> Findings:
    """zero_quantized_gradients is true on a single node.

    The two-step all-to-all of ZeRO++ (runtime/comm/coalesced_collectives.py) saves only traffic between nodes.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "bf16": {"enabled": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}
    Context: {"world_size": 2, "ranks_per_node": 2}
    Proof: unproved its kernels are for GPUs
    """
    nodes = context.world_size is not None and context.world_size == context.ranks_per_node
    if document.is_true(ZERO, "zero_quantized_gradients") and document.stage == 3 and nodes:
        what = "true quantizes twice to save traffic between nodes, and there is only one node (useful: with several)"
        yield finding((ZERO, "zero_quantized_gradients"), what, "false")
