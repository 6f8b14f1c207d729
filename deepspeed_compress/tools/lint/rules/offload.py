"""Offloading and ZenFlow: settings that contradict the stage, or each other."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    ZERO,
    config,
    integer,
    is_true,
    listed,
    number,
    offload,
    section,
    show,
    stage,
    zero,
)

_FAMILY = "zero"


_NVME = {"device": "nvme", "nvme_path": "/tmp"}


def _ratio(document: Document, context: Context) -> Iterator[Hit]:
    ratio = number(document.get(ZERO, "offload_optimizer", "ratio"))
    if ratio is not None and ratio < 1 and stage(document) in (0, 1, 2):
        what = f"{show(ratio)} offloads a part, which stage {stage(document)} cannot (allowed: 1.0)"
        yield Hit((ZERO, "offload_optimizer", "ratio"), what, "1.0, or stage 3")


def _param_stage(document: Document, context: Context) -> Iterator[Hit]:
    if offload(document, "offload_param") and stage(document) in (0, 1, 2):
        what = f"parameters are offloaded with stage 3 only, and the stage is {stage(document)}"
        yield Hit((ZERO, "offload_param"), what, '"stage": 3, or remove the key', "key")


def _optimizer_stage(document: Document, context: Context) -> Iterator[Hit]:
    if offload(document, "offload_optimizer") and stage(document) == 0 and "stage" in section(document, ZERO):
        what = "the optimizer is offloaded by ZeRO, and the stage is 0"
        yield Hit((ZERO, "offload_optimizer"), what, '"stage": 1 to 3, or remove the key', "key")


def _super_offload(document: Document, context: Context) -> Iterator[Hit]:
    path = (ZERO, "offload_optimizer", "super_offload")
    if is_true(document, *path) and stage(document) in (0, 1, 2):
        yield Hit(path, f"true has no effect with stage {stage(document)} (allowed: with stage 3)", "stage 3, or false")


def _nvme_path(document: Document, context: Context) -> Iterator[Hit]:
    for what in ("offload_param", "offload_optimizer"):
        path = document.get(ZERO, what, "nvme_path")
        missing = path is None or path == ""
        if offload(document, what) == "nvme" and missing and stage(document) == 3:
            yield Hit((ZERO, what, "device"), '"nvme" without nvme_path', '"nvme_path": "/local_nvme" besides')


def _nvme_stage(document: Document, context: Context) -> Iterator[Hit]:
    if offload(document, "offload_optimizer") == "nvme" and stage(document) in (1, 2):
        what = f'"nvme" means "cpu" with stage {stage(document)}: only stage 3 swaps to disks'
        correction = fix("Write cpu", replace(document, (ZERO, "offload_optimizer", "device"), "cpu"))
        yield Hit((ZERO, "offload_optimizer", "device"), what, '"cpu", or stage 3', fix=correction)


def _unused_path(document: Document, context: Context) -> Iterator[Hit]:
    for what in ("offload_param", "offload_optimizer"):
        path = document.get(ZERO, what, "nvme_path")
        if isinstance(path, str) and path not in ("", "none", AUTO) and offload(document, what) == "cpu":
            yield Hit(
                (ZERO, what, "nvme_path"), 'has no effect with device "cpu"', '"device": "nvme", or remove the key'
            )
            return  # the other was copied with it


def _client_offload(document: Document, context: Context) -> Iterator[Hit]:
    forced = document.get("zero_force_ds_cpu_optimizer", default=True) is True
    active = offload(document, "offload_optimizer") and stage(document) in (1, 2, 3)
    if active and forced and not document.has("optimizer") and context.framework == "deepspeed":
        what = 'without "optimizer" the one of the program must be DeepSpeedCPUAdam, or it is refused'
        write = '"optimizer": {"type": "AdamW", ...}, or "zero_force_ds_cpu_optimizer": false'
        yield Hit((ZERO, "offload_optimizer"), what, write, "key")


def _zenflow(document: Document) -> bool:
    return isinstance(document.get(ZERO, "zenflow"), dict)


_ZENFLOW = (ZERO, "zenflow")


_STRATEGIES = ("auto", "step", "epoch")


def _zenflow_offload(document: Document, context: Context) -> Iterator[Hit]:
    if _zenflow(document) and stage(document) in (1, 2) and not offload(document, "offload_optimizer"):
        what = "ZenFlow needs an optimizer on the CPU"
        yield Hit(_ZENFLOW, what, '"offload_optimizer": {"device": "cpu"} besides', "key")


def _zenflow_strategy(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(*_ZENFLOW, "select_strategy", default=AUTO)
    if _zenflow(document) and isinstance(value, str) and value not in _STRATEGIES:
        what = f"{show(value)} is not known (allowed: {listed(_STRATEGIES)})"
        yield Hit((*_ZENFLOW, "select_strategy"), what, '"auto", "step" or "epoch"')


def _zenflow_interval(document: Document, context: Context) -> Iterator[Hit]:
    settings = section(document, *_ZENFLOW)
    strategy, interval = settings.get("select_strategy", AUTO), settings.get("select_interval", AUTO)
    if not _zenflow(document) or stage(document) == 0:
        return
    if strategy == AUTO and integer(interval) is not None:
        what = f'{show(interval)} contradicts select_strategy "auto", which sets it (allowed: "auto")'
        yield Hit((*_ZENFLOW, "select_interval"), what, '"auto", or another select_strategy')
    elif strategy in ("step", "epoch") and integer(interval) is None:
        what = f'"{strategy}" needs a select_interval, and it is {show(interval)} (allowed: a number)'
        yield Hit((*_ZENFLOW, "select_strategy"), what, '"select_interval": 4 besides, for instance')


def _zenflow_update(document: Document, context: Context) -> Iterator[Hit]:
    settings = section(document, *_ZENFLOW)
    select, update = integer(settings.get("select_interval")), integer(settings.get("update_interval"))
    if settings.get("select_strategy") == "step" and select is not None and update is not None and select < update:
        what = f"{select} is less than update_interval {update} (allowed: at least as many)"
        yield Hit((*_ZENFLOW, "select_interval"), what, f"{update} or more")


def _zenflow_stage0(document: Document, context: Context) -> Iterator[Hit]:
    if _zenflow(document) and stage(document) == 0 and "stage" in section(document, ZERO):
        yield Hit(_ZENFLOW, "ZenFlow has no effect with stage 0", "stage 1 to 3, or remove the key", "key")


RULES = (
    Rule(
        "DSC402",
        "offload-ratio-without-stage-3",
        "error",
        _FAMILY,
        "A part of the optimizer is to be offloaded below stage 3.",
        "Asserted when the configuration is read (runtime/zero/config.py).",
        zero(2, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        zero(3, offload_optimizer={"device": "cpu", "ratio": 0.5}),
        _ratio,
        raises("Partial offloading only supported for ZeRO Stage 3"),
    ),
    Rule(
        "DSC403",
        "offload-param-without-stage-3",
        "warning",
        _FAMILY,
        "Parameters are to be offloaded below stage 3.",
        "Only the optimizer of stage 3 is given this setting (runtime/engine.py).",
        zero(2, offload_param={"device": "cpu"}),
        zero(3, offload_param={"device": "cpu"}),
        _param_stage,
        accepts("parameters stay on the device"),
    ),
    Rule(
        "DSC404",
        "offload-optimizer-without-zero",
        "warning",
        _FAMILY,
        "The optimizer is to be offloaded with stage 0.",
        "Offloading is done by the optimizers of ZeRO (runtime/engine.py); the CPU optimizer is made all the same.",
        zero(0, offload_optimizer={"device": "cpu"}),
        zero(1, offload_optimizer={"device": "cpu"}),
        _optimizer_stage,
        accepts("gradients and weights are not offloaded"),
    ),
    Rule(
        "DSC405",
        "super-offload-without-stage-3",
        "warning",
        _FAMILY,
        "super_offload below stage 3.",
        "Only stage 3 looks at it (runtime/engine.py).",
        zero(2, offload_optimizer={"device": "cpu", "super_offload": True}),
        zero(2, offload_optimizer={"device": "cpu"}),
        _super_offload,
        accepts("the usual offloading is used"),
    ),
    Rule(
        "DSC406",
        "nvme-without-path",
        "error",
        _FAMILY,
        "Offloading to NVMe without a path.",
        "Stage 3 joins the path with names of files (runtime/zero/stage3.py), or asserts that it is there "
        "(runtime/zero/partition_parameters.py).",
        zero(3, offload_optimizer={"device": "nvme"}),
        zero(3, offload_optimizer={"device": "cpu"}),
        _nvme_path,
        raises("NoneType|nvme_path"),
    ),
    Rule(
        "DSC407",
        "nvme-without-stage-3",
        "warning",
        _FAMILY,
        "The optimizer is to be offloaded to NVMe below stage 3.",
        "Stages 1 and 2 take every device but none for the CPU (runtime/zero/stage_1_and_2.py).",
        zero(2, offload_optimizer=_NVME),
        zero(2, offload_optimizer={"device": "cpu"}),
        _nvme_stage,
        accepts("the optimizer is in host memory"),
    ),
    Rule(
        "DSC408",
        "nvme-path-unused",
        "info",
        _FAMILY,
        "nvme_path beside another device.",
        'Only device "nvme" reads the path (runtime/zero/stage3.py).',
        zero(3, offload_optimizer={"device": "cpu", "nvme_path": "/local_nvme"}),
        zero(3, offload_optimizer={"device": "cpu"}),
        _unused_path,
        accepts("nothing is written to the path"),
    ),
    Rule(
        "DSC415",
        "offload-of-client-optimizer",
        "info",
        _FAMILY,
        "The optimizer is offloaded, and there is none in the file.",
        "One that the program passes must be DeepSpeedCPUAdam (or DeepSpeedCPULion), unless "
        "zero_force_ds_cpu_optimizer is false (runtime/engine.py).",
        config(zero_optimization={"stage": 3, "offload_optimizer": {"device": "cpu"}}),
        zero(3, offload_optimizer={"device": "cpu"}),
        _client_offload,
        accepts("a torch optimizer that the program passes is refused with ZeRORuntimeException"),
        {"framework": "deepspeed"},
    ),
    Rule(
        "DSC418",
        "zenflow-without-offload",
        "error",
        _FAMILY,
        "ZenFlow without an offloaded optimizer.",
        "ZenFlow overlaps the optimizer on the CPU (runtime/zenflow/zenflow_stage_1_and_2.py).",
        zero(2, zenflow={}),
        zero(2, zenflow={}, offload_optimizer={"device": "cpu"}),
        _zenflow_offload,
        raises("Zenflow must be used with cpu offload"),
    ),
    Rule(
        "DSC419",
        "zenflow-strategy",
        "error",
        _FAMILY,
        "A selection strategy that ZenFlow does not know.",
        "Checked when the configuration is read (runtime/zenflow/zenflow_config.py).",
        zero(2, zenflow={"select_strategy": "random"}, offload_optimizer={"device": "cpu"}),
        zero(2, zenflow={"select_strategy": "auto"}, offload_optimizer={"device": "cpu"}),
        _zenflow_strategy,
        raises("select_strategy must be one of"),
    ),
    Rule(
        "DSC420",
        "zenflow-select-interval",
        "error",
        _FAMILY,
        "ZenFlow's selection interval contradicts its strategy.",
        "auto sets the interval itself and stops at one that is given; step and epoch need one "
        "(runtime/zenflow/engine.py).",
        zero(2, zenflow={"select_strategy": "step"}, offload_optimizer={"device": "cpu"}),
        zero(2, zenflow={"select_strategy": "step", "select_interval": 4}, offload_optimizer={"device": "cpu"}),
        _zenflow_interval,
        raises("select_interval must be a number"),
    ),
    Rule(
        "DSC421",
        "zenflow-update-interval",
        "error",
        _FAMILY,
        "ZenFlow updates less often than it selects.",
        "Checked by the engine (runtime/zenflow/engine.py).",
        zero(
            2,
            zenflow={"select_strategy": "step", "select_interval": 2, "update_interval": 4},
            offload_optimizer={"device": "cpu"},
        ),
        zero(
            2,
            zenflow={"select_strategy": "step", "select_interval": 4, "update_interval": 4},
            offload_optimizer={"device": "cpu"},
        ),
        _zenflow_update,
        raises("Select interval must be greater or equal"),
    ),
    Rule(
        "DSC422",
        "zenflow-without-zero",
        "warning",
        _FAMILY,
        "ZenFlow with stage 0.",
        "Only the optimizers of ZeRO know ZenFlow (runtime/engine.py).",
        zero(0, zenflow={}),
        zero(2, zenflow={}, offload_optimizer={"device": "cpu"}),
        _zenflow_stage0,
        accepts("the usual optimizer is used"),
    ),
)
