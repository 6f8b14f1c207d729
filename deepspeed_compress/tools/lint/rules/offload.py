"""Rules on offloading and ZenFlow: settings that contradict the stage or each other."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, finding, key_finding
from deepspeed_compress.tools.lint.values import AUTO, integer, listed, show


@rule("DSC402", "error")
def offload_ratio_without_stage_3(document: Document, context: Context) -> Findings:
    """The optimizer is offloaded in part below stage 3.

    Asserted when the configuration is read (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}
    Proof: raises Partial offloading only supported for ZeRO Stage 3
    """
    ratio = document.number(ZERO, "offload_optimizer", "ratio")
    if ratio is not None and ratio < 1 and document.stage in (0, 1, 2):
        what = f"{show(ratio)} offloads a part, which stage {document.stage} cannot (allowed: 1.0)"
        yield finding((ZERO, "offload_optimizer", "ratio"), what, "1.0, or stage 3")


@rule("DSC403", "warning")
def offload_param_without_stage_3(document: Document, context: Context) -> Findings:
    """offload_param has no effect below stage 3.

    Only the optimizer of stage 3 receives this setting (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_param": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
    Proof: accepts parameters stay on the device
    """
    if document.offload("offload_param") and document.stage in (0, 1, 2):
        what = f"parameters are offloaded with stage 3 only, and the stage is {document.stage}"
        yield key_finding((ZERO, "offload_param"), what, '"stage": 3, or remove the key')


@rule("DSC404", "warning")
def offload_optimizer_without_zero(document: Document, context: Context) -> Findings:
    """offload_optimizer has no effect with stage 0.

    Only the optimizers of ZeRO offload (runtime/engine.py). DeepSpeed creates the CPU optimizer nevertheless.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 0, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts gradients and weights are not offloaded
    """
    if document.offload("offload_optimizer") and document.stage == 0 and "stage" in document.section(ZERO):
        what = "the optimizer is offloaded by ZeRO, and the stage is 0"
        yield key_finding((ZERO, "offload_optimizer"), what, '"stage": 1 to 3, or remove the key')


@rule("DSC405", "warning")
def super_offload_without_stage_3(document: Document, context: Context) -> Findings:
    """super_offload has no effect below stage 3.

    Only stage 3 reads it (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "super_offload": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts the usual offloading is used
    """
    path = (ZERO, "offload_optimizer", "super_offload")
    if document.is_true(*path) and document.stage in (0, 1, 2):
        what = f"true has no effect with stage {document.stage} (allowed: with stage 3)"
        yield finding(path, what, "stage 3, or false")


@rule("DSC406", "error")
def nvme_without_path(document: Document, context: Context) -> Findings:
    """Offloading to NVMe lacks a path.

    Stage 3 joins the path with file names (runtime/zero/stage3.py), or asserts that it is given
    (runtime/zero/partition_parameters.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Proof: raises NoneType|nvme_path
    """
    for what in ("offload_param", "offload_optimizer"):
        missing = document.get(ZERO, what, "nvme_path") in (None, "")
        if document.offload(what) == "nvme" and missing and document.stage == 3:
            yield finding((ZERO, what, "device"), '"nvme" without nvme_path', '"nvme_path": "/local_nvme" as well')


@rule("DSC407", "warning")
def nvme_without_stage_3(document: Document, context: Context) -> Findings:
    """Offloading the optimizer to NVMe below stage 3 uses the CPU.

    Stages 1 and 2 treat every device except "none" as the CPU (runtime/zero/stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts the optimizer is in host memory
    """
    if document.offload("offload_optimizer") == "nvme" and document.stage in (1, 2):
        what = f'"nvme" means "cpu" with stage {document.stage}: only stage 3 swaps to disks'
        path = (ZERO, "offload_optimizer", "device")
        yield finding(path, what, '"cpu", or stage 3', fix("Write cpu", replace(document, path, "cpu")))


@rule("DSC415", "info")
def offload_of_client_optimizer(document: Document, context: Context) -> Findings:
    """The optimizer is offloaded, but the file has none.

    An optimizer that the program passes must be DeepSpeedCPUAdam or DeepSpeedCPULion, unless
    zero_force_ds_cpu_optimizer is false (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    Context: {"framework": "deepspeed"}
    Proof: accepts a torch optimizer that the program passes is refused with ZeRORuntimeException
    """
    forced = document.get("zero_force_ds_cpu_optimizer", default=True) is True
    active = document.offload("offload_optimizer") and document.stage in (1, 2, 3)
    if active and forced and not document.has("optimizer") and context.framework == "deepspeed":
        what = 'without "optimizer" the one of the program must be DeepSpeedCPUAdam, or it is refused'
        instead = '"optimizer": {"type": "AdamW", ...}, or "zero_force_ds_cpu_optimizer": false'
        yield key_finding((ZERO, "offload_optimizer"), what, instead)


_ZENFLOW = (ZERO, "zenflow")
_STRATEGIES = ("auto", "step", "epoch")


@rule("DSC418", "error")
def zenflow_without_offload(document: Document, context: Context) -> Findings:
    """ZenFlow is used without an offloaded optimizer.

    ZenFlow overlaps the optimizer on the CPU (runtime/zenflow/zenflow_stage_1_and_2.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    Proof: raises Zenflow must be used with cpu offload
    """
    if document.zenflow and document.stage in (1, 2) and not document.offload("offload_optimizer"):
        what = "ZenFlow needs an optimizer on the CPU"
        yield key_finding(_ZENFLOW, what, '"offload_optimizer": {"device": "cpu"} as well')


@rule("DSC419", "error")
def zenflow_strategy(document: Document, context: Context) -> Findings:
    """ZenFlow does not know the selection strategy.

    Checked when the configuration is read (runtime/zenflow/zenflow_config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "random"},
        "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "auto"},
        "offload_optimizer": {"device": "cpu"}}}
    Proof: raises select_strategy must be one of
    """
    value = document.get(*_ZENFLOW, "select_strategy", default=AUTO)
    if document.zenflow and isinstance(value, str) and value not in _STRATEGIES:
        what = f"{show(value)} is not known (allowed: {listed(_STRATEGIES)})"
        yield finding((*_ZENFLOW, "select_strategy"), what, '"auto", "step" or "epoch"')


@rule("DSC420", "error")
def zenflow_select_interval(document: Document, context: Context) -> Findings:
    """ZenFlow's selection interval contradicts its strategy.

    The strategy auto sets the interval and refuses a given one. The strategies step and epoch need one
    (runtime/zenflow/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "step"},
        "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {"select_strategy": "step", "select_interval": 4},
        "offload_optimizer": {"device": "cpu"}}}
    Proof: raises select_interval must be a number
    """
    settings = document.section(*_ZENFLOW)
    strategy, interval = settings.get("select_strategy", AUTO), settings.get("select_interval", AUTO)
    if not document.zenflow or document.stage == 0:
        return
    if strategy == AUTO and integer(interval) is not None:
        what = f'{show(interval)} contradicts select_strategy "auto", which sets it (allowed: "auto")'
        yield finding((*_ZENFLOW, "select_interval"), what, '"auto", or another select_strategy')
    elif strategy in ("step", "epoch") and integer(interval) is None:
        what = f'"{strategy}" needs a select_interval, and it is {show(interval)} (allowed: a number)'
        yield finding((*_ZENFLOW, "select_strategy"), what, '"select_interval": 4 as well, for instance')


@rule("DSC421", "error")
def zenflow_update_interval(document: Document, context: Context) -> Findings:
    """ZenFlow selects more often than it updates.

    Checked by the engine (runtime/zenflow/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2,
        "zenflow": {"select_strategy": "step", "select_interval": 2, "update_interval": 4},
        "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2,
        "zenflow": {"select_strategy": "step", "select_interval": 4, "update_interval": 4},
        "offload_optimizer": {"device": "cpu"}}}
    Proof: raises Select interval must be greater or equal
    """
    settings = document.section(*_ZENFLOW)
    select, update = integer(settings.get("select_interval")), integer(settings.get("update_interval"))
    if settings.get("select_strategy") == "step" and select is not None and update is not None and select < update:
        what = f"{select} is less than update_interval {update} (allowed: at least as many)"
        yield finding((*_ZENFLOW, "select_interval"), what, f"{update} or more")


@rule("DSC422", "warning")
def zenflow_without_zero(document: Document, context: Context) -> Findings:
    """ZenFlow has no effect with stage 0.

    Only the optimizers of ZeRO support ZenFlow (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 0, "zenflow": {}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "zenflow": {}, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts the usual optimizer is used
    """
    if document.zenflow and document.stage == 0 and "stage" in document.section(ZERO):
        yield key_finding(_ZENFLOW, "ZenFlow has no effect with stage 0", "stage 1 to 3, or remove the key")
