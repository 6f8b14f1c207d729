"""Rules on settings without effect, and on settings of monitors, checkpoints, profilers and data."""

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import finding, hugging_face, key_finding
from deepspeed_compress.tools.lint.values import AUTO, listed, number, show, truth

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
        if settings and "enabled" not in settings and not any(closest(key, {"enabled": None}) for key in settings):
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


@rule("DSC802", "error")
def datastates_present(document: Document, context: Context) -> Findings:
    """datastates_ckpt is on although it is not enabled.

    Every value except false turns it on (datastates/config.py), and it needs another package.

    Wrong: {"train_batch_size": 8, "datastates_ckpt": {"enabled": false}}
    Right: {"train_batch_size": 8, "datastates_ckpt": false}
    Proof: raises Please install DataStates
    """
    value = document.get("datastates_ckpt", default=False)
    wanted = value.get("enabled", bool(value)) if isinstance(value, dict) else value
    if value is not False and truth(wanted) is not True:
        what = f"{show(value)} turns DataStates on, as everything except false does"
        yield finding(("datastates_ckpt",), what, "nothing: remove the key to turn it off")


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
        if document.has(*path) and not (path[0] == "pipeline" and hugging_face(context)):
            yield key_finding(path, f'DeepSpeed accepts "{path[-1]}" and never uses it', instead)


_TAGS = ("WARN", "IGNORE", "FAIL")
_WRITERS = {"type": ("MOCK", "PYTHON", "FAST"), "data_parallel": ("REPLICA", "SOCKET", "MACHINE")}


