"""Rules on what the reduction leaves out: the gradient norm, managed accumulation, full precision."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, unproved
from deepspeed_compress.tools.lint.rules.common import (
    ZERO,
    bf16,
    config,
    is_true,
    number,
    offload,
    show,
    stage,
    truth,
    zero,
)


def _no_norm(document: Document) -> bool:
    return truth(document.get(ZERO, "compute_grad_norm", default=True)) is False


_NORM = (ZERO, "compute_grad_norm")


@rule(
    code="DSC330",
    name="no-grad-norm-stage",
    severity="error",
    family="reduction",
    summary="compute_grad_norm is false without ZeRO 1 or 2.",
    reason="Checked when the configuration is read (runtime/zero/config.py).",
    wrong=zero(3, compute_grad_norm=False, also={"gradient_clipping": 0}),
    right=zero(2, compute_grad_norm=False, also={"gradient_clipping": 0}),
    proof=raises("supported only with ZeRO Stage 1 or 2"),
)
def no_grad_norm_stage(document: Document, context: Context) -> Iterator[Diagnostic]:
    if _no_norm(document) and stage(document) in (0, 3):
        what = f"false is refused with stage {stage(document)} (allowed: with stages 1 and 2)"
        yield Diagnostic(at(*_NORM), what, write("true, or stage 1 or 2"))


def _norm_with_others(document: Document) -> bool:
    """Return True if the norm is left out with a stage that allows it."""
    return _no_norm(document) and stage(document) in (1, 2)


def _wide_bf16(document: Document) -> bool:
    wide = document.get("data_types", "grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")
    return stage(document) == 1 and wide and bf16(document) and offload(document, "offload_optimizer") != "cpu"


@rule(
    code="DSC331",
    name="no-grad-norm-with-clipping",
    severity="error",
    family="reduction",
    summary="compute_grad_norm is false while gradients are clipped.",
    reason=(
        "gradient_clipping is 1.0 where it is not given (runtime/constants.py), so that it must be set to 0 "
        "(runtime/zero/stage_1_and_2.py)."
    ),
    wrong=zero(2, compute_grad_norm=False),
    right=zero(2, compute_grad_norm=False, also={"gradient_clipping": 0}),
    proof=raises("requires gradient_clipping=0"),
)
def no_grad_norm_with_clipping(document: Document, context: Context) -> Iterator[Diagnostic]:
    clipping = number(document.get("gradient_clipping", default=1.0))
    if _norm_with_others(document) and clipping is not None and clipping > 0 and not _wide_bf16(document):
        given = "" if document.has("gradient_clipping") else ", its default"
        what = f"false needs gradient_clipping 0, and it is {show(clipping)}{given}"
        yield Diagnostic(at(*_NORM), what, write('"gradient_clipping": 0 besides, or true'))


@rule(
    code="DSC332",
    name="no-grad-norm-bf16-optimizer",
    severity="error",
    family="reduction",
    summary="compute_grad_norm is false with bf16, stage 1 and accumulation in fp32.",
    reason="This combination chooses BF16_Optimizer, which needs the norm (runtime/engine.py).",
    wrong=zero(
        1,
        compute_grad_norm=False,
        also={"gradient_clipping": 0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    right=zero(
        2,
        compute_grad_norm=False,
        also={"gradient_clipping": 0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    ),
    proof=raises("does not support ZeRO Stage 1 with BF16"),
)
def no_grad_norm_bf16_optimizer(document: Document, context: Context) -> Iterator[Diagnostic]:
    if _norm_with_others(document) and _wide_bf16(document):
        what = "false is refused with bf16, stage 1 and accumulation in fp32"
        yield Diagnostic(at(*_NORM), what, write("true, or stage 2"))


@rule(
    code="DSC333",
    name="no-grad-norm-with-offload",
    severity="error",
    family="reduction",
    summary="compute_grad_norm is false with offload_optimizer.",
    reason="The offloading optimizer uses the norm (runtime/zero/stage_1_and_2.py).",
    wrong=zero(2, compute_grad_norm=False, offload_optimizer={"device": "cpu"}, also={"gradient_clipping": 0}),
    right=zero(2, offload_optimizer={"device": "cpu"}, also={"gradient_clipping": 0}),
    proof=raises("does not support optimizer offload"),
)
def no_grad_norm_with_offload(document: Document, context: Context) -> Iterator[Diagnostic]:
    if _norm_with_others(document) and offload(document, "offload_optimizer"):
        yield Diagnostic(at(*_NORM), "false is refused with offload_optimizer", write("true"))


def _managed(document: Document) -> bool:
    return document.get("managed_gradient_accumulation", default=True) is not False


_MANAGED = ("managed_gradient_accumulation",)


@rule(
    code="DSC334",
    name="unmanaged-with-overlap",
    severity="error",
    family="reduction",
    summary="managed_gradient_accumulation is false with overlap_comm below stage 2.",
    reason="Asserted by the engine (runtime/engine.py).",
    wrong=zero(1, overlap_comm=True, also={"managed_gradient_accumulation": False}),
    right=zero(2, overlap_comm=True, also={"managed_gradient_accumulation": False}),
    proof=raises("supports ZeRO overlap_comm only with ZeRO stage 2"),
)
def unmanaged_with_overlap(document: Document, context: Context) -> Iterator[Diagnostic]:
    if not _managed(document) and is_true(document, ZERO, "overlap_comm") and stage(document) in (0, 1):
        what = "false is refused with overlap_comm below stage 2"
        yield Diagnostic(at(*_MANAGED), what, write('true, or "overlap_comm": false'))


@rule(
    code="DSC335",
    name="unmanaged-with-deepcompile",
    severity="error",
    family="reduction",
    summary="managed_gradient_accumulation is false with DeepCompile.",
    reason="Asserted by the engine (runtime/engine.py).",
    wrong=config(managed_gradient_accumulation=False, compile={"deepcompile": True}),
    right=config(compile={"deepcompile": True}),
    proof=raises("is not supported with DeepCompile"),
)
def unmanaged_with_deepcompile(document: Document, context: Context) -> Iterator[Diagnostic]:
    if not _managed(document) and is_true(document, "compile", "deepcompile"):
        yield Diagnostic(at(*_MANAGED), "false is refused with DeepCompile", write("true"))


@rule(
    code="DSC336",
    name="quantized-communication-without-stage-3",
    severity="warning",
    family="reduction",
    summary="ZeRO++ quantization has no effect below stage 3; the section deepspeed_compress works with every stage.",
    reason="Only the optimizer of stage 3 is given these settings (runtime/engine.py).",
    wrong=zero(1, zero_quantized_gradients=True),
    right=zero(1, also={"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}),
    proof=accepts("gradients travel uncompressed"),
)
def quantized_communication_without_stage_3(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if is_true(document, ZERO, key) and stage(document) in (0, 1, 2):
            ours = 'the section "deepspeed_compress", which compresses with every stage'
            what = f"true has no effect with stage {stage(document)} (useful: with stage 3)"
            yield Diagnostic(
                at(ZERO, key), what, write(ours if key == "zero_quantized_gradients" else "stage 3, or false")
            )


@rule(
    code="DSC337",
    name="quantized-gradients-on-one-node",
    severity="warning",
    family="reduction",
    summary="zero_quantized_gradients on a single node.",
    reason=(
        "The two-step all-to-all of ZeRO++ (runtime/comm/coalesced_collectives.py) saves traffic between nodes only."
    ),
    wrong=zero(3, zero_quantized_gradients=True, also={"bf16": {"enabled": True}}),
    right=zero(3, also={"bf16": {"enabled": True}}),
    proof=unproved("its kernels are for GPUs"),
    context={"world_size": 2, "ranks_per_node": 2},
)
def quantized_gradients_on_one_node(document: Document, context: Context) -> Iterator[Diagnostic]:
    nodes = context.world_size is not None and context.world_size == context.ranks_per_node
    if is_true(document, ZERO, "zero_quantized_gradients") and stage(document) == 3 and nodes:
        what = "true quantizes twice for the way between nodes, and there is one node only (useful: with several)"
        yield Diagnostic(at(ZERO, "zero_quantized_gradients"), what, write("false"))
