"""What DeepSpeed had once: removed keys are refused, deprecated ones convert or are ignored."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, remove, rename, replace
from deepspeed_compress.tools.lint.hit import Fix, Hit
from deepspeed_compress.tools.lint.keys import known_values
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, warns
from deepspeed_compress.tools.lint.rules.common import ZERO, config, is_true, optimizer, show, trained, zero

_FAMILY = "removed"
_REMOVED_IN = "DeepSpeed 0.19 refuses the key wherever it stands, disabled or not"


@dataclass(frozen=True, slots=True)
class _Removed:
    """A feature that DeepSpeed has no more."""

    code: str
    name: str
    summary: str
    keys: tuple[str, ...]
    write: str
    bad: object
    pattern: str


_FEATURES = (
    _Removed(
        "DSC110",
        "removed-elasticity",
        "Elastic training was removed.",
        ("elasticity",),
        "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps instead",
        {"enabled": False},
        "Elastic training has been removed",
    ),
    _Removed(
        "DSC111",
        "removed-compression-training",
        "Training of compressed models (compression_training) was removed.",
        ("compression_training", "quantize_training", "eigenvalue"),
        "nothing: remove the key, and quantize with another library",
        {"weight_quantization": {"shared_parameters": {"enabled": False}}},
        "compression library has been removed",
    ),
    _Removed(
        "DSC112",
        "removed-sparse-gradients",
        "sparse_gradients was removed; the section deepspeed_compress sends sparse gradients.",
        ("sparse_gradients",),
        '"deepspeed_compress": {"gradients": {"method": "topk"}}, or nothing',
        True,
        "Sparse compression of dense",
    ),
    _Removed(
        "DSC113",
        "removed-amp",
        "Apex amp was removed.",
        ("amp",),
        '"bf16": {"enabled": true}, "fp16" or "torch_autocast" instead',
        {"enabled": False},
        "Apex AMP integration has been removed",
    ),
    _Removed(
        "DSC114",
        "removed-curriculum",
        "The outermost curriculum_learning was removed.",
        ("curriculum_learning",),
        "it inside data_efficiency.data_sampling",
        {"enabled": False},
        "Legacy top-level 'curriculum_learning'",
    ),
    _Removed(
        "DSC115",
        "removed-key",
        "The feature of this key was removed.",
        ("nebula", "sparse_attention", "graph_harvesting", "progressive_layer_drop"),
        "nothing: remove the key",
        {"enabled": False},
        "Progressive Layer Dropping has been removed",
    ),
)
_EXAMPLES = {"DSC115": "progressive_layer_drop"}


def _off(value: object) -> bool:
    """Whether a removed feature was not used, so that nothing is lost with its key."""
    return value is False or value is None or (isinstance(value, dict) and value.get("enabled") is False)


def _without(document: Document, *path: str) -> Fix | None:
    """Remove a key that has no effect; unsafe where the user had asked for something."""
    return fix(f'Remove "{path[-1]}"', remove(document, path), safe=_off(document.get(*path)))


def _check_of(feature: _Removed) -> Callable[[Document, Context], Iterator[Hit]]:
    def check(document: Document, context: Context) -> Iterator[Hit]:
        for key in feature.keys:
            if document.has(key):
                what = f'"{key}" was removed from DeepSpeed, which refuses it even if it is disabled'
                yield Hit((key,), what, feature.write, "key", _without(document, key))

    return check


def _rule_of(feature: _Removed) -> Rule:
    key = _EXAMPLES.get(feature.code, feature.keys[0])
    return Rule(
        feature.code,
        feature.name,
        "error",
        _FAMILY,
        feature.summary,
        f"{_REMOVED_IN} (runtime/config.py).",
        config(**{key: feature.bad}),
        config(),
        _check_of(feature),
        raises(feature.pattern),
    )


def _loco(document: Document, context: Context) -> Iterator[Hit]:
    if document.has(ZERO, "zeropp_loco_param"):
        what = '"zeropp_loco_param" was removed: ZeRO++ has no error feedback any more'
        write = (
            '"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}, whose default has error feedback'
        )
        yield Hit((ZERO, "zeropp_loco_param"), what, write, "key", _without(document, ZERO, "zeropp_loco_param"))


def _mics(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("mics_shard_size", "mics_hierarchical_params_gather"):
        if document.has(ZERO, key):
            what = f'"{key}" was removed with MiCS'
            write = '"zero_hpz_partition_size" for weights that are partitioned inside a node'
            yield Hit((ZERO, key), what, write, "key", _without(document, ZERO, key))


_ONE_BIT = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


def _one_bit(document: Document, context: Context) -> Iterator[Hit]:
    if optimizer(document) in _ONE_BIT:
        value = document.get("optimizer", "type")
        what = f"{show(value)} was removed from DeepSpeed (allowed: AdamW, for instance)"
        write = '"type": "AdamW", and "deepspeed_compress": {"gradients": {"method": "sign"}} for gradients of one bit'
        yield Hit(("optimizer", "type"), what, write)


def _old_bfloat16(document: Document, context: Context) -> Iterator[Hit]:
    if document.has("bfloat16"):
        both = document.get("bf16") is not None
        what = '"bfloat16" is the old name of "bf16"' + (", which stands here too and alone counts" if both else "")
        edits = remove(document, ("bfloat16",)) if both else rename(document, ("bfloat16",), "bf16")
        write = "nothing: remove the key" if both else '"bf16"'
        yield Hit(("bfloat16",), what, write, "key", fix("Use the name bf16", edits))


def _zero_boolean(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(ZERO)
    if isinstance(value, bool):
        meant = {"stage": int(value)}
        what = f"{show(value)} is the format of old versions and means stage {int(value)} (allowed: an object)"
        yield Hit((ZERO,), what, show(meant), fix=fix("Write the stage", replace(document, (ZERO,), meant)))


_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}


def _deprecated(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, _ in known_values(document, strict=True):
        if key.deprecated and not document.has(*path[:-1], key.deprecated):
            write = _OFFLOADS.get(str(path[-1]), key.deprecated)
            what = f'"{path[-1]}" is deprecated in favour of {key.deprecated}'
            yield Hit(path, what, f'"{write}"', "key", _modern(document, str(path[-1])))


def _modern(document: Document, key: str) -> Fix | None:
    """The key by its new name."""
    path, new = (ZERO, key), _OFFLOADS.get(key)
    if key == "stage3_gather_fp16_weights_on_model_save":
        return fix("Use the new name", rename(document, path, "stage3_gather_16bit_weights_on_model_save"))
    if new is None or document.get(*path) is not True:
        return None
    edits = (rename(document, path, new), replace(document, path, {"device": "cpu"}))
    return fix(f"Write {new}", *edits) if not document.has(ZERO, new) else None


def _deprecated_twice(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, _ in known_values(document, strict=True):
        if key.deprecated and document.has(*path[:-1], key.deprecated):
            what = f'"{path[-1]}" stands beside "{key.deprecated}", which replaces it (allowed: one of them)'
            yield Hit(path, what, f'only "{key.deprecated}"', "key", fix("Remove it", remove(document, path)))


def _legacy_stage1(document: Document, context: Context) -> Iterator[Hit]:
    if is_true(document, ZERO, "legacy_stage1"):
        correction = fix("Remove it", remove(document, (ZERO, "legacy_stage1")))
        yield Hit((ZERO, "legacy_stage1"), "true asks for code that is gone (allowed: false)", "false", fix=correction)


def _elastic_checkpoint(document: Document, context: Context) -> Iterator[Hit]:
    if is_true(document, ZERO, "elastic_checkpoint") and document.get(ZERO, "stage") == 3:
        what = "true is not supported with stage 3 any more (allowed: false)"
        yield Hit(
            (ZERO, "elastic_checkpoint"), what, '"checkpoint": {"load_universal": true} for another number of ranks'
        )


RULES = (
    *(_rule_of(feature) for feature in _FEATURES),
    Rule(
        "DSC116",
        "removed-loco",
        "error",
        _FAMILY,
        "LoCo was removed from ZeRO++; the section deepspeed_compress has error feedback for every stage.",
        f"{_REMOVED_IN} (runtime/config.py).",
        zero(3, zeropp_loco_param={"err_beta": 0.8, "reset_T": 1024}),
        zero(3, also={"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}),
        _loco,
        raises("LoCo-Zero\\+\\+ has been removed"),
    ),
    Rule(
        "DSC117",
        "removed-mics",
        "error",
        _FAMILY,
        "MiCS was removed.",
        f"{_REMOVED_IN} (runtime/config.py).",
        zero(3, mics_shard_size=4),
        zero(3),
        _mics,
        raises("MiCS ZeRO-3 sharding has been removed"),
    ),
    Rule(
        "DSC118",
        "removed-one-bit-optimizer",
        "error",
        _FAMILY,
        "The 1-bit optimizers were removed; the section deepspeed_compress sends one bit with any optimizer.",
        "OneBitAdam, ZeroOneAdam and OneBitLamb are no optimizers of DeepSpeed any more (runtime/engine.py).",
        config(optimizer={"type": "OneBitAdam", "params": {"lr": 0.0001}}),
        trained(deepspeed_compress={"gradients": {"method": "sign"}}),
        _one_bit,
        raises("not a supported DeepSpeed Optimizer"),
    ),
    Rule(
        "DSC119",
        "old-bfloat16-key",
        "warning",
        _FAMILY,
        "bfloat16 is the old name of bf16.",
        "DeepSpeed reads it only where bf16 is missing (runtime/precision_config.py); Hugging Face never does.",
        config(bfloat16={"enabled": True}),
        config(bf16={"enabled": True}),
        _old_bfloat16,
        accepts("Hugging Face would train in fp32 beside it"),
    ),
    Rule(
        "DSC120",
        "zero-boolean",
        "warning",
        _FAMILY,
        "zero_optimization is a boolean.",
        "The format of the first versions; it means stage 1 (runtime/zero/config.py).",
        trained(zero_optimization=True),
        zero(1),
        _zero_boolean,
        warns("this format of ZeRO optimization setup is deprecated"),
    ),
    Rule(
        "DSC121",
        "deprecated-key",
        "warning",
        _FAMILY,
        "A key with a newer name.",
        "DeepSpeed converts some of these and ignores others, with a warning (runtime/config_utils.py).",
        zero(2, cpu_offload=True),
        zero(2, offload_optimizer={"device": "cpu"}),
        _deprecated,
        warns("Config parameter cpu_offload is deprecated"),
    ),
    Rule(
        "DSC122",
        "deprecated-and-new-key",
        "error",
        _FAMILY,
        "A deprecated key together with the one that replaces it.",
        "DeepSpeed does not choose between the two (runtime/config_utils.py).",
        zero(2, cpu_offload=True, offload_optimizer={"device": "cpu"}),
        zero(2, offload_optimizer={"device": "cpu"}),
        _deprecated_twice,
        raises("Cannot provide deprecated parameter"),
    ),
    Rule(
        "DSC123",
        "legacy-stage-1",
        "error",
        _FAMILY,
        "legacy_stage1 asks for an implementation that is gone.",
        "The key is still accepted and then refused by the engine (runtime/engine.py).",
        zero(1, legacy_stage1=True),
        zero(1),
        _legacy_stage1,
        raises("deprecated version of ZeRO Stage 1 is not supported"),
    ),
    Rule(
        "DSC124",
        "elastic-checkpoint-stage-3",
        "warning",
        _FAMILY,
        "elastic_checkpoint has no effect with stage 3.",
        "Universal checkpoints replace it (runtime/zero/config.py); loading such a checkpoint fails.",
        zero(3, elastic_checkpoint=True),
        zero(3),
        _elastic_checkpoint,
        warns("ZeRO-3 elastic checkpointing is deprecated"),
    ),
)
