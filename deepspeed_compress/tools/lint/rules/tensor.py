"""Rules on tensor and expert parallelism."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import corrected, finding, text_model, unknown_parameter, unknown_word
from deepspeed_compress.tools.lint.values import AUTO, integer, listed, name, show

_SIZE = ("tensor_parallel", "autotp_size")
_TP_SIZE = ("tensor_parallel", "tp", "tp_size")


def _size_path(document: Document) -> Path:
    """Return the path of the tensor-parallel size: DeepSpeed's own key, or the one in our section."""
    return _SIZE if document.has(*_SIZE) else (OUR_SECTION, "parallelism", "tensor")


def _native_size(document: Document) -> int:
    return max(document.integer(*_SIZE) or 1, 1)


@rule("DSC620", "error")
def tensor_divides_world(document: Document, context: Context) -> Findings:
    """autotp_size does not divide the number of ranks.

    All groups of tensor parallelism must have this size (utils/groups.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 3}}
    Context: {"world_size": 3, "model": {"hidden_size": 12, "num_attention_heads": 6, "num_key_value_heads": 6}}
    Proof: raises Error
    """
    size, world = _native_size(document), context.world_size
    if world is not None and world % size:
        yield finding(_SIZE, f"{size} does not divide {world} ranks", f"a divisor of {world}")


@rule("DSC621", "warning")
def tensor_crosses_nodes(document: Document, context: Context) -> Findings:
    """A tensor-parallel group does not fit into a node.

    Tensor parallelism sums activations in every layer: after each matrix that is split by rows in the forward pass, and
    before each that is split by columns in the backward pass (module_inject/layers.py). These are 2 and 5 sums in a
    layer of Llama. Only the links inside a node are fast enough for them.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 1}}
    Context: {"world_size": 2, "ranks_per_node": 1,
        "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts each layer waits for the network
    """
    size, node = document.tensor_size, context.ranks_per_node
    if node is not None and size > 1 and (size > node or node % size):
        what = f"{size} ranks share each layer, but a node has {node}: activations cross the network in every layer"
        yield finding(_size_path(document), what, f"a divisor of {node}")


@rule("DSC622", "error")
def tensor_size_conflict(document: Document, context: Context) -> Findings:
    """tensor_parallel.tp.tp_size contradicts autotp_size.

    Checked by the engine (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: raises does not match tensor_parallel.autotp_size
    """
    size, other = _native_size(document), document.integer(*_TP_SIZE)
    if size > 1 and other is not None and other not in (1, size):
        yield finding(_TP_SIZE, f"{other} contradicts autotp_size {size}", f"{size}, or remove the key")


@rule("DSC623", "warning")
def tensor_size_ignored(document: Document, context: Context) -> Findings:
    """tensor_parallel.tp.tp_size has no effect without autotp_size.

    Training reads only autotp_size (runtime/engine.py). tp_size is for inference.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"tp": {"tp_size": 2}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts every rank holds the whole model
    """
    other = document.integer(*_TP_SIZE)
    if other is not None and other > 1 and document.tensor_size == 1:
        what = f"{other} has no effect in training, which uses autotp_size"
        yield finding(_TP_SIZE, what, f'"autotp_size": {other} in tensor_parallel')


def _heads(model: Mapping[str, Any] | None) -> tuple[int | None, int | None]:
    """Return the numbers of attention heads and of key-value heads."""
    config = text_model(model)
    heads = integer(config.get("num_attention_heads", config.get("n_head")))
    return heads, integer(config.get("num_key_value_heads", heads))


@rule("DSC624", "warning")
def tensor_exceeds_kv_heads(document: Document, context: Context) -> Findings:
    """There are more tensor-parallel ranks than key-value heads.

    Ranks beyond the number of heads get no part of the attention. The engine warns (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 3}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 1}}
    Context: {"world_size": 3, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: warns exceeds the model's key-value head count
    """
    heads, size = _heads(context.model)[1], document.tensor_size
    if heads is not None and size > heads:
        what = f"{size} is more than the {heads} key-value heads of the model: some ranks get no attention heads"
        yield finding(_size_path(document), what, f"{heads} or less")


