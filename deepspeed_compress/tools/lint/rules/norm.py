"""What the reduction leaves out: the norm of gradients, managed accumulation, full precision."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, unproved
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

_FAMILY = "reduction"


def _no_norm(document: Document) -> bool:
    return truth(document.get(ZERO, "compute_grad_norm", default=True)) is False


_NORM = (ZERO, "compute_grad_norm")


def _norm_stage(document: Document, context: Context) -> Iterator[Hit]:
    if _no_norm(document) and stage(document) in (0, 3):
        what = f"false is refused with stage {stage(document)} (allowed: with stages 1 and 2)"
        yield Hit(_NORM, what, "true, or stage 1 or 2")


def _norm_with_others(document: Document) -> bool:
    """Whether the norm is left out, where that is possible."""
    return _no_norm(document) and stage(document) in (1, 2)


def _wide_bf16(document: Document) -> bool:
    wide = document.get("data_types", "grad_accum_dtype") in ("fp32", "float32", "float", "torch.float32")
    return stage(document) == 1 and wide and bf16(document) and offload(document, "offload_optimizer") != "cpu"


def _norm_clipping(document: Document, context: Context) -> Iterator[Hit]:
    clipping = number(document.get("gradient_clipping", default=1.0))
    if _norm_with_others(document) and clipping is not None and clipping > 0 and not _wide_bf16(document):
        given = "" if document.has("gradient_clipping") else ", its default"
        what = f"false needs gradient_clipping 0, and it is {show(clipping)}{given}"
        yield Hit(_NORM, what, '"gradient_clipping": 0 besides, or true')


def _norm_bf16(document: Document, context: Context) -> Iterator[Hit]:
    if _norm_with_others(document) and _wide_bf16(document):
        what = "false is refused with bf16, stage 1 and accumulation in fp32"
        yield Hit(_NORM, what, "true, or stage 2")


def _norm_offload(document: Document, context: Context) -> Iterator[Hit]:
    if _norm_with_others(document) and offload(document, "offload_optimizer"):
        yield Hit(_NORM, "false is refused with offload_optimizer", "true")


def _managed(document: Document) -> bool:
    return document.get("managed_gradient_accumulation", default=True) is not False


_MANAGED = ("managed_gradient_accumulation",)


def _unmanaged_overlap(document: Document, context: Context) -> Iterator[Hit]:
    if not _managed(document) and is_true(document, ZERO, "overlap_comm") and stage(document) in (0, 1):
        what = "false is refused with overlap_comm below stage 2"
        yield Hit(_MANAGED, what, 'true, or "overlap_comm": false')


def _unmanaged_compile(document: Document, context: Context) -> Iterator[Hit]:
    if not _managed(document) and is_true(document, "compile", "deepcompile"):
        yield Hit(_MANAGED, "false is refused with DeepCompile", "true")


def _qgz_stage(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if is_true(document, ZERO, key) and stage(document) in (0, 1, 2):
            ours = 'the section "deepspeed_compress", which compresses with every stage'
            what = f"true has no effect with stage {stage(document)} (useful: with stage 3)"
            yield Hit((ZERO, key), what, ours if key == "zero_quantized_gradients" else "stage 3, or false")


def _qgz_one_node(document: Document, context: Context) -> Iterator[Hit]:
    nodes = context.world_size is not None and context.world_size == context.ranks_per_node
    if is_true(document, ZERO, "zero_quantized_gradients") and stage(document) == 3 and nodes:
        what = "true quantizes twice for the way between nodes, and there is one node only (useful: with several)"
        yield Hit((ZERO, "zero_quantized_gradients"), what, "false")


RULES = (
    Rule(
        "DSC330",
        "no-grad-norm-stage",
        "error",
        _FAMILY,
        "compute_grad_norm is false without ZeRO 1 or 2.",
        "Checked when the configuration is read (runtime/zero/config.py).",
        zero(3, compute_grad_norm=False, also={"gradient_clipping": 0}),
        zero(2, compute_grad_norm=False, also={"gradient_clipping": 0}),
        _norm_stage,
        raises("supported only with ZeRO Stage 1 or 2"),
    ),
    Rule(
        "DSC331",
        "no-grad-norm-with-clipping",
        "error",
        _FAMILY,
        "compute_grad_norm is false while gradients are clipped.",
        "gradient_clipping is 1.0 where it is not given (runtime/constants.py), so that it must be set to 0 "
        "(runtime/zero/stage_1_and_2.py).",
        zero(2, compute_grad_norm=False),
        zero(2, compute_grad_norm=False, also={"gradient_clipping": 0}),
        _norm_clipping,
        raises("requires gradient_clipping=0"),
    ),
    Rule(
        "DSC332",
        "no-grad-norm-bf16-optimizer",
        "error",
        _FAMILY,
        "compute_grad_norm is false with bf16, stage 1 and accumulation in fp32.",
        "This combination chooses BF16_Optimizer, which needs the norm (runtime/engine.py).",
        zero(
            1,
            compute_grad_norm=False,
            also={"gradient_clipping": 0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        ),
        zero(
            2,
            compute_grad_norm=False,
            also={"gradient_clipping": 0, "bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        ),
        _norm_bf16,
        raises("does not support ZeRO Stage 1 with BF16"),
    ),
    Rule(
        "DSC333",
        "no-grad-norm-with-offload",
        "error",
        _FAMILY,
        "compute_grad_norm is false with offload_optimizer.",
        "The offloading optimizer uses the norm (runtime/zero/stage_1_and_2.py).",
        zero(2, compute_grad_norm=False, offload_optimizer={"device": "cpu"}, also={"gradient_clipping": 0}),
        zero(2, offload_optimizer={"device": "cpu"}, also={"gradient_clipping": 0}),
        _norm_offload,
        raises("does not support optimizer offload"),
    ),
    Rule(
        "DSC334",
        "unmanaged-with-overlap",
        "error",
        _FAMILY,
        "managed_gradient_accumulation is false with overlap_comm below stage 2.",
        "Asserted by the engine (runtime/engine.py).",
        zero(1, overlap_comm=True, also={"managed_gradient_accumulation": False}),
        zero(2, overlap_comm=True, also={"managed_gradient_accumulation": False}),
        _unmanaged_overlap,
        raises("supports ZeRO overlap_comm only with ZeRO stage 2"),
    ),
    Rule(
        "DSC335",
        "unmanaged-with-deepcompile",
        "error",
        _FAMILY,
        "managed_gradient_accumulation is false with DeepCompile.",
        "Asserted by the engine (runtime/engine.py).",
        config(managed_gradient_accumulation=False, compile={"deepcompile": True}),
        config(compile={"deepcompile": True}),
        _unmanaged_compile,
        raises("is not supported with DeepCompile"),
    ),
    Rule(
        "DSC336",
        "quantized-communication-without-stage-3",
        "warning",
        _FAMILY,
        "ZeRO++ quantization has no effect below stage 3; the section deepspeed_compress works with every stage.",
        "Only the optimizer of stage 3 is given these settings (runtime/engine.py).",
        zero(1, zero_quantized_gradients=True),
        zero(1, also={"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}),
        _qgz_stage,
        accepts("gradients travel uncompressed"),
    ),
    Rule(
        "DSC337",
        "quantized-gradients-on-one-node",
        "warning",
        _FAMILY,
        "zero_quantized_gradients on a single node.",
        "The two-step all-to-all of ZeRO++ (runtime/comm/coalesced_collectives.py) saves traffic between nodes only.",
        zero(3, zero_quantized_gradients=True, also={"bf16": {"enabled": True}}),
        zero(3, also={"bf16": {"enabled": True}}),
        _qgz_one_node,
        unproved("its kernels are for GPUs"),
        {"world_size": 2, "ranks_per_node": 2},
    ),
)
