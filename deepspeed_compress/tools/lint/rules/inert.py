"""Rules on keys without effect, and on former keys of DeepSpeed, which are refused, converted or ignored."""

from collections.abc import Mapping

from deepspeed_compress.diagnostics import Fix, Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove, rename, replace
from deepspeed_compress.tools.lint.keys import Key, closest, keys, known_values
from deepspeed_compress.tools.lint.rule import ONE_BIT, ZERO, Context, Findings, corrected, finding, key_finding, rule
from deepspeed_compress.tools.lint.values import show, truth

_NOTHING = "nothing: remove the key"
_HPZ = '"zero_hpz_partition_size" for weights that are partitioned inside a node'
_OURS = '"deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}, whose default has error feedback'
_REMOVED: Mapping[tuple[str, ...], str] = {
    ("elasticity",): "train_batch_size, train_micro_batch_size_per_gpu and gradient_accumulation_steps instead",
    ("compression_training",): f"{_NOTHING}, and quantize with another library",
    ("quantize_training",): f"{_NOTHING}, and quantize with another library",
    ("eigenvalue",): _NOTHING,
    ("sparse_gradients",): '"deepspeed_compress": {"gradients": {"method": "topk"}}, or nothing',
    ("amp",): '"bf16": {"enabled": true}, "fp16" or "torch_autocast" instead',
    ("curriculum_learning",): "it inside data_efficiency.data_sampling",
    ("nebula",): _NOTHING,
    ("sparse_attention",): _NOTHING,
    ("graph_harvesting",): _NOTHING,
    ("progressive_layer_drop",): _NOTHING,
    (ZERO, "zeropp_loco_param"): _OURS,
    (ZERO, "mics_shard_size"): _HPZ,
    (ZERO, "mics_hierarchical_params_gather"): _HPZ,
}
"""Keys that DeepSpeed refuses, with what to write instead."""


@rule("DSC110", "error")
def removed_feature(document: Document, context: Context) -> Findings:
    """The feature of this key was removed; the section deepspeed_compress replaces sparse gradients and LoCo.

    DeepSpeed 0.19 refuses the key wherever it occurs, even if it is disabled (runtime/config.py).

    Wrong: {"train_batch_size": 8, "elasticity": {"enabled": false}}
    Right: {"train_batch_size": 8}
    Proof: raises Elastic training has been removed
    """
    for path, instead in _REMOVED.items():
        if document.has(*path):
            what = f'"{path[-1]}" was removed from DeepSpeed, which refuses it even if it is disabled'
            value = document.get(*path)
            is_off = value is False or value is None or (isinstance(value, dict) and value.get("enabled") is False)
            correction = fix(f'Remove "{path[-1]}"', remove(document, path) if is_off else ())
            yield key_finding(path, what, instead, correction)


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


_OPTIONAL = (
    "fp16",
    "bf16",
    "tensorboard",
    "wandb",
    "csv_monitor",
    "comet",
    "flops_profiler",
    "torch_autocast",
    "hybrid_engine",
    "autotuning",
    "data_efficiency",
    "expert_parallel",
)
"""Sections without effect unless "enabled" is true."""


@rule("DSC800", "warning")
def section_not_enabled(document: Document, context: Context) -> Findings:
    """A section has settings but not "enabled".

    These sections are off by default (runtime/precision_config.py, monitor/config.py, profiling/config.py), and their
    other settings do not turn them on.

    Wrong: {"train_batch_size": 8, "bf16": {"check_grad_overflow": false}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true, "check_grad_overflow": false}}
    Proof: accepts the section has no effect
    """
    for part in _OPTIONAL:
        settings = document.section(part)
        # A misspelled "enabled" has its own finding.
        if settings and "enabled" not in settings and not any(closest(key, ["enabled"]) for key in settings):
            what = f'{part} is off without "enabled", and its other settings have no effect'
            yield key_finding((part,), what, '"enabled": true as well')


