"""Rules on former keys of DeepSpeed. Removed keys are refused; deprecated ones are converted or ignored."""

from deepspeed_compress.diagnostics import Fix, Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove, rename, replace
from deepspeed_compress.tools.lint.keys import Key, keys, known_values
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ONE_BIT, ZERO, corrected, finding, key_finding
from deepspeed_compress.tools.lint.values import show


def _off(value: object) -> bool:
    """Return True if a removed feature was not used, so that removing its key changes nothing."""
    return value is False or value is None or (isinstance(value, dict) and value.get("enabled") is False)


def _without(document: Document, *path: str) -> Fix | None:
    """Return a fix that removes a key without effect. It is unsafe if the key asks for something."""
    return fix(f'Remove "{path[-1]}"', remove(document, path), safe=_off(document.get(*path)))


def _removed(document: Document, instead: str, *keys: str) -> Findings:
    for key in keys:
        if document.has(key):
            what = f'"{key}" was removed from DeepSpeed, which refuses it even if it is disabled'
            yield key_finding((key,), what, instead, _without(document, key))


@rule("DSC110", "error")
def removed_elasticity(document: Document, context: Context) -> Findings:
    """Elastic training was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "elasticity": {"enabled": false}}
    Right: {"train_batch_size": 8}
    Proof: raises Elastic training has been removed
    """
    instead = "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps instead"
    return _removed(document, instead, "elasticity")


@rule("DSC111", "error")
def removed_compression_training(document: Document, context: Context) -> Findings:
    """Training of compressed models (compression_training) was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8,
        "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": false}}}}
    Right: {"train_batch_size": 8}
    Proof: raises compression library has been removed
    """
    instead = "nothing: remove the key, and quantize with another library"
    return _removed(document, instead, "compression_training", "quantize_training", "eigenvalue")


@rule("DSC112", "error")
def removed_sparse_gradients(document: Document, context: Context) -> Findings:
    """sparse_gradients was removed; the section deepspeed_compress sends sparse gradients.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "sparse_gradients": true}
    Right: {"train_batch_size": 8}
    Proof: raises Sparse compression of dense
    """
    instead = '"deepspeed_compress": {"gradients": {"method": "topk"}}, or nothing'
    return _removed(document, instead, "sparse_gradients")


@rule("DSC113", "error")
def removed_amp(document: Document, context: Context) -> Findings:
    """Apex amp was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "amp": {"enabled": false}}
    Right: {"train_batch_size": 8}
    Proof: raises Apex AMP integration has been removed
    """
    return _removed(document, '"bf16": {"enabled": true}, "fp16" or "torch_autocast" instead', "amp")


@rule("DSC114", "error")
def removed_curriculum(document: Document, context: Context) -> Findings:
    """The outermost curriculum_learning was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "curriculum_learning": {"enabled": false}}
    Right: {"train_batch_size": 8}
    Proof: raises Legacy top-level 'curriculum_learning'
    """
    return _removed(document, "it inside data_efficiency.data_sampling", "curriculum_learning")


@rule("DSC115", "error")
def removed_key(document: Document, context: Context) -> Findings:
    """The feature of this key was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "progressive_layer_drop": {"enabled": false}}
    Right: {"train_batch_size": 8}
    Proof: raises Progressive Layer Dropping has been removed
    """
    keys = ("nebula", "sparse_attention", "graph_harvesting", "progressive_layer_drop")
    return _removed(document, "nothing: remove the key", *keys)


@rule("DSC116", "error")
def removed_loco(document: Document, context: Context) -> Findings:
    r"""LoCo was removed from ZeRO++; the section deepspeed_compress has error feedback for every stage.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zeropp_loco_param": {"err_beta": 0.8, "reset_T": 1024}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: raises LoCo-Zero\+\+ has been removed
    """
    path = (ZERO, "zeropp_loco_param")
    if document.has(*path):
        what = '"zeropp_loco_param" was removed: ZeRO++ has no error feedback any more'
        ours = '"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}'
        yield key_finding(path, what, f"{ours}, whose default has error feedback", _without(document, *path))


@rule("DSC117", "error")
def removed_mics(document: Document, context: Context) -> Findings:
    """MiCS was removed.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "mics_shard_size": 4}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}}
    Proof: raises MiCS ZeRO-3 sharding has been removed
    """
    for key in ("mics_shard_size", "mics_hierarchical_params_gather"):
        if document.has(ZERO, key):
            what = f'"{key}" was removed with MiCS'
            instead = '"zero_hpz_partition_size" for weights that are partitioned inside a node'
            yield key_finding((ZERO, key), what, instead, _without(document, ZERO, key))


@rule("DSC118", "error")
def removed_one_bit_optimizer(document: Document, context: Context) -> Findings:
    """The 1-bit optimizers were removed; the section deepspeed_compress sends one bit with any optimizer.

    OneBitAdam, ZeroOneAdam and OneBitLamb are no longer optimizers of DeepSpeed (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "OneBitAdam", "params": {"lr": 0.0001}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "sign"}}}
    Proof: raises not a supported DeepSpeed Optimizer
    """
    if document.optimizer in ONE_BIT:
        what = f"{show(document.get('optimizer', 'type'))} was removed from DeepSpeed (allowed: AdamW, for instance)"
        ours = '"deepspeed_compress": {"gradients": {"method": "sign"}}'
        yield finding(("optimizer", "type"), what, f'"type": "AdamW", and {ours} for gradients of one bit')