@rule("DSC625", "warning")
def tensor_divides_heads(document: Document, context: Context) -> Findings:
    """autotp_size does not divide the number of heads.

    Heads are not split (module_inject/tp_shard.py), so some ranks have more of them than others.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 1}}
    Context: {"world_size": 2, "model": {"hidden_size": 12, "num_attention_heads": 3, "num_key_value_heads": 3}}
    Proof: accepts the ranks with the most heads determine the speed
    """
    (heads, kv_heads), size = _heads(context.model), document.tensor_size
    uneven = [count for count in (heads, kv_heads) if count and count % size]
    if uneven and kv_heads is not None and size <= kv_heads:
        what = f"{size} does not divide the {uneven[0]} heads of the model: the ranks get unequal parts"
        yield finding(_size_path(document), what, f"a divisor of {uneven[0]}")


@rule("DSC626", "error")
def tensor_dtype_in_file(document: Document, context: Context) -> Findings:
    """tensor_parallel.dtype cannot be given in a file.

    The field must be a torch.dtype (runtime/tensor_parallel/config.py), so text is refused.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "dtype": "bf16"}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}, "bf16": {"enabled": true}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: raises is_instance_of
    """
    path = ("tensor_parallel", "dtype")
    value = document.get(*path)
    if document.has(*path) and value != AUTO:
        what = f"{show(value)} is refused: the key takes a torch.dtype, which a file cannot hold"
        yield finding(path, what, "nothing: remove the key; bf16 and fp16 choose the format")


@rule("DSC627", "error")
def liger_without_parallel_head(document: Document, context: Context) -> Findings:
    """The Liger cross-entropy is used without a vocabulary-parallel head.

    Checked by the engine (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_ce_backend": "liger", "vocab_parallel_lm_head": false}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "vocab_parallel_lm_head": false}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: raises requires a no-gather vocabulary-parallel LM head
    """
    path = ("tensor_parallel", "vocab_parallel_ce_backend")
    head = document.get("tensor_parallel", "vocab_parallel_lm_head")
    if document.get(*path) == "liger" and head is False:
        yield finding(path, '"liger" without a vocabulary-parallel head', '"torch", or "vocab_parallel_lm_head": true')


_PARTITION = ("tensor_parallel", "partition_config")
_PARTITION_KEYS = frozenset(
    {"tp_size", "layer_specs", "embedding_partition_dim", "lm_head_patterns", "use_default_specs", "strict_mode"}
)
_SPEC_KEYS = frozenset(
    {"patterns", "partition_type", "gather_output", "grad_allreduce", "shape", "partition_dim", "model_types"}
)
_PARTITION_TYPES: Mapping[str, str] = {"column": "", "row": "", "skip": ""}


def _layer_specs(document: Document) -> list[Path]:
    """Return the paths of the layer specifications for AutoTP, which DeepSpeed reads only with autotp_size above 1."""
    specs = document.get(*_PARTITION, "layer_specs")
    if _native_size(document) == 1 or not isinstance(specs, list):
        return []
    return [(*_PARTITION, "layer_specs", number) for number, spec in enumerate(specs) if isinstance(spec, dict)]


@rule("DSC628", "error")
def tensor_partition_type(document: Document, context: Context) -> Findings:
    """The partition_type of a layer specification is not column, row or skip.

    The engine refuses another word at the start (module_inject/autotp_config.py). A value that is not text matches none
    of the three, without a message.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [
        {"patterns": [".*o_proj.*"], "partition_type": "colum"}]}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [
        {"patterns": [".*o_proj.*"], "partition_type": "column"}]}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: raises 'colum' is not a valid PartitionType
    """
    for spec in _layer_specs(document):
        path = (*spec, "partition_type")
        value = document.get(*path, default="column")
        if not isinstance(value, str) or value.lower() not in _PARTITION_TYPES:
            what = f"{show(value)} is not a way to divide a layer (allowed: {listed(tuple(_PARTITION_TYPES))})"
            yield unknown_word(document, path, _PARTITION_TYPES, what, '"column", "row" or "skip"')