@rule("DSC810", "error")
def tag_validation(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know checkpoint.tag_validation.

    It is checked when the configuration is read (runtime/config.py). null is refused, too.

    Wrong: {"train_batch_size": 8, "checkpoint": {"tag_validation": "strict"}}
    Right: {"train_batch_size": 8, "checkpoint": {"tag_validation": "Fail"}}
    Proof: raises invalid tag_validation value
    """
    path = ("checkpoint", "tag_validation")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, str) and value.upper() in _TAGS):
        yield finding(path, f"{show(value)} is not known (allowed: Warn, Ignore, Fail)", '"Warn"')


@rule("DSC811", "error")
def checkpoint_writer(document: Document, context: Context) -> Findings:
    """A checkpoint writer is unknown, or lacks data_parallel.

    Its type is checked when the configuration is read (runtime/model_checkpointing/config.py). Below stage 3, the ranks
    share the work of writing as data_parallel says, and fail without it (runtime/model_checkpointing/utils.py).

    Wrong: {"train_batch_size": 8, "checkpoint": {"writer": {"type": "quick", "data_parallel": "replica"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "checkpoint": {"writer": {"type": "python"}}}
    Proof: raises contains invalid value QUICK for type
    """
    for key, allowed in _WRITERS.items():
        value = document.get("checkpoint", "writer", key)
        if value is not None and not (isinstance(value, str) and value.upper() in allowed):
            what = f"{show(value)} is not known (allowed: {listed(allowed)})"
            yield finding(("checkpoint", "writer", key), what, f'"{allowed[-1]}"')
    path = ("checkpoint", "writer", "data_parallel")
    if isinstance(document.get(*path[:-1]), dict) and document.get(*path) is None and document.stage in (0, 1, 2):
        what = f"a checkpoint writer without data_parallel fails with stage {document.stage}"
        yield finding(path, what, '"data_parallel": "replica" as well')


@rule("DSC812", "error")
def parallel_write_boolean(document: Document, context: Context) -> Findings:
    """checkpoint.parallel_write.pipeline_stage is not a boolean.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "checkpoint": {"parallel_write": {"pipeline_stage": "true"}}}
    Right: {"train_batch_size": 8, "checkpoint": {"parallel_write": {"pipeline_stage": true}}}
    Proof: raises expecting: true or false
    """
    path = ("checkpoint", "parallel_write", "pipeline_stage")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, bool) or number(value) in (0, 1)):
        yield finding(path, f"{show(value)} is refused (allowed: true, false)", "true")


_LEVELS = ("debug", "info", "warning", "error", "critical")


@rule("DSC813", "error")
def log_level(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know log_level.

    Checked by the engine (utils/logging.py).

    Wrong: {"train_batch_size": 8, "log_level": "loud"}
    Right: {"train_batch_size": 8, "log_level": "warning"}
    Proof: raises is not one of the valid logging levels
    """
    value = document.get("log_level")
    if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _LEVELS):
        yield finding(("log_level",), f"{show(value)} is not known (allowed: {listed(_LEVELS)})", '"warning"')


@rule("DSC815", "error")
def curriculum_without_metrics(document: Document, context: Context) -> Findings:
    """Curriculum learning lacks metrics.

    Asserted when the configuration is read (runtime/data_pipeline/config.py).

    Wrong: {"train_batch_size": 8, "data_efficiency": {"enabled": true,
        "data_sampling": {"enabled": true, "curriculum_learning": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"enabled": true, "data_sampling": {"enabled": true}}}
    Proof: raises curriculum_metrics must be specified
    """
    path = ("data_efficiency", "data_sampling", "curriculum_learning")
    if document.section(*path).get("enabled") is True and not document.has(*path, "curriculum_metrics"):
        yield key_finding(path, "curriculum_learning without curriculum_metrics", '"curriculum_metrics": {...} as well')


@rule("DSC816", "error")
def dynamic_batching_without_tokens(document: Document, context: Context) -> Findings:
    """Dynamic batching lacks a number of tokens.

    Asserted when the configuration is read (runtime/data_pipeline/config.py).

    Wrong: {"train_batch_size": 8,
        "data_efficiency": {"enabled": true, "data_sampling": {"dynamic_batching": {"enabled": true}}}}
    Right: {"train_batch_size": 8, "data_efficiency": {"enabled": true,
        "data_sampling": {"dynamic_batching": {"enabled": true, "max_tokens": 4096}}}}
    Proof: raises max_tokens must be specified
    """
    path = ("data_efficiency", "data_sampling", "dynamic_batching")
    if document.section(*path).get("enabled") and not document.has(*path, "max_tokens"):
        yield key_finding(path, "dynamic_batching without max_tokens", '"max_tokens": 4096 as well, for instance')


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


@rule("DSC818", "warning")
def contiguous_checkpointing(document: Document, context: Context) -> Findings:
    """contiguous_memory_optimization is true without partition_activations.

    deepspeed.checkpointing.configure asserts this (runtime/activation_checkpointing/checkpointing.py). If the program
    does not call it, the section has no effect. The number of checkpoints, which is needed too, usually comes from the
    program.

    Wrong: {"train_batch_size": 8, "activation_checkpointing": {"contiguous_memory_optimization": true}}
    Right: {"train_batch_size": 8,
        "activation_checkpointing": {"contiguous_memory_optimization": true, "partition_activations": true}}
    Proof: accepts deepspeed.checkpointing.configure fails later
    """
    settings = document.section("activation_checkpointing")
    alone = settings.get("contiguous_memory_optimization") is True and not settings.get("partition_activations")
    if alone and not hugging_face(context):
        path = ("activation_checkpointing", "contiguous_memory_optimization")
        yield finding(path, "true needs partition_activations", '"partition_activations": true as well, or false')


@rule("DSC819", "error")
def autotuning_directory(document: Document, context: Context) -> Findings:
    """A directory of the autotuner is empty.

    It is checked when the configuration is read, even if the autotuner is disabled (autotuning/config.py).

    Wrong: {"train_batch_size": 8, "autotuning": {"enabled": false, "results_dir": ""}}
    Right: {"train_batch_size": 8, "autotuning": {"enabled": false, "results_dir": "results"}}
    Proof: raises results_dir cannot be empty
    """
    for key in ("results_dir", "exps_dir"):
        value = document.get("autotuning", key, default="given")
        if not value:
            yield finding(("autotuning", key), f"{show(value)} is refused (allowed: a path)", '"autotuning_results"')
