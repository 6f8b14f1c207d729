"""Rules on settings without effect, and on settings of monitors, checkpoints, profilers and data."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.keys import closest
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, warns
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


@rule(
    code="DSC800",
    name="section-not-enabled",
    severity="warning",
    family="silent",
    summary='A section with settings but without "enabled".',
    reason=(
        "These sections are off by default (runtime/precision_config.py, monitor/config.py, profiling/config.py), "
        "whatever else they say."
    ),
    wrong=config(bf16={"check_grad_overflow": False}),
    right=config(bf16={"enabled": True, "check_grad_overflow": False}),
    proof=accepts("the section has no effect"),
)
def section_not_enabled(document: Document, context: Context) -> Iterator[Diagnostic]:
    for part in _OPTIONAL:
        settings = section(document, part)
        # A misspelled "enabled" has its own finding.
        if settings and "enabled" not in settings and not any(closest(key, {"enabled": None}) for key in settings):
            what = f'{part} is off without "enabled", and its other settings have no effect'
            yield Diagnostic(at_key(part), what, write('"enabled": true besides'))


@rule(
    code="DSC801",
    name="comms-logger-present",
    severity="warning",
    family="silent",
    summary="comms_logger logs although it is not enabled.",
    reason="DeepSpeed asks whether the section is there (comm/config.py), not what it says.",
    wrong=config(comms_logger={"enabled": False}),
    right=config(comms_logger={"enabled": True}),
    proof=accepts("every collective is logged, which slows training"),
)
def comms_logger_present(document: Document, context: Context) -> Iterator[Diagnostic]:
    if truth(section(document, "comms_logger").get("enabled", False)) is False and document.has("comms_logger"):
        what = "the section itself turns the logger on: without enabled, or with false, it logs all the same"
        correction = fix("Remove the section", remove(document, ("comms_logger",)))
        yield Diagnostic(
            at_key("comms_logger"), what, write("nothing: remove the section to turn it off"), fix=correction
        )


@rule(
    code="DSC802",
    name="datastates-present",
    severity="error",
    family="silent",
    summary="datastates_ckpt is on although it is not enabled.",
    reason="Every value but false turns it on (datastates/config.py), and another package is needed then.",
    wrong=config(datastates_ckpt={"enabled": False}),
    right=config(datastates_ckpt=False),
    proof=raises("Please install DataStates"),
)
def datastates_present(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get("datastates_ckpt", default=False)
    if value is None or (isinstance(value, dict) and value.get("enabled") is False):
        what = f"{show(value)} turns DataStates on: everything but false does"
        yield Diagnostic(at("datastates_ckpt"), what, write("nothing: remove the key to turn it off"))


_INERT: tuple[tuple[Path, str], ...] = (
    (("disable_allgather",), "nothing: remove the key"),
    (("pipeline", "stages"), "num_stages of PipelineModule, in the program"),
    (("pipeline", "partition"), "partition_method of PipelineModule, in the program"),
    (("pipeline", "seed_layers"), "seed_layers of PipelineModule, in the program"),
)


@rule(
    code="DSC803",
    name="inert-key",
    severity="warning",
    family="silent",
    summary="A key that DeepSpeed reads and never uses.",
    reason="Left from former versions (runtime/config.py).",
    wrong=config(disable_allgather=True),
    right=config(),
    proof=accepts("the key has no effect"),
)
def inert_key(document: Document, context: Context) -> Iterator[Diagnostic]:
    for path, instead in _INERT:
        # Hugging Face does not read this section at all, which another rule reports.
        if document.has(*path) and not (path[0] == "pipeline" and hugging_face(context)):
            yield Diagnostic(at_key(*path), f'DeepSpeed accepts "{path[-1]}" and never looks at it', write(instead))


@rule(
    code="DSC804",
    name="aio-unused",
    severity="info",
    family="silent",
    summary="aio without anything that reads or writes by it.",
    reason="Only offloading to NVMe and checkpoint writers do (runtime/swap_tensor/aio_config.py).",
    wrong=config(aio={"block_size": 1048576}),
    right=zero(3, also={"aio": {"block_size": 1048576}, "checkpoint": {"writer": {"type": "python"}}}),
    proof=accepts("the section has no effect"),
)
def aio_unused(document: Document, context: Context) -> Iterator[Diagnostic]:
    swaps = "nvme" in (offload(document, "offload_param"), offload(document, "offload_optimizer"))
    writes = isinstance(document.get("checkpoint", "writer"), dict)
    if section(document, "aio") and not swaps and not writes:
        yield Diagnostic(
            at_key("aio"), "aio has no effect without offloading to nvme or a checkpoint writer", write("nothing")
        )


_TAGS = ("WARN", "IGNORE", "FAIL")
_WRITERS = {"type": ("MOCK", "PYTHON", "FAST"), "data_parallel": ("REPLICA", "SOCKET", "MACHINE")}


@rule(
    code="DSC810",
    name="tag-validation",
    severity="error",
    family="silent",
    summary="checkpoint.tag_validation is not known.",
    reason="Checked when the configuration is read (runtime/config.py); null is refused, too.",
    wrong=config(checkpoint={"tag_validation": "strict"}),
    right=config(checkpoint={"tag_validation": "Fail"}),
    proof=raises("invalid tag_validation value"),
)
def tag_validation(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("checkpoint", "tag_validation")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, str) and value.upper() in _TAGS):
        yield Diagnostic(at(*path), f"{show(value)} is not known (allowed: Warn, Ignore, Fail)", write('"Warn"'))


@rule(
    code="DSC811",
    name="checkpoint-writer",
    severity="error",
    family="silent",
    summary="A kind of checkpoint writer that DeepSpeed does not know.",
    reason="Checked when the configuration is read (runtime/model_checkpointing/config.py).",
    wrong=config(checkpoint={"writer": {"type": "quick"}}),
    right=zero(3, also={"checkpoint": {"writer": {"type": "python"}}}),
    proof=raises("contains invalid value QUICK for type"),
)
def checkpoint_writer(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key, allowed in _WRITERS.items():
        value = document.get("checkpoint", "writer", key)
        if value is not None and not (isinstance(value, str) and value.upper() in allowed):
            what = f"{show(value)} is not known (allowed: {listed(allowed)})"
            yield Diagnostic(at("checkpoint", "writer", key), what, write(f'"{allowed[-1]}"'))


@rule(
    code="DSC812",
    name="parallel-write-boolean",
    severity="error",
    family="silent",
    summary="checkpoint.parallel_write.pipeline_stage is no boolean.",
    reason="Checked when the configuration is read (runtime/config.py).",
    wrong=config(checkpoint={"parallel_write": {"pipeline_stage": "true"}}),
    right=config(checkpoint={"parallel_write": {"pipeline_stage": True}}),
    proof=raises("expecting: true or false"),
)
def parallel_write_boolean(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("checkpoint", "parallel_write", "pipeline_stage")
    value = document.get(*path)
    if document.has(*path) and not (isinstance(value, bool) or number(value) in (0, 1)):
        yield Diagnostic(at(*path), f"{show(value)} is refused (allowed: true, false)", write("true"))


_LEVELS = ("debug", "info", "warning", "error", "critical")


@rule(
    code="DSC813",
    name="log-level",
    severity="error",
    family="silent",
    summary="log_level is not known.",
    reason="Checked by the engine (utils/logging.py).",
    wrong=config(log_level="loud"),
    right=config(log_level="warning"),
    proof=raises("is not one of the valid logging levels"),
)
def log_level(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get("log_level")
    if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _LEVELS):
        yield Diagnostic(
            at("log_level"), f"{show(value)} is not known (allowed: {listed(_LEVELS)})", write('"warning"')
        )


@rule(
    code="DSC814",
    name="vocabulary-not-aligned",
    severity="info",
    family="silent",
    summary="vocabulary_size is no multiple of 8.",
    reason="DeepSpeed only warns (runtime/config.py); nothing else reads the key.",
    wrong=config(vocabulary_size=50257),
    right=config(vocabulary_size=50264),
    proof=warns("is not aligned to 8"),
)
def vocabulary_not_aligned(document: Document, context: Context) -> Iterator[Diagnostic]:
    size = number(document.get("vocabulary_size"))
    if size is not None and size % 8:
        what = f"{show(size)} is no multiple of 8, which tensor cores want"
        yield Diagnostic(at("vocabulary_size"), what, write(f"{-(-int(size) // 8) * 8}, and pad the embedding"))


@rule(
    code="DSC815",
    name="curriculum-without-metrics",
    severity="error",
    family="silent",
    summary="Curriculum learning without metrics.",
    reason="Asserted when the configuration is read (runtime/data_pipeline/config.py).",
    wrong=config(
        data_efficiency={
            "enabled": True,
            "data_sampling": {"enabled": True, "curriculum_learning": {"enabled": True}},
        }
    ),
    right=config(data_efficiency={"enabled": True, "data_sampling": {"enabled": True}}),
    proof=raises("curriculum_metrics must be specified"),
)
def curriculum_without_metrics(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("data_efficiency", "data_sampling", "curriculum_learning")
    if section(document, *path).get("enabled") is True and not document.has(*path, "curriculum_metrics"):
        yield Diagnostic(
            at_key(*path),
            "curriculum_learning without curriculum_metrics",
            write('"curriculum_metrics": {...} besides'),
        )


@rule(
    code="DSC816",
    name="dynamic-batching-without-tokens",
    severity="error",
    family="silent",
    summary="Dynamic batching without a number of tokens.",
    reason="Asserted when the configuration is read (runtime/data_pipeline/config.py).",
    wrong=config(data_efficiency={"enabled": True, "data_sampling": {"dynamic_batching": {"enabled": True}}}),
    right=config(
        data_efficiency={
            "enabled": True,
            "data_sampling": {"dynamic_batching": {"enabled": True, "max_tokens": 4096}},
        }
    ),
    proof=raises("max_tokens must be specified"),
)
def dynamic_batching_without_tokens(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("data_efficiency", "data_sampling", "dynamic_batching")
    if section(document, *path).get("enabled") and not document.has(*path, "max_tokens"):
        yield Diagnostic(
            at_key(*path), "dynamic_batching without max_tokens", write('"max_tokens": 4096 besides, for instance')
        )


@rule(
    code="DSC817",
    name="steps-per-print-zero",
    severity="error",
    family="silent",
    summary="steps_per_print is 0.",
    reason="The number of the step is divided by it (runtime/engine.py).",
    wrong=trained(steps_per_print=0),
    right=trained(steps_per_print=10),
    proof=accepts("the first step ends with ZeroDivisionError"),
)
def steps_per_print_zero(document: Document, context: Context) -> Iterator[Diagnostic]:
    if integer(document.get("steps_per_print")) == 0:
        yield Diagnostic(
            at("steps_per_print"),
            "0 divides by zero at the first step (allowed: 1 or more)",
            write("null for no prints"),
        )


@rule(
    code="DSC818",
    name="contiguous-checkpointing",
    severity="warning",
    family="silent",
    summary="contiguous_memory_optimization without what it needs.",
    reason=(
        "Asserted where a program calls deepspeed.checkpointing.configure "
        "(runtime/activation_checkpointing/checkpointing.py); where none does, the section has no effect. The number "
        "of checkpoints, which it needs too, mostly comes from the program."
    ),
    wrong=config(activation_checkpointing={"contiguous_memory_optimization": True}),
    right=config(
        activation_checkpointing={
            "contiguous_memory_optimization": True,
            "partition_activations": True,
        }
    ),
    proof=accepts("deepspeed.checkpointing.configure fails later"),
)
def contiguous_checkpointing(document: Document, context: Context) -> Iterator[Diagnostic]:
    settings = section(document, "activation_checkpointing")
    alone = settings.get("contiguous_memory_optimization") is True and not settings.get("partition_activations")
    if alone and not hugging_face(context):
        path = ("activation_checkpointing", "contiguous_memory_optimization")
        yield Diagnostic(
            at(*path), "true needs partition_activations", write('"partition_activations": true besides, or false')
        )


@rule(
    code="DSC819",
    name="autotuning-directory",
    severity="error",
    family="silent",
    summary="A directory of the autotuner is empty.",
    reason="Asserted when the configuration is read, enabled or not (autotuning/config.py).",
    wrong=config(autotuning={"enabled": False, "results_dir": ""}),
    right=config(autotuning={"enabled": False, "results_dir": "results"}),
    proof=raises("results_dir cannot be empty"),
)
def autotuning_directory(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in ("results_dir", "exps_dir"):
        value = document.get("autotuning", key, default="given")
        if not value:
            yield Diagnostic(
                at("autotuning", key), f"{show(value)} is refused (allowed: a path)", write('"autotuning_results"')
            )
