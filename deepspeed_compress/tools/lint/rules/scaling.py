"""Rules on precision: the loss scale of fp16, and autocast."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule
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


@rule(
    code="DSC309",
    name="loss-scale-range",
    severity="error",
    family="precision",
    summary="fp16.loss_scale is negative or a boolean.",
    reason="0 asks for dynamic scaling, a positive number is a fixed scale (runtime/precision_config.py).",
    wrong=config(fp16={"enabled": True, "loss_scale": -1}),
    right=config(fp16={"enabled": True, "loss_scale": 0}),
    proof=raises("loss_scale must be"),
)
def loss_scale_range(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get("fp16", "loss_scale")
    negative = number(value) is not None and (number(value) or 0) < 0
    if isinstance(value, bool) or negative:
        what = f"{show(value)} is no loss scale (allowed: 0 for a dynamic one, or a positive number)"
        yield Diagnostic(at("fp16", "loss_scale"), what, write("0"))


def _dynamic(document: Document) -> bool:
    return fp16(document) and number(document.get("fp16", "loss_scale", default=0)) == 0


@rule(
    code="DSC310",
    name="loss-scale-window-range",
    severity="error",
    family="precision",
    summary="The window or the minimum of the dynamic loss scale is not positive.",
    reason=(
        "The scaler divides by the window, and a minimum of zero lets the scale vanish (runtime/precision_config.py)."
    ),
    wrong=config(fp16={"enabled": True, "loss_scale_window": 0}),
    right=config(fp16={"enabled": True, "loss_scale_window": 1000}),
    proof=raises("loss_scale_window must be > 0"),
)
def loss_scale_window_range(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in ("loss_scale_window", "min_loss_scale"):
        value = document.get("fp16", key)
        found = number(value)
        if isinstance(value, bool) or (found is not None and found <= 0 and _dynamic(document)):
            what = f"{show(value)} is refused with a dynamic loss scale (allowed: 1 or more)"
            yield Diagnostic(at("fp16", key), what, write("1000" if key == "loss_scale_window" else "1"))


_DYNAMIC_ONLY = {
    "initial_scale_power": 16,
    "loss_scale_window": 1000,
    "hysteresis": 2,
    "consecutive_hysteresis": False,
    "min_loss_scale": 1,
}
"""Keys of a dynamic scale with their defaults. A default value does not show what the user wants."""


@rule(
    code="DSC311",
    name="fixed-loss-scale",
    severity="warning",
    family="precision",
    summary="A fixed loss scale beside settings of the dynamic one.",
    reason=(
        "With loss_scale above 0 the dynamic scaler is not made (runtime/engine.py), and its settings have no effect."
    ),
    wrong=trained(fp16={"enabled": True, "loss_scale": 128, "initial_scale_power": 8}),
    right=trained(fp16={"enabled": True, "loss_scale": 0, "initial_scale_power": 8}),
    proof=accepts("the settings of the dynamic scale have no effect"),
)
def fixed_loss_scale(document: Document, context: Context) -> Iterator[Diagnostic]:
    scale = number(document.get("fp16", "loss_scale"))
    unused = [key for key, value in section(document, "fp16").items() if _DYNAMIC_ONLY.get(key, value) != value]
    if scale is not None and scale > 0 and unused:
        what = f"{show(scale)} is a fixed scale, with which {', '.join(unused)} have no effect (allowed: 0)"
        yield Diagnostic(at("fp16", "loss_scale"), what, write("0 for a dynamic scale, or leave the others out"))


@rule(
    code="DSC312",
    name="huge-initial-loss-scale",
    severity="warning",
    family="precision",
    summary="The loss scale begins so high that the first steps are lost.",
    reason=(
        "The exponent of two is initial_scale_power (runtime/precision_config.py); fp16 ends at 65504, and each "
        "overflow halves the scale and skips a step."
    ),
    wrong=trained(fp16={"enabled": True, "initial_scale_power": 40}),
    right=trained(fp16={"enabled": True, "initial_scale_power": 16}),
    proof=accepts("steps are skipped until the scale has come down"),
)
def huge_initial_loss_scale(document: Document, context: Context) -> Iterator[Diagnostic]:
    power = number(document.get("fp16", "initial_scale_power"))
    if power is not None and power > 32:
        what = f"{show(power)} begins with a loss scale at which every gradient overflows (useful: 8 to 24)"
        yield Diagnostic(at("fp16", "initial_scale_power"), what, write("16"))


@rule(
    code="DSC313",
    name="autocast-with-quantized-weights",
    severity="error",
    family="precision",
    summary="torch_autocast together with zero_quantized_weights.",
    reason="Asserted by runtime/torch_autocast.py.",
    wrong=zero(3, zero_quantized_weights=True, also={"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
    right=zero(3, also={"torch_autocast": {"enabled": True, "dtype": "bf16"}}),
    proof=raises("Cannot enable both torch autocast and zero quantized weights"),
)
def autocast_with_quantized_weights(document: Document, context: Context) -> Iterator[Diagnostic]:
    if is_true(document, "torch_autocast", "enabled") and is_true(document, ZERO, "zero_quantized_weights"):
        yield Diagnostic(
            at(ZERO, "zero_quantized_weights"), "true is refused together with torch_autocast", write("false")
        )


@rule(
    code="DSC314",
    name="inputs-cast-without-fp16",
    severity="warning",
    family="precision",
    summary="fp16.auto_cast with fp16 off.",
    reason=(
        "The engine casts what goes into the model whether fp16 is on or not (runtime/engine.py): floating-point "
        "inputs meet weights of another type and the first step fails; token numbers stay as they are."
    ),
    wrong=trained(fp16={"enabled": False, "auto_cast": True}),
    right=trained(fp16={"enabled": True, "auto_cast": True}),
    proof=accepts("inputs are in fp16, weights are not"),
)
def inputs_cast_without_fp16(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = ("fp16", "auto_cast")
    if is_true(document, *path) and truth(document.get("fp16", "enabled", default=False)) is False:
        what = "true casts the inputs to fp16, and fp16 is off: the model is in another format"
        yield Diagnostic(
            at(*path), what, write('false, or "enabled": true'), fix=fix("Write false", replace(document, path, False))
        )


@rule(
    code="DSC315",
    name="autocast-modules-without-package",
    severity="error",
    family="precision",
    summary="torch_autocast.lower_precision_safe_modules does not list importable classes.",
    reason="Each name is split at its last dot and imported (runtime/torch_autocast.py).",
    wrong=config(torch_autocast={"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["Linear"]}),
    right=config(
        torch_autocast={"enabled": True, "dtype": "bf16", "lower_precision_safe_modules": ["torch.nn.Linear"]}
    ),
    proof=raises("Failed to import lower precision safe module"),
)
def autocast_modules_without_package(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get("torch_autocast", "lower_precision_safe_modules")
    names = value if isinstance(value, list) else [] if value is None else [value]
    bad = [item for item in names if not (isinstance(item, str) and "." in item)]
    if bad or isinstance(value, str):
        what = f"{show(value)} is not a list of classes with their packages"
        yield Diagnostic(
            at("torch_autocast", "lower_precision_safe_modules"), what, write('["torch.nn.Linear"], for instance')
        )
