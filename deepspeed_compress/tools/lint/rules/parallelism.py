"""Rules on pipelines, tensor and expert parallelism.

A `pipeline` section, or stages in ours, indicate that the model is a PipelineModule.
"""

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import ZERO, Context, Findings, corrected, finding, key_finding, meant, rule
from deepspeed_compress.tools.lint.values import integer, listed, name, number, show, truth


@rule("DSC600", "error")
def pipeline_with_zero_2_or_3(document: Document, context: Context) -> Findings:
    """ZeRO 2 or 3 is used with a pipeline.

    Partitioned gradients cannot be accumulated over micro-batches (runtime/pipe/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 1, "pipeline": {"activation_checkpoint_interval": 1}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 1, "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism
    """
    # Our own section's rules compare its stages with ZeRO.
    if document.has("pipeline") and document.stage in (2, 3) and not context.hugging_face:
        what = f"stage {document.stage} does not work with pipelines (allowed: 0, 1)"
        yield finding((ZERO, "stage"), what, "1")


@rule("DSC601", "warning")
def pipeline_overlap_ignored(document: Document, context: Context) -> Findings:
    """overlap_comm has no effect with a pipeline.

    The engine turns it off and warns (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": true}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": false}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: warns Pipeline parallelism does not support overlapped communication
    """
    path = (ZERO, "overlap_comm")
    if context.is_pipelined(document) and document.is_true(*path) and document.stage == 1:
        yield corrected(document, path, "true has no effect with pipelines", False, "Write false")


@rule("DSC602", "error")
def pipeline_partition_boolean(document: Document, context: Context) -> Findings:
    """pipe_partitioned, grad_partitioned or checkpoint.parallel_write.pipeline_stage is not a boolean.

    The engine asserts a boolean, without a message (runtime/pipe/engine.py), and so does the reader of the
    configuration (runtime/config.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"pipe_partitioned": "true"}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"pipe_partitioned": true}}
    Context: {"world_size": 2}
    Proof: raises AssertionError
    """
    for path in _BOOLEANS:
        value, is_read = document.get(*path, default=True), path[0] == "checkpoint" or not context.hugging_face
        if is_read and not isinstance(value, bool):
            what, boolean = f"{show(value)} is not a boolean (allowed: true, false)", truth(value)
            correction = None if boolean is None else fix("Write a boolean", replace(document, path, boolean))
            yield finding(path, what, "true", correction)


_BOOLEANS = (
    ("pipeline", "pipe_partitioned"),
    ("pipeline", "grad_partitioned"),
    ("checkpoint", "parallel_write", "pipeline_stage"),
)


@rule("DSC603", "error")
def pipeline_interval_number(document: Document, context: Context) -> Findings:
    """pipeline.activation_checkpoint_interval is not a number.

    The engine compares it with 0 without a check (runtime/pipe/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": "1"}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises TypeError
    """
    path = ("pipeline", "activation_checkpoint_interval")
    value = document.get(*path, default=0)
    if number(value) is None and not context.hugging_face:
        whole = integer(value)
        correction = None if whole is None else fix("Write a number", replace(document, path, whole))
        yield finding(path, f"{show(value)} is not a number (allowed: 0 or more)", "1", correction)


@rule("DSC604", "error")
def pipeline_divides_world(document: Document, context: Context) -> Findings:
    """The number of stages does not divide the number of ranks.

    PipelineModule, to which the program passes the number, checks it (runtime/pipe/module.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8, "pipeline": {"stages": 3}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8, "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises must divide distributed world size
    """
    count, world = document.integer("pipeline", "stages"), context.world_size
    divides = count is None or count <= 0 or world is None or world % count == 0
    if not divides and not context.hugging_face:
        yield finding(("pipeline", "stages"), f"{count} stages do not divide {world} ranks", f"a divisor of {world}")


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

    The engine refuses two sizes, and without autotp_size, every rank holds the whole model (runtime/engine.py): tp_size
    is for inference.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 4}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2, "tp": {"tp_size": 2}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: raises does not match tensor_parallel.autotp_size
    """
    size, other = document.tensor_size, document.integer(*_TP_SIZE)
    if other is not None and other not in (1, size):
        what = f"{other} contradicts autotp_size {size}, which training uses"
        yield finding(_TP_SIZE, what, f'"autotp_size": {other} in tensor_parallel, or remove the key')


@rule("DSC624", "warning")
def tensor_divides_heads(document: Document, context: Context) -> Findings:
    """autotp_size does not divide the numbers of attention heads and of key-value heads.

    Heads are not split (module_inject/tp_shard.py): some ranks have more of them than others, and ranks beyond the
    number of key-value heads get no part of the attention, of which the engine warns (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 3}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 1}}
    Context: {"world_size": 3, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: warns exceeds the model's key-value head count
    """
    model, size = context.model or {}, document.tensor_size
    text = model.get("text_config")  # the configuration of the text part, which is the whole of most models
    config = text if isinstance(text, dict) else model
    heads = integer(config.get("num_attention_heads", config.get("n_head")))
    counts = (heads, integer(config.get("num_key_value_heads", heads)))
    uneven = [count for count in counts if count and count % size]
    if uneven:
        what = f"{size} does not divide the {min(uneven)} heads of the model: the ranks get unequal parts"
        yield finding(_size_path(document), what, f"a divisor of {min(uneven)}")


_PARTITION = ("tensor_parallel", "partition_config")
_PARTITION_KEYS = frozenset(
    {"tp_size", "layer_specs", "embedding_partition_dim", "lm_head_patterns", "use_default_specs", "strict_mode"}
)
_SPEC_KEYS = frozenset(
    {"patterns", "partition_type", "gather_output", "grad_allreduce", "shape", "partition_dim", "model_types"}
)
_PARTITION_TYPES = ("column", "row", "skip")


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
            what = f"{show(value)} is not a way to divide a layer (allowed: {listed(_PARTITION_TYPES)})"
            otherwise = '"column", "row" or "skip", for instance'
            yield finding(path, what, meant(document.string(*path), _PARTITION_TYPES, otherwise))


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
                yield key_finding((*holder, key), what, meant(key, names, "nothing: remove the key"))
