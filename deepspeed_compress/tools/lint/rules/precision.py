"""Rules on precision: dtypes of parameters, gradients and master weights, and the loss scale of fp16."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import ZERO, Context, Findings, finding, rule
from deepspeed_compress.tools.lint.values import AUTO, number, show

_DTYPES = {
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), "fp16"),
    **dict.fromkeys(("fp32", "float32", "float", "torch.float32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), "bf16"),
    **dict.fromkeys(("int8", "torch.int8"), "int8"),
}
"""Names of dtypes that DeepSpeed knows, with their short names."""
_MASTER = (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"))


def model_dtype(document: Document) -> str:
    return "fp16" if document.fp16 else "bf16" if document.bf16 else "fp32"


def _dtype(document: Document, key: str) -> str | None:
    """Return the short name of a dtype under `data_types`, or None if it is missing or unknown."""
    value = document.get("data_types", key)
    return _DTYPES.get(value) if isinstance(value, str) else None


@rule("DSC300", "error")
def fp16_and_bf16(document: Document, context: Context) -> Findings:
    """fp16 and bf16 are both enabled.

    The model can be in only one of them (runtime/config.py).

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true}, "bf16": {"enabled": true}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": false}, "bf16": {"enabled": true}}
    Proof: raises cannot be simultaneously enabled
    """
    if document.fp16 and document.bf16:
        what = 'true together with "bf16" (allowed: one of the two)'
        yield finding(("fp16", "enabled"), what, '"enabled": false here or in "bf16"')


@rule("DSC301", "error")
def param_dtype_conflict(document: Document, context: Context) -> Findings:
    """data_types.param_dtype contradicts fp16 or bf16.

    The optimizer takes the model's dtype from fp16 and bf16, so the engine refuses another one (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}, "data_types": {"param_dtype": "bf16"}}
    Proof: raises conflicts with the enabled precision mode
    """
    asked, model = _dtype(document, "param_dtype"), model_dtype(document)
    if asked is not None and asked != model and not document.left_open:
        what = f"{show(document.get('data_types', 'param_dtype'))} contradicts the model's {model} (allowed: {model})"
        yield finding(("data_types", "param_dtype"), what, f'"{model}", or enable {asked}')


@rule("DSC302", "error")
def accumulation_dtype_without_zero(document: Document, context: Context) -> Findings:
    """Gradients are accumulated in another dtype than the model's, without ZeRO.

    Only the optimizers of ZeRO keep gradients in a dtype of their own (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "bf16": {"enabled": true},
        "data_types": {"grad_accum_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Proof: raises unsupported mix of model_dtype
    """
    asked, model = _dtype(document, "grad_accum_dtype"), model_dtype(document)
    has_optimizer = isinstance(document.get("optimizer", "type"), str)
    if asked is not None and asked != model and document.stage == 0 and has_optimizer and not document.left_open:
        value = show(document.get("data_types", "grad_accum_dtype"))
        what = f"{value} differs from the model's {model} without ZeRO (allowed: {model})"
        yield finding(("data_types", "grad_accum_dtype"), what, f'"{model}", or ZeRO stage 1 to 3')


@rule("DSC304", "error")
def unknown_dtype(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know the name of a dtype.

    Dtypes are looked up by name when they are used (DtypeEnum, runtime/config.py).

    Wrong: {"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "fp8"}}
    Right: {"train_batch_size": 8, "torch_autocast": {"enabled": true, "dtype": "bf16"}}
    Proof: raises is not a valid DtypeEnum
    """
    cast = document.fp16 or document.bf16  # the dtype of buffers is looked up only if the model is cast
    keys = ("grad_accum_dtype", "param_dtype", *(["buffer_dtype"] if cast else []))
    asked = [("data_types", key) for key in keys if document.get("data_types", key) is not None]
    for path in (*([_AUTOCAST] if document.has(*_AUTOCAST) else []), *asked):
        value = document.get(*path)
        if not isinstance(value, str) or (value != AUTO and value not in _DTYPES):
            what = f"{show(value)} is not a number format that DeepSpeed knows (allowed: fp32, fp16, bf16)"
            yield finding(path, what, '"bf16", "fp16" or "fp32"')


_AUTOCAST = ("torch_autocast", "dtype")


@rule("DSC306", "error")
def master_weights_without_zero(document: Document, context: Context) -> Findings:
    """Master weights or optimizer states are in 16 bits without ZeRO.

    Asserted when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Proof: raises only supported with ZeRO Stage 1, 2, or 3
    """
    for path in (*_MASTER, ("bf16", "bf16_optimizer_states")):
        if document.is_true(*path) and document.stage == 0:
            what = "true needs ZeRO, and the stage is 0 (allowed: stages 1 to 3)"
            yield finding(path, what, '"zero_optimization": {"stage": 2}, or false')


@rule("DSC307", "error")
def bf16_states_without_master(document: Document, context: Context) -> Findings:
    """bf16_optimizer_states is true without bf16_master_weights_and_grads.

    Asserted when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": true, "bf16_optimizer_states": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1},
        "bf16": {"enabled": true, "bf16_optimizer_states": true, "bf16_master_weights_and_grads": true}}
    Proof: raises requires bf16_master_weights_and_grads
    """
    path = ("bf16", "bf16_optimizer_states")
    if document.is_true(*path) and not document.is_true(*_MASTER[1]) and document.stage in (1, 2, 3):
        yield finding(path, "true needs bf16_master_weights_and_grads", '"bf16_master_weights_and_grads": true as well')


@rule("DSC308", "error")
def master_weights_without_offload(document: Document, context: Context) -> Findings:
    """Master weights are in 16 bits, but the optimizer is not offloaded.

    Only DeepSpeedCPUAdam keeps them in 16 bits (runtime/zero/stage_1_and_2.py, stage3.py), unless the states are in
    bf16 too.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": true}}
    Proof: raises Master weights feature requires
    """
    if document.stage not in (1, 2, 3) or document.offload("offload_optimizer"):
        return
    for path in _MASTER:
        states = path[0] == "bf16" and document.is_true("bf16", "bf16_optimizer_states")
        if document.is_true(*path) and not states and isinstance(document.get("optimizer", "type"), str):
            what = "true needs an optimizer on the CPU (allowed: with offload_optimizer)"
            yield finding(path, what, f'"{ZERO}": {{"offload_optimizer": {{"device": "cpu"}}}}, or false')


@rule("DSC309", "error")
def loss_scale_range(document: Document, context: Context) -> Findings:
    """A setting of the loss scale of fp16 is a boolean or too small.

    0 means dynamic scaling, and a positive number is a fixed scale. The dynamic scaler divides by its window, and a
    minimum of zero lets the scale vanish (runtime/precision_config.py).

    Wrong: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": -1}}
    Right: {"train_batch_size": 8, "fp16": {"enabled": true, "loss_scale": 0}}
    Proof: raises loss_scale must be
    """
    dynamic = document.fp16 and document.number("fp16", "loss_scale", default=0) == 0
    for key, least, instead in (("loss_scale", 0, "0"), ("loss_scale_window", 1, "1000"), ("min_loss_scale", 1, "1")):
        value = document.get("fp16", key)
        found = number(value)
        too_small = found is not None and (found < 0 or (found == 0 < least)) and (dynamic or key == "loss_scale")
        if isinstance(value, bool) or too_small:
            yield finding(("fp16", key), f"{show(value)} is refused (allowed: {least} or more)", instead)


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


@rule("DSC303", "info")
def bf16_optimizer_chosen(document: Document, context: Context) -> Findings:
    """bf16, stage 1 and accumulation in fp32 select another optimizer than ZeRO's.

    The engine uses BF16_Optimizer for exactly this combination (runtime/engine.py). It all-reduces gradients in fp32 at
    the end of the step instead of reducing buckets during the backward pass.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}}
    Proof: accepts more is sent, and later, than with the optimizer of ZeRO
    """
    if document.chooses_bf16_optimizer:
        what = "with bf16 and stage 1 this chooses BF16_Optimizer, which all-reduces gradients on another path"
        yield finding(("data_types", "grad_accum_dtype"), what, "stage 2 for the usual path, or leave it so on purpose")