@rule("DSC119", "warning")
def old_bfloat16_key(document: Document, context: Context) -> Findings:
    """bfloat16 is the old name of bf16.

    DeepSpeed reads it only if bf16 is missing (runtime/precision_config.py), and Hugging Face never does.

    Wrong: {"train_batch_size": 8, "bfloat16": {"enabled": true}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}}
    Proof: accepts Hugging Face would train in fp32
    """
    if document.has("bfloat16"):
        both = document.get("bf16") is not None
        what = '"bfloat16" is the old name of "bf16"' + (", which is also here and takes precedence" if both else "")
        edits = remove(document, ("bfloat16",)) if both else rename(document, ("bfloat16",), "bf16")
        instead = "nothing: remove the key" if both else '"bf16"'
        yield key_finding(("bfloat16",), what, instead, fix("Use the name bf16", edits))


@rule("DSC120", "warning")
def zero_boolean(document: Document, context: Context) -> Findings:
    """zero_optimization is a boolean.

    This is the format of the first versions, in which true means stage 1 (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}}
    Proof: warns this format of ZeRO optimization setup is deprecated
    """
    value = document.get(ZERO)
    if isinstance(value, bool):
        what = f"{show(value)} is the format of old versions and means stage {int(value)} (allowed: an object)"
        yield corrected(document, (ZERO,), what, {"stage": int(value)}, "Write the stage")


_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
_ELSEWHERE = {"cpu_offload_use_pin_memory": '"pin_memory" in offload_optimizer or offload_param'}


def _names(path: Path, key: Key) -> tuple[str, ...]:
    """Return the names of the key that replaces the deprecated one at `path`, the documented one first."""
    new = keys().sections[tuple(map(str, path[:-1]))].keys.get(key.deprecated)
    return (new.alias, key.deprecated) if new is not None and new.alias else (key.deprecated,)


@rule("DSC121", "warning")
def deprecated_key(document: Document, context: Context) -> Findings:
    """A key has a newer name.

    DeepSpeed converts some of these and ignores others, with a warning (runtime/config_utils.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "cpu_offload": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: warns Config parameter cpu_offload is deprecated
    """
    for path, key, _ in known_values(document, strict=True):
        names = _names(path, key)
        if key.deprecated and not any(document.has(*path[:-1], name) for name in names):
            instead = _ELSEWHERE.get(str(path[-1]), f'"{names[0]}"')
            what = f'"{path[-1]}" is deprecated in favor of {instead}'
            yield key_finding(path, what, instead, _modern(document, str(path[-1]), names[0]))


def _modern(document: Document, key: str, new: str) -> Fix | None:
    """Return a fix that replaces a deprecated key by its new name, or None."""
    path = (ZERO, key)
    if key not in (*_OFFLOADS, *_ELSEWHERE):
        return fix("Use the new name", rename(document, path, new))
    if key not in _OFFLOADS or document.get(*path) is not True:
        return None
    return fix(f"Write {new}", rename(document, path, new), replace(document, path, {"device": "cpu"}))


@rule("DSC122", "error")
def deprecated_and_new_key(document: Document, context: Context) -> Findings:
    """A deprecated key is given together with the one that replaces it.

    DeepSpeed does not choose between the two (runtime/config_utils.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "cpu_offload": true, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: raises Cannot provide deprecated parameter
    """
    for path, key, _ in known_values(document, strict=True):
        new = next((name for name in _names(path, key) if document.has(*path[:-1], name)), None)
        if key.deprecated and new is not None:
            what = f'"{path[-1]}" is next to "{new}", which replaces it (allowed: one of them)'
            yield key_finding(path, what, f'only "{new}"', fix("Remove it", remove(document, path)))


@rule("DSC123", "error")
def legacy_stage_1(document: Document, context: Context) -> Findings:
    """legacy_stage1 asks for an implementation that was removed.

    The key is still accepted and then refused by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "legacy_stage1": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}}
    Proof: raises deprecated version of ZeRO Stage 1 is not supported
    """
    if document.is_true(ZERO, "legacy_stage1"):
        what, path = "true asks for code that was removed (allowed: false)", (ZERO, "legacy_stage1")
        yield finding(path, what, "false", fix("Remove it", remove(document, path)))


@rule("DSC124", "warning")
def elastic_checkpoint_stage_3(document: Document, context: Context) -> Findings:
    """elastic_checkpoint has no effect with stage 3.

    Universal checkpoints replace it (runtime/zero/config.py); loading such a checkpoint fails.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "elastic_checkpoint": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}}
    Proof: warns ZeRO-3 elastic checkpointing is deprecated
    """
    if document.is_true(ZERO, "elastic_checkpoint") and document.get(ZERO, "stage") == 3:
        what = "true is no longer supported with stage 3 (allowed: false)"
        instead = '"checkpoint": {"load_universal": true} for another number of ranks'
        yield finding((ZERO, "elastic_checkpoint"), what, instead)
