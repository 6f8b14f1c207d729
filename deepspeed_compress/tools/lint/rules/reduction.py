"""Rules on the reduction of gradients: scaling, operation, dtype, and what it leaves out."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import ZERO, Context, Findings, finding, is_pipelined, rule
from deepspeed_compress.tools.lint.values import AUTO, show

_FORMATS = ("fp16", "bf16", "fp32")
_OP = "gradient_allreduce_op"
_FACTOR = "gradient_predivide_factor"


@rule("DSC320", "error")
def scaling_with_reduce_scatter(document: Document, context: Context) -> Findings:
    """prescale_gradients or gradient_predivide_factor is given with stage 2 or 3 and reduce_scatter.

    Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "prescale_gradients": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true}
    Proof: raises pre-scale gradients is not yet supported
    """
    is_set = {
        "prescale_gradients": document.get("prescale_gradients") is True,
        _FACTOR: document.number(_FACTOR) not in (None, 0, 1),
    }
    for key, neutral in (("prescale_gradients", "false"), (_FACTOR, "1.0")):
        if is_set[key] and document.scatters:
            what = f"{show(document.get(key))} is not supported with reduce_scatter and stage {document.stage}"
            yield finding((key,), f"{what} (allowed: {neutral})", f'{neutral}, or "reduce_scatter": false')


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


@rule("DSC325", "error")
def sum_not_supported(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is sum with stage 3, ZenFlow or DeepCompile.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}
    Proof: raises is not supported with ZeRO stage 3
    """
    refused = {
        "stage 3": document.stage == 3,
        "ZenFlow": isinstance(document.get(ZERO, "zenflow"), dict),
        "DeepCompile": document.is_true("compile", "deepcompile"),
    }
    other = next((part for part, is_on in refused.items() if is_on), None)
    if document.string(_OP).lower() == "sum" and other:
        yield finding((_OP,), f'"sum" is not supported with {other} (allowed: mean)', '"mean"')


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


@rule("DSC330", "error")
def no_grad_norm(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false where DeepSpeed needs the norm.

    It needs the norm with stages 0 and 3 (runtime/zero/config.py), with offload_optimizer, for clipping, which is to a
    norm of 1.0 by default (runtime/zero/stage_1_and_2.py), and in BF16_Optimizer, which bf16 with stage 1 and
    accumulation in fp32 chooses (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 0}
    Proof: raises requires gradient_clipping=0
    """
    clipping = document.number("gradient_clipping", default=1.0)
    given = "" if document.has("gradient_clipping") else ", its default"
    reasons = {
        f"stage {document.stage} (allowed: 1, 2)": document.stage in (0, 3),
        "bf16, stage 1 and accumulation in fp32 (allowed: stage 2)": document.chooses_bf16_optimizer,
        "offload_optimizer": bool(document.offload("offload_optimizer")),
        f"gradient_clipping {show(clipping)}{given} (allowed: 0)": clipping is not None and clipping > 0,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None and document.truth(*_NORM, default=True) is False and document.stage is not None:
        yield finding(_NORM, f"false is refused with {reason}", "true, or change the other setting")


_NORM = (ZERO, "compute_grad_norm")


@rule("DSC334", "error")
def unmanaged_accumulation(document: Document, context: Context) -> Findings:
    """managed_gradient_accumulation is false with overlap_comm below stage 2, DeepCompile, or a pipeline.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Proof: raises supports ZeRO overlap_comm only with ZeRO stage 2
    """
    others = {
        "overlap_comm below stage 2": document.is_true(ZERO, "overlap_comm") and document.stage in (0, 1),
        "DeepCompile": document.is_true("compile", "deepcompile"),
        "a pipeline": is_pipelined(document, context),
    }
    managed = document.get("managed_gradient_accumulation", default=True) is not False
    for other in (name for name, is_used in others.items() if is_used and not managed):
        yield finding(("managed_gradient_accumulation",), f"false is refused with {other}", "true")


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
