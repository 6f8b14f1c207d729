"""Tensor and expert parallelism."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, warns
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

_FAMILY = "tensor"
_SIZE = ("tensor_parallel", "autotp_size")
_TP_SIZE = ("tensor_parallel", "tp", "tp_size")
_MODEL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
_TWO: Mapping[str, Any] = {"world_size": 2, "model": _MODEL}
_MICRO = {"train_micro_batch_size_per_gpu": 1}


def _native_size(document: Document) -> int:
    return max(integer(document.get(*_SIZE)) or 1, 1)


def _world(document: Document, context: Context) -> Iterator[Hit]:
    size, world = _native_size(document), context.world_size
    if world is not None and world % size:
        yield Hit(_SIZE, f"{size} does not divide {world} ranks", f"a divisor of {world}")


def _node(document: Document, context: Context) -> Iterator[Hit]:
    size, node = tensor_size(document), context.ranks_per_node
    if node is not None and size > 1 and (size > node or node % size):
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} ranks share each layer, but a node has {node}: activations cross the network in every layer"
        yield Hit(where, what, f"a divisor of {node}")


def _conflict(document: Document, context: Context) -> Iterator[Hit]:
    size, other = _native_size(document), integer(document.get(*_TP_SIZE))
    if size > 1 and other is not None and other not in (1, size):
        yield Hit(_TP_SIZE, f"{other} contradicts autotp_size {size}", f"{size}, or remove the key")


def _alone(document: Document, context: Context) -> Iterator[Hit]:
    other = integer(document.get(*_TP_SIZE))
    if other is not None and other > 1 and tensor_size(document) == 1:
        what = f"{other} has no effect in training, where autotp_size counts"
        yield Hit(_TP_SIZE, what, f'"autotp_size": {other} in tensor_parallel')


def _heads(model: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Attention heads and key-value heads."""
    config = model or {}
    text = config.get("text_config")
    config = text if isinstance(text, dict) else config
    heads = integer(config.get("num_attention_heads", config.get("n_head")))
    return heads, integer(config.get("num_key_value_heads", heads))


def _kv_heads(document: Document, context: Context) -> Iterator[Hit]:
    heads, size = _heads(context.model)[1], tensor_size(document)
    if heads is not None and size > heads:
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} is more than the {heads} key-value heads of the model: some ranks get no attention"
        yield Hit(where, what, f"{heads} or less")


def _uneven(document: Document, context: Context) -> Iterator[Hit]:
    (heads, kv_heads), size = _heads(context.model), tensor_size(document)
    uneven = [count for count in (heads, kv_heads) if count and count % size]
    if uneven and kv_heads is not None and size <= kv_heads:
        where = _SIZE if document.has(*_SIZE) else ("deepspeed_compress", "parallelism", "tensor")
        what = f"{size} does not divide the {uneven[0]} heads of the model: the ranks get unequal parts"
        yield Hit(where, what, f"a divisor of {uneven[0]}")


def _dtype(document: Document, context: Context) -> Iterator[Hit]:
    path = ("tensor_parallel", "dtype")
    value = document.get(*path)
    if document.has(*path) and value != AUTO:
        what = f"{show(value)} is refused: the key takes a torch.dtype, which a file cannot hold"
        yield Hit(path, what, "nothing: remove the key; bf16 and fp16 choose the format")


def _liger(document: Document, context: Context) -> Iterator[Hit]:
    path = ("tensor_parallel", "vocab_parallel_ce_backend")
    head = document.get("tensor_parallel", "vocab_parallel_lm_head")
    if document.get(*path) == "liger" and head is False:
        yield Hit(path, '"liger" without a vocabulary-parallel head', '"torch", or "vocab_parallel_lm_head": true')


def _experts(document: Document, context: Context) -> Iterator[Hit]:
    experts, world = section(document, "expert_parallel"), context.world_size
    size = integer(experts.get("autoep_size", 1))
    width = integer(experts.get("expert_tensor_parallel_size", 1))
    if experts.get("enabled") is not True or size is None or width is None or world is None:
        return
    if size < 1 or width < 1 or world % (size * width):
        product = f"{size} x expert_tensor_parallel_size {width}" if width != 1 else str(size)
        yield Hit(
            ("expert_parallel", "autoep_size"), f"{product} does not divide {world} ranks", f"a divisor of {world}"
        )


def _balance(document: Document, context: Context) -> Iterator[Hit]:
    path = ("expert_parallel", "load_balance_coeff")
    value = document.get(*path)
    if value is not None:
        correction = fix("Write null", replace(document, path, None), safe=False)
        yield Hit(path, f"{show(value)} is not supported (allowed: null)", "null", fix=correction)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "score_apply": ("auto", "pre", "post"),
    "combine_impl": ("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": ("auto", "eager", "fused"),
    "gate_up_impl": ("separate", "fused"),
    "comm_backend": ("comm", "deepep"),
}


def _expert_choices(document: Document, context: Context) -> Iterator[Hit]:
    experts = section(document, "expert_parallel")
    for key, allowed in _CHOICES.items() if experts.get("enabled") is True else ():
        if key in experts and experts[key] not in allowed:
            what = f"{show(experts[key])} is not known (allowed: {listed(allowed)})"
            yield Hit(("expert_parallel", key), what, f'"{allowed[0]}"')


