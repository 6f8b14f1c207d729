"""Rules on tensor and expert parallelism."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, at, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, warns
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    config,
    integer,
    listed,
    section,
    show,
    tensor_size,
    trained,
)

_SIZE = ("tensor_parallel", "autotp_size")
_TP_SIZE = ("tensor_parallel", "tp", "tp_size")
_MODEL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_TWO: Mapping[str, Any] = {"world_size": 2, "model": _MODEL}
_MICRO = {"train_micro_batch_size_per_gpu": 1}


def _native_size(document: Document) -> int:
    return max(integer(document.get(*_SIZE)) or 1, 1)


@rule(
    code="DSC620",
    name="tensor-divides-world",
    severity="error",
    family="tensor",
    summary="autotp_size does not divide the number of ranks.",
    reason="The groups of tensor parallelism must all have this size (utils/groups.py).",
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 3}),
    proof=raises("Error"),
    context={"world_size": 3, "model": {"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 6}},
)
def tensor_divides_world(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, world = _native_size(document), context.world_size
    if world is not None and world % size:
        yield Diagnostic(at(*_SIZE), f"{size} does not divide {world} ranks", write(f"a divisor of {world}"))


@rule(
    code="DSC621",
    name="tensor-crosses-nodes",
    severity="warning",
    family="tensor",
    summary="A tensor-parallel group does not fit into a node.",
    reason=(
        "Tensor parallelism sums activations in every layer: behind each matrix that is split by rows in the forward "
        "pass, and in front of each that is split by columns in the backward pass (module_inject/layers.py). Those are "
        "2 and 5 sums in a layer of Llama. Only the links inside a node are fast enough."
    ),
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
    proof=accepts("each layer waits for the network"),
    context={"world_size": 2, "ranks_per_node": 1, "model": _MODEL},
)
def tensor_crosses_nodes(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, node = tensor_size(document), context.ranks_per_node
    if node is not None and size > 1 and (size > node or node % size):
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} ranks share each layer, but a node has {node}: activations cross the network in every layer"
        yield Diagnostic(at(*where), what, write(f"a divisor of {node}"))


@rule(
    code="DSC622",
    name="tensor-size-conflict",
    severity="error",
    family="tensor",
    summary="tensor_parallel.tp.tp_size contradicts autotp_size.",
    reason="Checked by the engine (runtime/engine.py).",
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 4}}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 2}}),
    proof=raises("does not match tensor_parallel.autotp_size"),
    context=_TWO,
)
def tensor_size_conflict(document: Document, context: Context) -> Iterator[Diagnostic]:
    size, other = _native_size(document), integer(document.get(*_TP_SIZE))
    if size > 1 and other is not None and other not in (1, size):
        yield Diagnostic(at(*_TP_SIZE), f"{other} contradicts autotp_size {size}", write(f"{size}, or remove the key"))


@rule(
    code="DSC623",
    name="tensor-size-ignored",
    severity="warning",
    family="tensor",
    summary="tensor_parallel.tp.tp_size without autotp_size.",
    reason="Training looks at autotp_size alone (runtime/engine.py); tp_size is for inference.",
    wrong=trained(**_MICRO, tensor_parallel={"tp": {"tp_size": 2}}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
    proof=accepts("every rank holds the whole model"),
    context=_TWO,
)
def tensor_size_ignored(document: Document, context: Context) -> Iterator[Diagnostic]:
    other = integer(document.get(*_TP_SIZE))
    if other is not None and other > 1 and tensor_size(document) == 1:
        what = f"{other} has no effect in training, where autotp_size counts"
        yield Diagnostic(at(*_TP_SIZE), what, write(f'"autotp_size": {other} in tensor_parallel'))


def _heads(model: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Return the numbers of attention heads and of key-value heads."""
    config = model or {}
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    heads = integer(config.get("num_attention_heads", config.get("n_head")))
    return heads, integer(config.get("num_key_value_heads", heads))


@rule(
    code="DSC624",
    name="tensor-exceeds-kv-heads",
    severity="warning",
    family="tensor",
    summary="More tensor-parallel ranks than key-value heads.",
    reason="Ranks beyond the number of heads get no part of the attention; the engine warns (runtime/engine.py).",
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 3}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
    proof=warns("exceeds the model's key-value head count"),
    context={"world_size": 3, "model": _MODEL},
)
def tensor_exceeds_kv_heads(document: Document, context: Context) -> Iterator[Diagnostic]:
    heads, size = _heads(context.model)[1], tensor_size(document)
    if heads is not None and size > heads:
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} is more than the {heads} key-value heads of the model: some ranks get no attention"
        yield Diagnostic(at(*where), what, write(f"{heads} or less"))


@rule(
    code="DSC625",
    name="tensor-divides-heads",
    severity="warning",
    family="tensor",
    summary="autotp_size does not divide the number of heads.",
    reason="Heads are dealt out whole (module_inject/tp_shard.py), so that some ranks have more of them than others.",
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
    proof=accepts("the ranks with most heads decide the speed"),
    context={"world_size": 2, "model": {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}},
)
def tensor_divides_heads(document: Document, context: Context) -> Iterator[Diagnostic]:
    (heads, kv_heads), size = _heads(context.model), tensor_size(document)
    uneven = [count for count in (heads, kv_heads) if count and count % size]
    if uneven and kv_heads is not None and size <= kv_heads:
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} does not divide the {uneven[0]} heads of the model: the ranks get unequal parts"
        yield Diagnostic(at(*where), what, write(f"a divisor of {uneven[0]}"))


