"""Precision: the loss scale of fp16, and autocast."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import (
    ZERO,
    config,
    fp16,
    is_true,
    number,
    section,
    show,
    trained,
    truth,
    zero,
)

_FAMILY = "precision"


def _loss_scale(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("fp16", "loss_scale")
    negative = number(value) is not None and (number(value) or 0) < 0
    if isinstance(value, bool) or negative:
        what = f"{show(value)} is no loss scale (allowed: 0 for a dynamic one, or a positive number)"
        yield Hit(("fp16", "loss_scale"), what, "0")


def _dynamic(document: Document) -> bool:
    return fp16(document) and number(document.get("fp16", "loss_scale", default=0)) == 0


def _window(document: Document, context: Context) -> Iterator[Hit]:
    for key in ("loss_scale_window", "min_loss_scale"):
        value = document.get("fp16", key)
        found = number(value)
        if isinstance(value, bool) or (found is not None and found <= 0 and _dynamic(document)):
            what = f"{show(value)} is refused with a dynamic loss scale (allowed: 1 or more)"
            yield Hit(("fp16", key), what, "1000" if key == "loss_scale_window" else "1")


_DYNAMIC_ONLY = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""Keys of a dynamic scale, and their defaults, which tell nothing."""


def _static(document: Document, context: Context) -> Iterator[Hit]:
    scale = number(document.get("fp16", "loss_scale"))
    unused = [key for key, value in section(document, "fp16").items() if _DYNAMIC_ONLY.get(key, value) != value]
    if scale is not None and scale > 0 and unused:
        what = f"{show(scale)} is a fixed scale, with which {', '.join(unused)} have no effect (allowed: 0)"
        yield Hit(("fp16", "loss_scale"), what, "0 for a dynamic scale, or leave the others out")


def _large_power(document: Document, context: Context) -> Iterator[Hit]:
    power = number(document.get("fp16", "initial_scale_power"))
    if power is not None and power > 32:
        what = f"{show(power)} begins with a loss scale at which every gradient overflows (useful: 8 to 24)"
        yield Hit(("fp16", "initial_scale_power"), what, "16")


def _autocast_weights(document: Document, context: Context) -> Iterator[Hit]:
    if is_true(document, "torch_autocast", "enabled") and is_true(document, ZERO, "zero_quantized_weights"):
        yield Hit((ZERO, "zero_quantized_weights"), "true is refused together with torch_autocast", "false")


def _cast_inputs(document: Document, context: Context) -> Iterator[Hit]:
    path = ("fp16", "auto_cast")
    if is_true(document, *path) and truth(document.get("fp16", "enabled", default=False)) is False:
        what = "true casts the inputs to fp16, and fp16 is off: the model is in another format"
        yield Hit(path, what, 'false, or "enabled": true', fix=fix("Write false", replace(document, path, False)))


def _safe_modules(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("torch_autocast", "lower_precision_safe_modules")
    names = value if isinstance(value, list) else [] if value is None else [value]
    bad = [item for item in names if not (isinstance(item, str) and "." in item)]
    if bad or isinstance(value, str):
        what = f"{show(value)} is not a list of classes with their packages"
        yield Hit(("torch_autocast", "lower_precision_safe_modules"), what, '["torch.nn.Linear"], for instance')


RULES = (
    Rule(
        "DSC309",
        "loss-scale-range",
        "error",
        _FAMILY,
        "fp16.loss_scale is negative or a boolean.",
        "0 asks for dynamic scaling, a positive number is a fixed scale (runtime/precision_config.py).",
        config(fp16={"enabled": True, "loss_scale": -1}),
        config(fp16={"enabled": True, "loss_scale": 0}),
        _loss_scale,
        raises("loss_scale must be"),
    ),
    Rule(
        "DSC310",
        "loss-scale-window-range",
        "error",
        _FAMILY,
        "The window or the minimum of the dynamic loss scale is not positive.",
        "The scaler divides by the window, and a minimum of zero lets the scale vanish (runtime/precision_config.py).",
        config(fp16={"enabled": True, "loss_scale_window": 0}),
        config(fp16={"enabled": True, "loss_scale_window": 1000}),
        _window,
        raises("loss_scale_window must be > 0"),
    ),
    Rule(
        "DSC311",
        "fixed-loss-scale",
        "warning",
        _FAMILY,
        "A fixed loss scale beside settings of the dynamic one.",
        "With loss_scale above 0 the dynamic scaler is not made (runtime/engine.py), and its settings have no effect.",
        trained(fp16={"enabled": True, "loss_scale": 128, "initial_scale_power": 8}),
        trained(fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 8}),
        _static,
        accepts("the settings of the dynamic scale have no effect"),
    ),
    Rule(
        "DSC312",
        "huge-initial-loss-scale",
        "warning",
        _FAMILY,
        "The loss scale begins so high that the first steps are lost.",
        "The exponent of two is initial_scale_power (runtime/precision_config.py); fp16 ends at 65504, and each "
        "overflow halves the scale and skips a step.",
        trained(fp16={"enabled": True, "initial_scale_power": 40}),
        trained(fp16={"enabled": True, "initial_scale_power": 16}),
        _large_power,
        accepts("steps are skipped until the scale has come down"),
    ),
    Rule(
        "DSC313",
        "autocast-with-quantized-weights",
        "error",
        _FAMILY,
        "torch_autocast together with zero_quantized_weights.",
        "Asserted by runtime/torch_autocast.py.",
        zero(3, zero_quantized_weights=True, also={"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
        zero(3, also={"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
        _autocast_weights,
        raises("Cannot enable both torch autocast and zero quantized weights"),
    ),
    Rule(
        "DSC314",
        "inputs-cast-without-fp16",
        "warning",
        _FAMILY,
        "fp16.auto_cast with fp16 off.",
        "The engine casts what goes into the model whether fp16 is on or not (runtime/engine.py): floating-point "
        "inputs meet weights of another type and the first step fails; token numbers stay as they are.",
        trained(fp16={"enabled": False, "auto_cast": True}),
        trained(fp16={"enabled": True, "auto_cast": True}),
        _cast_inputs,
        accepts("inputs are in fp16, weights are not"),
    ),
    Rule(
        "DSC315",
        "autocast-modules-without-package",
        "error",
        _FAMILY,
        "torch_autocast.lower_precision_safe_modules does not list importable classes.",
        "Each name is split at its last dot and imported (runtime/torch_autocast.py).",
        config(torch_autocast={"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["Linear"]}),
        config(torch_autocast={"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.Linear"]}),
        _safe_modules,
        raises("Failed to import lower precision safe module"),
    ),
)