RULES = (
    Rule(
        "DSC620",
        "tensor-divides-world",
        "error",
        _FAMILY,
        "autotp_size does not divide the number of ranks.",
        "The groups of tensor parallelism must all have this size (utils/groups.py).",
        trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 3}),
        _world,
        raises("Error"),
        {"world_size": 3, "model": {"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 6}},
    ),
    Rule(
        "DSC621",
        "tensor-crosses-nodes",
        "warning",
        _FAMILY,
        "A tensor-parallel group does not fit into a node.",
        "Tensor parallelism sums activations twice a layer, forward and backward (module_inject/layers.py); only the "
        "links inside a node are fast enough.",
        trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
        _node,
        accepts("each layer waits for the network"),
        {"world_size": 2, "ranks_per_node": 1, "model": _MODEL},
    ),
    Rule(
        "DSC622",
        "tensor-size-conflict",
        "error",
        _FAMILY,
        "tensor_parallel.tp.tp_size contradicts autotp_size.",
        "Checked by the engine (runtime/engine.py).",
        trained(**_MICRO, tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 4}}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 2, "tp": {"tp_size": 2}}),
        _conflict,
        raises("does not match tensor_parallel.autotp_size"),
        _TWO,
    ),
    Rule(
        "DSC623",
        "tensor-size-ignored",
        "warning",
        _FAMILY,
        "tensor_parallel.tp.tp_size without autotp_size.",
        "Training looks at autotp_size alone (runtime/engine.py); tp_size is for inference.",
        trained(**_MICRO, tensor_parallel={"tp": {"tp_size": 2}}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
        _alone,
        accepts("every rank holds the whole model"),
        _TWO,
    ),
    Rule(
        "DSC624",
        "tensor-exceeds-kv-heads",
        "warning",
        _FAMILY,
        "More tensor-parallel ranks than key-value heads.",
        "Ranks beyond the number of heads get no part of the attention; the engine warns (runtime/engine.py).",
        trained(**_MICRO, tensor_parallel={"autotp_size": 3}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
        _kv_heads,
        warns("exceeds the model's key-value head count"),
        {"world_size": 3, "model": _MODEL},
    ),
    Rule(
        "DSC625",
        "tensor-divides-heads",
        "warning",
        _FAMILY,
        "autotp_size does not divide the number of heads.",
        "Heads are dealt out whole (module_inject/tp_shard.py), so that some ranks have more of them than others.",
        trained(**_MICRO, tensor_parallel={"autotp_size": 2}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 1}),
        _uneven,
        accepts("the ranks with most heads decide the speed"),
        {"world_size": 2, "model": {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}},
    ),
    Rule(
        "DSC626",
        "tensor-dtype-in-file",
        "error",
        _FAMILY,
        "tensor_parallel.dtype cannot be given in a file.",
        "The field is a torch.dtype (runtime/tensor_parallel/config.py), and text is refused.",
        trained(**_MICRO, tensor_parallel={"autotp_size": 2, "dtype": "bf16"}),
        trained(**_MICRO, tensor_parallel={"autotp_size": 2}, bf16={"enabled": True}),
        _dtype,
        raises("is_instance_of"),
        _TWO,
    ),
    Rule(
        "DSC627",
        "liger-without-parallel-head",
        "error",
        _FAMILY,
        "The Liger cross-entropy without a vocabulary-parallel head.",
        "Checked by the engine (runtime/engine.py).",
        trained(
            **_MICRO,
            tensor_parallel={
                "autotp_size": 2,
                "vocab_parallel_ce_backend": "liger",
                "vocab_parallel_lm_head": False,
            },
        ),
        trained(**_MICRO, tensor_parallel={"autotp_size": 2, "vocab_parallel_lm_head": False}),
        _liger,
        raises("requires a no-gather vocabulary-parallel LM head"),
        _TWO,
    ),
    Rule(
        "DSC640",
        "experts-divide-world",
        "error",
        _FAMILY,
        "expert_parallel.autoep_size does not divide the number of ranks.",
        "Checked by the engine (module_inject/auto_ep_config.py).",
        config(train_batch_size=3, expert_parallel={"enabled": True, "autoep_size": 2}),
        config(train_batch_size=3, expert_parallel={"enabled": False, "autoep_size": 2}),
        _experts,
        raises("must divide the stage size"),
        {"world_size": 3},
    ),
    Rule(
        "DSC641",
        "expert-load-balance",
        "error",
        _FAMILY,
        "expert_parallel.load_balance_coeff is not null.",
        "Refused even if expert parallelism is disabled (module_inject/auto_ep_config.py).",
        config(expert_parallel={"enabled": False, "load_balance_coeff": 0.01}),
        config(expert_parallel={"enabled": False, "load_balance_coeff": None}),
        _balance,
        raises("load_balance_coeff=0.01 is not supported"),
    ),
    Rule(
        "DSC642",
        "expert-choice",
        "error",
        _FAMILY,
        "A word in expert_parallel that DeepSpeed does not know.",
        "Checked by the engine (module_inject/auto_ep_config.py).",
        config(expert_parallel={"enabled": True, "score_apply": "before"}),
        config(expert_parallel={"enabled": False, "score_apply": "pre"}),
        _expert_choices,
        raises("score_apply must be one of"),
    ),
)