@rule(
    code="DSC626",
    name="tensor-dtype-in-file",
    severity="error",
    family="tensor",
    summary="tensor_parallel.dtype cannot be given in a file.",
    reason="The field is a torch.dtype (runtime/tensor_parallel/config.py), and text is refused.",
    wrong=trained(**_MICRO, tensor_parallel={"autotp_size": 2, "dtype": "bf16"}),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 2}, bf16={"enabled": True}),
    proof=raises("is_instance_of"),
    context=_TWO,
)
def tensor_dtype_in_file(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("tensor_parallel", "dtype")
    value = document.get(*path)
    if document.has(*path) and value != AUTO:
        what = f"{show(value)} is refused: the key takes a torch.dtype, which a file cannot hold"
        yield Diagnostic(at(*path), what, write("nothing: remove the key; bf16 and fp16 choose the format"))


@rule(
    code="DSC627",
    name="liger-without-parallel-head",
    severity="error",
    family="tensor",
    summary="The Liger cross-entropy without a vocabulary-parallel head.",
    reason="Checked by the engine (runtime/engine.py).",
    wrong=trained(
        **_MICRO,
        tensor_parallel={
            "autotp_size": 2,
            "vocab_parallel_ce_backend": "liger",
            "vocab_parallel_lm_head": False,
        },
    ),
    right=trained(**_MICRO, tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": False}),
    proof=raises("requires a no-gather vocabulary-parallel LM head"),
    context=_TWO,
)
def liger_without_parallel_head(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("tensor_parallel", "vocab_parallel_ce_backend")
    head = document.get("tensor_parallel", "vocab_parallel_lm_head")
    if document.get(*path) == "liger" and head is False:
        yield Diagnostic(
            at(*path), '"liger" without a vocabulary-parallel head', write('"torch", or "vocab_parallel_lm_head": true')
        )


@rule(
    code="DSC640",
    name="experts-divide-world",
    severity="error",
    family="tensor",
    summary="expert_parallel.autoep_size does not divide the number of ranks.",
    reason="Checked by the engine (module_inject/auto_ep_config.py).",
    wrong=config(train_batch_size=3, expert_parallel={"enabled": True, "autoep_size": 2}),
    right=config(train_batch_size=3, expert_parallel={"enabled": False, "autoep_size": 2}),
    proof=raises("must divide the stage size"),
    context={"world_size": 3},
)
def experts_divide_world(document: Document, context: Context) -> Iterator[Diagnostic]:
    experts, world = section(document, "expert_parallel"), context.world_size
    size = integer(experts.get("autoep_size", 1))
    width = integer(experts.get("expert_tensor_parallel_size", 1))
    if experts.get("enabled") is not True or size is None or width is None or world is None:
        return
    if size < 1 or width < 1 or world % (size * width):
        product = f"{size} x expert_tensor_parallel_size {width}" if width != 1 else str(size)
        yield Diagnostic(
            at("expert_parallel", "autoep_size"),
            f"{product} does not divide {world} ranks",
            write(f"a divisor of {world}"),
        )


@rule(
    code="DSC641",
    name="expert-load-balance",
    severity="error",
    family="tensor",
    summary="expert_parallel.load_balance_coeff is not null.",
    reason="Refused even if expert parallelism is disabled (module_inject/auto_ep_config.py).",
    wrong=config(expert_parallel={"enabled": False, "load_balance_coeff": 0.01}),
    right=config(expert_parallel={"enabled": False, "load_balance_coeff": None}),
    proof=raises("load_balance_coeff=0.01 is not supported"),
)
def expert_load_balance(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("expert_parallel", "load_balance_coeff")
    value = document.get(*path)
    if value is not None:
        correction = fix("Write null", replace(document, path, None), safe=False)
        yield Diagnostic(at(*path), f"{show(value)} is not supported (allowed: null)", write("null"), fix=correction)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "score_apply": ("auto", "pre", "post"),
    "combine_impl": ("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": ("auto", "eager", "fused"),
    "gate_up_impl": ("separate", "fused"),
    "comm_backend": ("comm", "deepep"),
}


@rule(
    code="DSC642",
    name="expert-choice",
    severity="error",
    family="tensor",
    summary="A word in expert_parallel that DeepSpeed does not know.",
    reason="Checked by the engine (module_inject/auto_ep_config.py).",
    wrong=config(expert_parallel={"enabled": True, "score_apply": "before"}),
    right=config(expert_parallel={"enabled": False, "score_apply": "pre"}),
    proof=raises("score_apply must be one of"),
)
def expert_choice(document: Document, context: Context) -> Iterator[Diagnostic]:
    experts = section(document, "expert_parallel")
    for key, allowed in _CHOICES.items() if experts.get("enabled") is True else ():
        if key in experts and experts[key] not in allowed:
            what = f"{show(experts[key])} is not known (allowed: {listed(allowed)})"
            yield Diagnostic(at("expert_parallel", key), what, write(f'"{allowed[0]}"'))