@rule("DSC629", "warning")
def tensor_partition_key_ignored(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know a key in partition_config, and ignores it.

    It takes the keys that it knows, and defaults for the others (module_inject/autotp_config.py): without
    partition_type, a layer is divided by columns.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [
        {"patterns": [".*o_proj.*"], "partition_typ": "row"}]}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "partition_config": {"use_default_specs": false, "layer_specs": [
        {"patterns": [".*o_proj.*"], "partition_type": "row"}]}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts the layer is divided in the default way
    """
    known = dict.fromkeys(_layer_specs(document), _SPEC_KEYS)
    for holder, names in {_PARTITION: _PARTITION_KEYS, **known}.items() if _native_size(document) > 1 else ():
        for key in document.section(*holder):
            if key not in names:
                what = f'"{key}" is not a key of {name(holder)}, and has no effect'
                yield unknown_parameter(document, (*holder, key), names, what)


@rule("DSC640", "error")
def experts_divide_world(document: Document, context: Context) -> Findings:
    """expert_parallel.autoep_size does not divide the number of ranks.

    Checked by the engine (module_inject/auto_ep_config.py).

    Wrong: {"train_batch_size": 3, "expert_parallel": {"enabled": true, "autoep_size": 2}}
    Right: {"train_batch_size": 3, "expert_parallel": {"enabled": false, "autoep_size": 2}}
    Context: {"world_size": 3}
    Proof: raises must divide the stage size
    """
    experts, world = document.section("expert_parallel"), context.world_size
    size = integer(experts.get("autoep_size", 1))
    width = integer(experts.get("expert_tensor_parallel_size", 1))
    if experts.get("enabled") is not True or size is None or width is None or world is None:
        return
    if size < 1 or width < 1 or world % (size * width):
        product = f"{size} x expert_tensor_parallel_size {width}" if width != 1 else str(size)
        what = f"{product} does not divide {world} ranks"
        yield finding(("expert_parallel", "autoep_size"), what, f"a divisor of {world}")


@rule("DSC641", "error")
def expert_load_balance(document: Document, context: Context) -> Findings:
    """expert_parallel.load_balance_coeff is not null.

    DeepSpeed refuses it even if expert parallelism is disabled (module_inject/auto_ep_config.py).

    Wrong: {"train_batch_size": 8, "expert_parallel": {"enabled": false, "load_balance_coeff": 0.01}}
    Right: {"train_batch_size": 8, "expert_parallel": {"enabled": false, "load_balance_coeff": null}}
    Proof: raises load_balance_coeff=0.01 is not supported
    """
    path = ("expert_parallel", "load_balance_coeff")
    value = document.get(*path)
    if value is not None:
        what = f"{show(value)} is not supported (allowed: null)"
        yield corrected(document, path, what, None, "Write null", safe=False)


_CHOICES: Mapping[str, tuple[str, ...]] = {
    "score_apply": ("auto", "pre", "post"),
    "combine_impl": ("auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm"),
    "row_weighting_impl": ("auto", "eager", "fused"),
    "gate_up_impl": ("separate", "fused"),
    "comm_backend": ("comm", "deepep"),
}


@rule("DSC642", "error")
def expert_choice(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know a word in expert_parallel.

    Checked by the engine (module_inject/auto_ep_config.py).

    Wrong: {"train_batch_size": 8, "expert_parallel": {"enabled": true, "score_apply": "before"}}
    Right: {"train_batch_size": 8, "expert_parallel": {"enabled": false, "score_apply": "pre"}}
    Proof: raises score_apply must be one of
    """
    experts = document.section("expert_parallel")
    for key, allowed in _CHOICES.items() if experts.get("enabled") is True else ():
        if key in experts and experts[key] not in allowed:
            what = f"{show(experts[key])} is not known (allowed: {listed(allowed)})"
            yield finding(("expert_parallel", key), what, f'"{allowed[0]}"')
