"""Precision: number formats of parameters, gradients and master weights."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    ZERO,
    bf16,
    config,
    fp16,
    is_true,
    offload,
    show,
    stage,
    trained,
    zero,
)

_FAMILY = "precision"


BF16 = {"enabled": True}


_DTYPES = {
    "fp16": "fp16",
    "float16": "fp16",
    "half": "fp16",
    "torch.float16": "fp16",
    "fp32": "fp32",
    "float32": "fp32",
    "float": "fp32",
    "torch.float32": "fp32",
    "bf16": "bf16",
    "bfloat16": "bf16",
    "torch.bfloat16": "bf16",
    "int8": "int8",
    "torch.int8": "int8",
}
"""Names of number formats that DeepSpeed knows, and the short one of each."""


_MASTER = (("fp16", "fp16_master_weights_and_grads"), ("bf16", "bf16_master_weights_and_grads"))


def model_dtype(document: Document) -> str:
    return "fp16" if fp16(document) else "bf16" if bf16(document) else "fp32"


def _dtype(document: Document, key: str) -> str | None:
    """The short name of a format under `data_types`; None if there is none, or none that is known."""
    value = document.get("data_types", key)
    return _DTYPES.get(value) if isinstance(value, str) else None


def _left_open(document: Document) -> bool:
    """Whether Hugging Face fills in the precision."""
    return AUTO in (document.get("fp16", "enabled"), document.get("bf16", "enabled"))


def _both(document: Document, context: Context) -> Iterator[Hit]:
    if fp16(document) and bf16(document):
        what = 'true together with "bf16" (allowed: one of the two)'
        yield Hit(("fp16", "enabled"), what, '"enabled": false here or in "bf16"')


def _param_dtype(document: Document, context: Context) -> Iterator[Hit]:
    asked, model = _dtype(document, "param_dtype"), model_dtype(document)
    if asked is not None and asked != model and not _left_open(document):
        what = f"{show(document.get('data_types', 'param_dtype'))} contradicts the model's {model} (allowed: {model})"
        yield Hit(("data_types", "param_dtype"), what, f'"{model}", or enable {asked}')


def _accumulation(document: Document, context: Context) -> Iterator[Hit]:
    asked, model = _dtype(document, "grad_accum_dtype"), model_dtype(document)
    has_optimizer = isinstance(document.get("optimizer", "type"), str)
    if asked is not None and asked != model and stage(document) == 0 and has_optimizer and not _left_open(document):
        value = show(document.get("data_types", "grad_accum_dtype"))
        what = f"{value} differs from the model's {model} without ZeRO (allowed: {model})"
        yield Hit(("data_types", "grad_accum_dtype"), what, f'"{model}", or ZeRO stage 1 to 3')


def _bf16_optimizer(document: Document, context: Context) -> Iterator[Hit]:
    wide = _dtype(document, "grad_accum_dtype") == "fp32"
    if wide and bf16(document) and stage(document) == 1 and offload(document, "offload_optimizer") != "cpu":
        what = "with bf16 and stage 1 this chooses BF16_Optimizer, which all-reduces gradients on another path"
        yield Hit(("data_types", "grad_accum_dtype"), what, "stage 2 for the usual path, or leave it so on purpose")


def _unknown_dtype(document: Document, context: Context) -> Iterator[Hit]:
    for path in (*(("data_types", f"{what}_dtype") for what in ("grad_accum", "param", "buffer")), _AUTOCAST):
        value = document.get(*path)
        if isinstance(value, str) and value != AUTO and value not in _DTYPES:
            what = f"{show(value)} is no number format that DeepSpeed knows (allowed: fp32, fp16, bf16)"
            yield Hit(path, what, '"bf16", "fp16" or "fp32"')


_AUTOCAST = ("torch_autocast", "dtype")


def _keep_in_fp32(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get("data_types", "keep_in_fp32_modules")
    fine = value in (None, AUTO) or (isinstance(value, list) and all(isinstance(item, str) for item in value))
    # A missing key and an explicit null differ here.
    if document.has("data_types", "keep_in_fp32_modules") and (not fine or value is None):
        what = f'{show(value)} is refused (allowed: "auto", or a list of name patterns)'
        write = f"[{show(value)}]" if isinstance(value, str) else '"auto"'
        yield Hit(("data_types", "keep_in_fp32_modules"), what, write)


def _master_stage(document: Document, context: Context) -> Iterator[Hit]:
    for path in (*_MASTER, ("bf16", "bf16_optimizer_states")):
        if is_true(document, *path) and stage(document) == 0:
            what = "true needs ZeRO, and the stage is 0 (allowed: stages 1 to 3)"
            yield Hit(path, what, '"zero_optimization": {"stage": 2}, or false')


def _states_need_master(document: Document, context: Context) -> Iterator[Hit]:
    path = ("bf16", "bf16_optimizer_states")
    if is_true(document, *path) and not is_true(document, *_MASTER[1]) and stage(document) in (1, 2, 3):
        yield Hit(path, "true needs bf16_master_weights_and_grads", '"bf16_master_weights_and_grads": true besides')


def _master_offload(document: Document, context: Context) -> Iterator[Hit]:
    if stage(document) not in (1, 2, 3) or offload(document, "offload_optimizer"):
        return
    for path in _MASTER:
        states = path[0] == "bf16" and is_true(document, "bf16", "bf16_optimizer_states")
        if is_true(document, *path) and not states and isinstance(document.get("optimizer", "type"), str):
            what = "true needs an optimizer on the CPU (allowed: with offload_optimizer)"
            yield Hit(path, what, f'"{ZERO}": {{"offload_optimizer": {{"device": "cpu"}}}}, or false')


RULES = (
    Rule(
        "DSC300",
        "fp16-and-bf16",
        "error",
        _FAMILY,
        "fp16 and bf16 are both enabled.",
        "The model can be in one of them only (runtime/config.py).",
        config(fp16={"enabled": True}, bf16={"enabled": True}),
        config(fp16={"enabled": False}, bf16={"enabled": True}),
        _both,
        raises("cannot be simultaneously enabled"),
    ),
    Rule(
        "DSC301",
        "param-dtype-conflict",
        "error",
        _FAMILY,
        "data_types.param_dtype contradicts fp16 or bf16.",
        "The optimizer takes the model's format from fp16 and bf16, so that the engine refuses another one "
        "(runtime/engine.py).",
        config(bf16=BF16, data_types={"param_dtype": "fp32"}),
        config(bf16=BF16, data_types={"param_dtype": "bf16"}),
        _param_dtype,
        raises("conflicts with the enabled precision mode"),
    ),
    Rule(
        "DSC302",
        "accumulation-dtype-without-zero",
        "error",
        _FAMILY,
        "Gradients accumulate in another format than the model's, without ZeRO.",
        "Only the optimizers of ZeRO keep gradients in a format of their own (runtime/engine.py).",
        trained(bf16=BF16, data_types={"grad_accum_dtype": "fp32"}),
        zero(2, also={"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
        _accumulation,
        raises("unsupported mix of model_dtype"),
    ),
    Rule(
        "DSC303",
        "bf16-optimizer-chosen",
        "info",
        _FAMILY,
        "bf16, stage 1 and accumulation in fp32 choose another optimizer than ZeRO's.",
        "The engine takes BF16_Optimizer for exactly this combination (runtime/engine.py): it all-reduces gradients in "
        "fp32 at the end of the step instead of reducing buckets during the backward pass.",
        zero(1, also={"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
        zero(2, also={"bf16": BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
        _bf16_optimizer,
        accepts("more is sent, and later, than with the optimizer of ZeRO"),
    ),
    Rule(
        "DSC304",
        "unknown-dtype",
        "error",
        _FAMILY,
        "The name of a number format that DeepSpeed does not know.",
        "Formats are looked up by name where they are used (DtypeEnum, runtime/config.py).",
        config(torch_autocast={"enabled": True, "dtype": "fp8"}),
        config(torch_autocast={"enabled": True, "dtype": "bf16"}),
        _unknown_dtype,
        raises("is not a valid DtypeEnum"),
    ),
    Rule(
        "DSC305",
        "keep-in-fp32-not-a-list",
        "error",
        _FAMILY,
        "data_types.keep_in_fp32_modules is neither a list nor auto.",
        "DeepSpeed refuses a single name (runtime/config.py).",
        config(data_types={"keep_in_fp32_modules": "norm"}),
        config(data_types={"keep_in_fp32_modules": ["norm"]}),
        _keep_in_fp32,
        raises('must be "auto" or a list of name patterns'),
    ),
    Rule(
        "DSC306",
        "master-weights-without-zero",
        "error",
        _FAMILY,
        "Master weights or optimizer states in 16 bits without ZeRO.",
        "Asserted when the configuration is read (runtime/config.py).",
        trained(bf16={"enabled": True, "bf16_master_weights_and_grads": True}),
        zero(
            2,
            offload_optimizer={"device": "cpu"},
            also={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        ),
        _master_stage,
        raises("only supported with ZeRO Stage 1, 2, or 3"),
    ),
    Rule(
        "DSC307",
        "bf16-states-without-master",
        "error",
        _FAMILY,
        "bf16_optimizer_states without bf16_master_weights_and_grads.",
        "Asserted when the configuration is read (runtime/config.py).",
        zero(1, also={"bf16": {"enabled": True, "bf16_optimizer_states": True}}),
        zero(
            1,
            also={"bf16": {"enabled": True, "bf16_optimizer_states": True, "bf16_master_weights_and_grads": True}},
        ),
        _states_need_master,
        raises("requires bf16_master_weights_and_grads"),
    ),
    Rule(
        "DSC308",
        "master-weights-without-offload",
        "error",
        _FAMILY,
        "Master weights in 16 bits without offloading the optimizer.",
        "Only DeepSpeedCPUAdam keeps them in 16 bits (runtime/zero/stage_1_and_2.py, stage3.py), unless the states are "
        "in bf16 too.",
        zero(2, also={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}),
        zero(
            2,
            offload_optimizer={"device": "cpu"},
            also={"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}},
        ),
        _master_offload,
        raises("Master weights feature requires"),
    ),
)