@rule("DSC801", "warning")
def comms_logger_present(document: Document, context: Context) -> Findings:
    """comms_logger logs although it is not enabled.

    DeepSpeed only checks whether the section exists (comm/config.py).

    Wrong: {"train_batch_size": 8, "comms_logger": {"enabled": false}}
    Right: {"train_batch_size": 8, "comms_logger": {"enabled": true}}
    Proof: accepts every collective is logged, which slows training
    """
    if truth(document.section("comms_logger").get("enabled", False)) is False and document.has("comms_logger"):
        what = "the section itself turns the logger on, even if enabled is false or missing"
        correction = fix("Remove the section", remove(document, ("comms_logger",)))
        yield key_finding(("comms_logger",), what, "nothing: remove the section to turn it off", correction)


_INERT: tuple[tuple[Path, str], ...] = (
    (("disable_allgather",), "nothing: remove the key"),
    (("pipeline", "stages"), "num_stages of PipelineModule, in the program"),
    (("pipeline", "partition"), "partition_method of PipelineModule, in the program"),
    (("pipeline", "seed_layers"), "seed_layers of PipelineModule, in the program"),
)


@rule("DSC803", "warning")
def inert_key(document: Document, context: Context) -> Findings:
    """DeepSpeed reads a key but never uses it.

    The key is a leftover of former versions (runtime/config.py).

    Wrong: {"train_batch_size": 8, "disable_allgather": true}
    Right: {"train_batch_size": 8}
    Proof: accepts the key has no effect
    """
    for path, instead in _INERT:
        # Hugging Face does not read this section at all, which another rule reports.
        if document.has(*path) and not (path[0] == "pipeline" and context.hugging_face):
            yield key_finding(path, f'DeepSpeed accepts "{path[-1]}" and never uses it', instead)


@rule("DSC804", "warning")
def overridden_key(document: Document, context: Context) -> Findings:
    """Another setting takes precedence over a key, which has no effect.

    DeepSpeed says so at most in its log (runtime/engine.py, runtime/zero/config.py, utils/groups.py).

    Wrong: {"train_batch_size": 8, "prescale_gradients": true, "gradient_predivide_factor": 2.0}
    Right: {"train_batch_size": 8, "prescale_gradients": true}
    Proof: accepts the factor has no effect
    """
    params, world = ("optimizer", "params"), context.world_size
    size, factor = document.integer(ZERO, "zero_hpz_partition_size"), document.number("gradient_predivide_factor")
    bf16_states = document.offload("offload_optimizer") and document.is_true("bf16", "bf16_optimizer_states")
    prescaled, stage_3 = document.get("prescale_gradients") is True, document.stage == 3
    for path, is_ineffective, because, instead in (
        (
            ("gradient_predivide_factor",),
            prescaled and factor not in (None, 0, 1),
            "prescale_gradients, which divides by the number of ranks",
            '1.0, or "prescale_gradients": false',
        ),
        (
            (*params, "adam_w_mode"),
            document.optimizer == "adamw" and document.get(*params, "adam_w_mode") is False,
            'the type "AdamW"',
            '"type": "Adam", or remove the key',
        ),
        (
            (*params, "fp32_optimizer_states"),
            bf16_states and document.get(*params, "fp32_optimizer_states") is True,
            "bf16_optimizer_states",
            'false, or "bf16_optimizer_states": false',
        ),
        (
            (ZERO, "zero_hpz_partition_size"),
            stage_3 and size is not None and world is not None and size > world,
            f"a job of {world} ranks, the largest possible size",
            "the ranks of one node",
        ),
        (
            (ZERO, "elastic_checkpoint"),
            stage_3 and document.is_true(ZERO, "elastic_checkpoint"),
            "stage 3, and loading such a checkpoint fails",
            'false, and "checkpoint": {"load_universal": true} for another number of ranks',
        ),
    ):
        if is_ineffective:
            yield finding(path, f"{show(document.get(*path))} has no effect with {because}", instead)


@rule("DSC817", "error")
def steps_per_print_zero(document: Document, context: Context) -> Findings:
    """steps_per_print is 0.

    DeepSpeed divides the number of the step by it (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "steps_per_print": 0}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "steps_per_print": 10}
    Proof: accepts the first step ends with ZeroDivisionError
    """
    if document.integer("steps_per_print") == 0:
        what = "0 causes a division by zero at the first step (allowed: 1 or more)"
        yield finding(("steps_per_print",), what, "null for no prints")
