"""Rules on precision: the loss scale of fp16, and autocast."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, finding
from deepspeed_compress.tools.lint.values import number, show


@rule("DSC309", "error")
def loss_scale_range(document: Document, context: Context) -> Findings:
    """fp16.loss_scale is negative or a boolean.

    0 means dynamic scaling, and a positive number is a fixed scale (runtime/precision_config.py).

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": -1}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 0}}
    Proof: raises loss_scale must be
    """
    value = document.get("fp16", "loss_scale")
    found = number(value)
    if isinstance(value, bool) or (found is not None and found < 0):
        what = f"{show(value)} is not a loss scale (allowed: 0 for a dynamic one, or a positive number)"
        yield finding(("fp16", "loss_scale"), what, "0")


def _dynamic(document: Document) -> bool:
    return document.fp16 and document.number("fp16", "loss_scale", default=0) == 0


@rule("DSC310", "error")
def loss_scale_window_range(document: Document, context: Context) -> Findings:
    """The window or the minimum of the dynamic loss scale is not positive.

    The scaler divides by the window, and a minimum of zero lets the scale vanish (runtime/precision_config.py).

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_window": 0}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale_window": 1000}}
    Proof: raises loss_scale_window must be > 0
    """
    for key in ("loss_scale_window", "min_loss_scale"):
        value = document.get("fp16", key)
        found = number(value)
        if isinstance(value, bool) or (found is not None and found <= 0 and _dynamic(document)):
            what = f"{show(value)} is refused with a dynamic loss scale (allowed: 1 or more)"
            yield finding(("fp16", key), what, "1000" if key == "loss_scale_window" else "1")


_DYNAMIC_ONLY = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""Keys of a dynamic scale with their defaults. A default value does not show what the user wants."""


@rule("DSC311", "warning")
def fixed_loss_scale(document: Document, context: Context) -> Findings:
    """A fixed loss scale is given together with settings of the dynamic one.

    With loss_scale above 0, there is no dynamic scaler (runtime/engine.py), and its settings have no effect.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "loss_scale": 128, "initial_scale_power": 8}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "loss_scale": 0, "initial_scale_power": 8}}
    Proof: accepts the settings of the dynamic scale have no effect
    """
    scale = document.number("fp16", "loss_scale")
    unused = [key for key, value in document.section("fp16").items() if _DYNAMIC_ONLY.get(key, value) != value]
    if scale is not None and scale > 0 and unused:
        what = f"{show(scale)} is a fixed scale, with which {', '.join(unused)} have no effect (allowed: 0)"
        yield finding(("fp16", "loss_scale"), what, "0 for a dynamic scale, or leave the others out")


@rule("DSC312", "warning")
def huge_initial_loss_scale(document: Document, context: Context) -> Findings:
    """The loss scale starts so high that the first steps are lost.

    The scale starts at 2 to the power of initial_scale_power (runtime/precision_config.py). The largest number in fp16
    is 65504, and each overflow halves the scale and skips a step.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "initial_scale_power": 40}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "initial_scale_power": 16}}
    Proof: accepts steps are skipped until the scale has decreased
    """
    power = document.number("fp16", "initial_scale_power")
    if power is not None and power > 32:
        what = f"{show(power)} starts with a loss scale at which every gradient overflows (useful: 8 to 24)"
        yield finding(("fp16", "initial_scale_power"), what, "16")


@rule("DSC313", "error")
def autocast_with_quantized_weights(document: Document, context: Context) -> Findings:
    """torch_autocast is used together with zero_quantized_weights.

    DeepSpeed asserts that they are not combined (runtime/torch_autocast.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_weights": true},
        "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Proof: raises Cannot enable both torch autocast and zero quantized weights
    """
    if document.is_true("torch_autocast", "enabled") and document.is_true(ZERO, "zero_quantized_weights"):
        yield finding((ZERO, "zero_quantized_weights"), "true is refused together with torch_autocast", "false")


@rule("DSC314", "warning")
def inputs_cast_without_fp16(document: Document, context: Context) -> Findings:
    """fp16.auto_cast is true, but fp16 is off.

    The engine casts the model's floating-point inputs to fp16 whether fp16 is on or not (runtime/engine.py). The first
    step then fails, because the weights have another dtype. Token ids are not cast.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": false, "auto_cast": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "auto_cast": true}}
    Proof: accepts inputs are in fp16, weights are not
    """
    path = ("fp16", "auto_cast")
    if document.is_true(*path) and document.truth("fp16", "enabled", default=False) is False:
        what = "true casts the inputs to fp16, and fp16 is off: the model is in another format"
        yield finding(path, what, 'false, or "enabled": true', fix("Write false", replace(document, path, False)))


@rule("DSC315", "error")
def autocast_modules_without_package(document: Document, context: Context) -> Findings:
    """torch_autocast.lower_precision_safe_modules does not list importable classes.

    Each name is split at its last dot and imported (runtime/torch_autocast.py).

    Wrong: {"train_batch_size": 8,
        "torch_autocast": {"enabled": true, "dtype": "bf16", "lower_precision_safe_modules": ["Linear"]}}
    Right: {"train_batch_size": 8,
        "torch_autocast": {"enabled": true, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.Linear"]}}
    Proof: raises Failed to import lower precision safe module
    """
    value = document.get("torch_autocast", "lower_precision_safe_modules")
    names = value if isinstance(value, list) else [] if value is None else [value]
    bad = [item for item in names if not (isinstance(item, str) and "." in item)]
    if bad or isinstance(value, str):
        what = f"{show(value)} is not a list of classes with their packages"
        yield finding(("torch_autocast", "lower_precision_safe_modules"), what, '["torch.nn.Linear"], for instance')
