"""Settings without effect, and those of monitors, checkpoints, profilers and data."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, remove
from deepspeed_compress.tools.lint.hit import Hit, Path
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, warns
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    config,
    hugging_face,
    integer,
    listed,
    number,
    offload,
    section,
    show,
    trained,
    truth,
    zero,
)

_FAMILY = "silent"
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
"""Sections that do nothing unless "enabled" is true."""


def _not_enabled(document: Document, context: Context) -> Iterator[Hit]:
    for part in _OPTIONAL:
        settings = section(document, part)
        # A misspelled "enabled" has a finding of its own.
        if settings and "enabled" not in settings and not any(closest(key, {"enabled": None}) for key in settings):
            what = f'{part} is off without "enabled", and its other settings have no effect'
            yield Hit((part,), what, '"enabled": true besides', "key")


def _comms_logger(document: Document, context: Context) -> Iterator[Hit]:
    if truth(section(document, "comms_logger").get("enabled", False)) is False and document.has("comms_logger"):
        what = "the section itself turns the logger on: without enabled, or with false, it logs all the same"
        correction = fix("Remove the section", remove(document, ("comms_logger",)))
        yield Hit(("comms_logger",), what, "nothing: remove the section to turn it off", "key", correction)


def _datastates(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("datastates_ckpt", default=False)
    if value is None or (isinstance(value, dict) and value.get("enabled") is False):
        what = f"{show(value)} turns DataStates on: everything but false does"
        yield Hit(("datastates_ckpt",), what, "nothing: remove the key to turn it off")


_INERT: tuple[tuple[Path, str], ...] = (
    (("disable_allgather",), "nothing: remove the key"),
    (("pipeline", "stages"), "num_stages of PipelineModule, in the program"),
    (("pipeline", "partition"), "partition_method of PipelineModule, in the program"),
    (("pipeline", "seed_layers"), "seed_layers of PipelineModule, in the program"),
)


def _inert(document: Document, context: Context) -> Iterator[Hit]:
    for path, write in _INERT:
        # Hugging Face reads nothing of the whole section, which another rule says.
        if document.has(*path) and not (path[0] == "pipeline" and hugging_face(context)):
            yield Hit(path, f'DeepSpeed accepts "{path[-1]}" and never looks at it', write, "key")


def _aio_unused(document: Document, context: Context) -> Iterator[Hit]:
    swaps = "nvme" in (offload(document, "offload_param"), offload(document, "offload_optimizer"))
    writes = isinstance(document.get("checkpoint", "writer"), dict)
    if section(document, "aio") and not swaps and not writes:
        yield Hit(("aio",), "aio has no effect without offloading to nvme or a checkpoint writer", "nothing", "key")


_TAGS = ("WARN", "IGNORE", "FAIL")
_WRITERS = {"type": ("MOCK", "PYTHON", "FAST"), "data_parallel": ("REPLICA", "SOCKET", "MACHINE")}


def _tags(document: Document, context: Context) -> Iterator[Hit]:
    path = ("checkpoint", "tag_validation")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, str) and value.upper() in _TAGS):
        yield Hit(path, f"{show(value)} is not known (allowed: Warn, Ignore, Fail)", '"Warn"')


def _writer(document: Document, context: Context) -> Iterator[Hit]:
    for key, allowed in _WRITERS.items():
        value = document.get("checkpoint", "writer", key)
        if value is not None and not (isinstance(value, str) and value.upper() in allowed):
            what = f"{show(value)} is not known (allowed: {listed(allowed)})"
            yield Hit(("checkpoint", "writer", key), what, f'"{allowed[-1]}"')


def _parallel_write(document: Document, context: Context) -> Iterator[Hit]:
    path = ("checkpoint", "parallel_write", "pipeline_stage")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, bool) or number(value) in (0, 1)):
        yield Hit(path, f"{show(value)} is refused (allowed: true, false)", "true")


_LEVELS = ("debug", "info", "warning", "error", "critical")


def _log_level(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("log_level")
    if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _LEVELS):
        yield Hit(("log_level",), f"{show(value)} is not known (allowed: {listed(_LEVELS)})", '"warning"')


def _vocabulary(document: Document, context: Context) -> Iterator[Hit]:
    size = number(document.get("vocabulary_size"))
    if size is not None and size % 8:
        what = f"{show(size)} is no multiple of 8, which tensor cores want"
        yield Hit(("vocabulary_size",), what, f"{-(-int(size) // 8) * 8}, and pad the embedding")


def _curriculum(document: Document, context: Context) -> Iterator[Hit]:
    path = ("data_efficiency", "data_sampling", "curriculum_learning")
    if section(document, *path).get("enabled") is True and not document.has(*path, "curriculum_metrics"):
        yield Hit(path, "curriculum_learning without curriculum_metrics", '"curriculum_metrics": {...} besides', "key")


def _dynamic_batching(document: Document, context: Context) -> Iterator[Hit]:
    path = ("data_efficiency", "data_sampling", "dynamic_batching")
    if section(document, *path).get("enabled") and not document.has(*path, "max_tokens"):
        yield Hit(path, "dynamic_batching without max_tokens", '"max_tokens": 4096 besides, for instance', "key")


def _print_zero(document: Document, context: Context) -> Iterator[Hit]:
    if integer(document.get("steps_per_print")) == 0:
        yield Hit(
            ("steps_per_print",), "0 divides by zero at the first step (allowed: 1 or more)", "null for no prints"
        )


def _contiguous(document: Document, context: Context) -> Iterator[Hit]:
    settings = section(document, "activation_checkpointing")
    alone = settings.get("contiguous_memory_optimization") is True and not settings.get("partition_activations")
    if alone and not hugging_face(context):
        path = ("activation_checkpointing", "contiguous_memory_optimization")
        yield Hit(path, "true needs partition_activations", '"partition_activations": true besides, or false')


def _autotuning(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("results_dir", "exps_dir"):
        value = document.get("autotuning", key, default="given")
        if not value:
            yield Hit(("autotuning", key), f"{show(value)} is refused (allowed: a path)", '"autotuning_results"')


RULES = (
    Rule(
        "DSC800",
        "section-not-enabled",
        "warning",
        _FAMILY,
        'A section with settings but without "enabled".',
        "These sections are off by default (runtime/precision_config.py, monitor/config.py, profiling/config.py), "
        "whatever else they say.",
        config(bf16={"check_grad_overflow": False}),
        config(bf16={"enabled": True, "check_grad_overflow": False}),
        _not_enabled,
        accepts("the section has no effect"),
    ),
    Rule(
        "DSC801",
        "comms-logger-present",
        "warning",
        _FAMILY,
        "comms_logger logs although it is not enabled.",
        "DeepSpeed asks whether the section is there (comm/config.py), not what it says.",
        config(comms_logger={"enabled": False}),
        config(comms_logger={"enabled": True}),
        _comms_logger,
        accepts("every collective is logged, which slows training"),
    ),
    Rule(
        "DSC802",
        "datastates-present",
        "error",
        _FAMILY,
        "datastates_ckpt is on although it is not enabled.",
        "Every value but false turns it on (datastates/config.py), and another package is needed then.",
        config(datastates_ckpt={"enabled": False}),
        config(datastates_ckpt=False),
        _datastates,
        raises("Please install DataStates"),
    ),
    Rule(
        "DSC803",
        "inert-key",
        "warning",
        _FAMILY,
        "A key that DeepSpeed reads and never uses.",
        "Left from former versions (runtime/config.py).",
        config(disable_allgather=True),
        config(),
        _inert,
        accepts("the key has no effect"),
    ),
    Rule(
        "DSC804",
        "aio-unused",
        "info",
        _FAMILY,
        "aio without anything that reads or writes by it.",
        "Only offloading to NVMe and checkpoint writers do (runtime/swap_tensor/aio_config.py).",
        config(aio={"block_size": 1048576}),
        zero(3, also={"aio": {"block_size": 1048576}, "checkpoint": {"writer": {"type": "python"}}}),
        _aio_unused,
        accepts("the section has no effect"),
    ),
    Rule(
        "DSC810",
        "tag-validation",
        "error",
        _FAMILY,
        "checkpoint.tag_validation is not known.",
        "Checked when the configuration is read (runtime/config.py); null is refused, too.",
        config(checkpoint={"tag_validation": "strict"}),
        config(checkpoint={"tag_validation": "Fail"}),
        _tags,
        raises("invalid tag_validation value"),
    ),
    Rule(
        "DSC811",
        "checkpoint-writer",
        "error",
        _FAMILY,
        "A kind of checkpoint writer that DeepSpeed does not know.",
        "Checked when the configuration is read (runtime/model_checkpointing/config.py).",
        config(checkpoint={"writer": {"type": "quick"}}),
        zero(3, also={"checkpoint": {"writer": {"type": "python"}}}),
        _writer,
        raises("contains invalid value QUICK for type"),
    ),
    Rule(
        "DSC812",
        "parallel-write-boolean",
        "error",
        _FAMILY,
        "checkpoint.parallel_write.pipeline_stage is no boolean.",
        "Checked when the configuration is read (runtime/config.py).",
        config(checkpoint={"parallel_write": {"pipeline_stage": "true"}}),
        config(checkpoint={"parallel_write": {"pipeline_stage": True}}),
        _parallel_write,
        raises("expecting: true or false"),
    ),
    Rule(
        "DSC813",
        "log-level",
        "error",
        _FAMILY,
        "log_level is not known.",
        "Checked by the engine (utils/logging.py).",
        config(log_level="loud"),
        config(log_level="warning"),
        _log_level,
        raises("is not one of the valid logging levels"),
    ),
    Rule(
        "DSC814",
        "vocabulary-not-aligned",
        "info",
        _FAMILY,
        "vocabulary_size is no multiple of 8.",
        "DeepSpeed only warns (runtime/config.py); nothing else reads the key.",
        config(vocabulary_size=50257),
        config(vocabulary_size=50264),
        _vocabulary,
        warns("is not aligned to 8"),
    ),
    Rule(
        "DSC815",
        "curriculum-without-metrics",
        "error",
        _FAMILY,
        "Curriculum learning without metrics.",
        "Asserted when the configuration is read (runtime/data_pipeline/config.py).",
        config(
            data_efficiency={
                "enabled": True,
                "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}},
            }
        ),
        config(data_efficiency={"enabled": True, "data_sampling": {"enabled": True}}),
        _curriculum,
        raises("curriculum_metrics must be specified"),
    ),
    Rule(
        "DSC816",
        "dynamic-batching-without-tokens",
        "error",
        _FAMILY,
        "Dynamic batching without a number of tokens.",
        "Asserted when the configuration is read (runtime/data_pipeline/config.py).",
        config(data_efficiency={"enabled": True, "data_sampling": {"dynamic_batching": {"enabled": True}}}),
        config(
            data_efficiency={
                "enabled": True,
                "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 4096}},
            }
        ),
        _dynamic_batching,
        raises("max_tokens must be specified"),
    ),
    Rule(
        "DSC817",
        "steps-per-print-zero",
        "error",
        _FAMILY,
        "steps_per_print is 0.",
        "The number of the step is divided by it (runtime/engine.py).",
        trained(steps_per_print=0),
        trained(steps_per_print=10),
        _print_zero,
        accepts("the first step ends with ZeroDivisionError"),
    ),
    Rule(
        "DSC818",
        "contiguous-checkpointing",
        "warning",
        _FAMILY,
        "contiguous_memory_optimization without what it needs.",
        "Asserted where a program calls deepspeed.checkpointing.configure "
        "(runtime/activation_checkpointing/checkpointing.py); where none does, the section has no effect. The number "
        "of checkpoints, which it needs too, mostly comes from the program.",
        config(activation_checkpointing={"contiguous_memory_optimization": True}),
        config(
            activation_checkpointing={
                "contiguous_memory_optimization": True,
                "partition_activations": True,
            }
        ),
        _contiguous,
        accepts("deepspeed.checkpointing.configure fails later"),
    ),
    Rule(
        "DSC819",
        "autotuning-directory",
        "error",
        _FAMILY,
        "A directory of the autotuner is empty.",
        "Asserted when the configuration is read, enabled or not (autotuning/config.py).",
        config(autotuning={"enabled": False, "results_dir": ""}),
        config(autotuning={"enabled": False, "results_dir": "results"}),
        _autotuning,
        raises("results_dir cannot be empty"),
    ),
)
