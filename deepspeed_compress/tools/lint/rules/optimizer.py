"""Rules on the optimizer: its type and its parameters."""

from collections.abc import Iterator

from deepspeed_compress.diagnostics import Diagnostic, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, move, remove, rename, replace
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, accepts, ignores, raises, rule
from deepspeed_compress.tools.lint.rules.common import (
    config,
    fp16,
    is_true,
    number,
    offload,
    optimizer,
    params,
    show,
    stage,
    trained,
)

_PARAMS = ("optimizer", "params")
_TYPE = ("optimizer", "type")
_FELT = 0.05
"""Weight decay from which its kind makes a difference. Examples have 3e-7 to 0.01."""
_REMOVED = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


def _known(document: Document) -> str | None:
    """Return the entry of the key table for the optimizer: DeepSpeed's names in lower case, torch's as they are."""
    value = document.get(*_TYPE)
    if not isinstance(value, str):
        return None
    name = value.lower() if value.lower() in keys().optimizers else value
    if name not in keys().optimizers or "+" in name:
        return None
    variant = name
    if params(document, "optimizer").get("torch_adam") is True and f"{name}+torch" in keys().optimizers:
        variant = f"{name}+torch"
    elif offload(document, "offload_optimizer") and f"{name}+offload" in keys().optimizers:
        variant = f"{name}+offload"
    return variant


@rule(
    code="DSC501",
    name="unknown-optimizer",
    severity="error",
    family="optimizer",
    summary="optimizer.type is not known.",
    reason=(
        "DeepSpeed has its own, by name in any case, and takes others from torch.optim by their exact name "
        "(runtime/engine.py)."
    ),
    wrong=config(optimizer={"type": "AdamW8", "params": {"lr": 0.0001}}),
    right=trained(),
    proof=raises("is not a supported DeepSpeed Optimizer"),
)
def unknown_optimizer(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get(*_TYPE)
    if isinstance(value, str) and value.lower() not in _REMOVED and _known(document) is None:
        names = {name: None for name in keys().optimizers if "+" not in name}
        close = closest(value, names)
        what = f"{show(value)} is neither an optimizer of DeepSpeed nor of torch.optim"
        correction = fix(f"Write {close}", replace(document, _TYPE, close), safe=False) if close else None
        yield Diagnostic(
            at(*_TYPE),
            what,
            write(f'"{close}", if you meant that' if close else '"AdamW", for instance'),
            fix=correction,
        )


@rule(
    code="DSC503",
    name="optimizer-without-type",
    severity="warning",
    family="optimizer",
    summary="An optimizer section without a type.",
    reason="DeepSpeed takes it for no optimizer at all (runtime/config.py).",
    wrong=config(optimizer={"params": {"lr": 0.0001}}),
    right=trained(),
    proof=ignores(),
)
def optimizer_without_type(document: Document, context: Context) -> Iterator[Diagnostic]:
    if isinstance(document.get("optimizer"), dict) and not document.has(*_TYPE):
        yield Diagnostic(
            at_key("optimizer"), 'without "type" the optimizer is ignored', write('"type": "AdamW" besides')
        )


@rule(
    code="DSC502",
    name="unknown-optimizer-parameter",
    severity="error",
    family="optimizer",
    summary="A parameter that the optimizer does not have.",
    reason="DeepSpeed passes optimizer.params on to the constructor (runtime/engine.py).",
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decays": 0.01}}),
    right=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.01}}),
    proof=raises("unexpected keyword argument"),
)
def unknown_optimizer_parameter(document: Document, context: Context) -> Iterator[Diagnostic]:
    known = _known(document)
    names = keys().optimizers.get(known or "", frozenset())
    # The parameters of some optimizers are not known, and Muon ignores those that it does not know.
    for key in params(document, "optimizer") if names and known != "muon" else ():
        if key not in names and key != "max_grad_norm":
            close = closest(key, names)
            what = f'"{key}" is no parameter of {show(document.get(*_TYPE))}'
            path = (*_PARAMS, key)
            correction = fix(f"Rename to {close}", rename(document, path, close), safe=False) if close else None
            instead = f'"{close}", if you meant that' if close else "nothing: remove the key"
            yield Diagnostic(
                at_key(*path),
                what,
                write(instead),
                fix=correction if not (close and document.has(*_PARAMS, close)) else None,
            )


@rule(
    code="DSC510",
    name="muon-parameter-ignored",
    severity="warning",
    family="optimizer",
    summary="A parameter that Muon does not have.",
    reason="Muon takes the parameters that it knows and leaves the others (runtime/engine.py).",
    wrong=config(optimizer={"type": "Muon", "params": {"lr": 0.02, "nesterov": True}}),
    right=config(optimizer={"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}),
    proof=accepts("the parameter has no effect"),
)
def muon_parameter_ignored(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in params(document, "optimizer") if optimizer(document) == "muon" else ():
        if key not in keys().optimizers["muon"] and key != "max_grad_norm":
            what = f'"{key}" is no parameter of Muon, which ignores it'
            yield Diagnostic(
                at_key(*_PARAMS, key), what, write(f'"{closest(key, keys().optimizers["muon"]) or "lr"}", if meant')
            )


@rule(
    code="DSC500",
    name="max-grad-norm-in-params",
    severity="error",
    family="optimizer",
    summary="max_grad_norm is a parameter of the optimizer.",
    reason="DeepSpeed refuses it there and clips by gradient_clipping (runtime/engine.py).",
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "max_grad_norm": 1.0}}),
    right=trained(gradient_clipping=1.0),
    proof=raises("is not supported as an optimizer parameter"),
)
def max_grad_norm_in_params(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = (*_PARAMS, "max_grad_norm")
    if document.has(*path):
        clips = document.has("gradient_clipping")
        edits = remove(document, path) if clips else move(document, path, ("gradient_clipping",))
        correction = fix("Use gradient_clipping", edits, safe=not clips)
        value = show(document.get(*path))
        what = f"{value} is refused here (allowed: as gradient_clipping, outside of the optimizer)"
        yield Diagnostic(
            at_key(*path), what, write(f'"gradient_clipping": {value} in the outermost object'), fix=correction
        )


@rule(
    code="DSC504",
    name="lamb-with-fixed-scale",
    severity="error",
    family="optimizer",
    summary="Lamb with a fixed loss scale.",
    reason="Asserted by the engine (runtime/engine.py).",
    wrong=config(optimizer={"type": "Lamb", "params": {"lr": 0.001}}, fp16={"enabled": True, "loss_scale": 128}),
    right=trained(fp16={"enabled": True, "loss_scale": 0}),
    proof=raises("requires dynamic loss scaling"),
)
def lamb_with_fixed_scale(document: Document, context: Context) -> Iterator[Diagnostic]:
    scale = number(document.get("fp16", "loss_scale"))
    if optimizer(document) == "lamb" and scale is not None and scale > 0:
        what = f"{show(scale)} is a fixed scale, which Lamb refuses (allowed: 0, a dynamic one)"
        yield Diagnostic(at("fp16", "loss_scale"), what, write("0"))


@rule(
    code="DSC505",
    name="betas-range",
    severity="error",
    family="optimizer",
    summary="betas are not two numbers from 0 to below 1.",
    reason=(
        "DeepSpeed's own Adam does not check them (ops/adam/fused_adam.py): training diverges or fails at its first "
        "step. Those of torch refuse them."
    ),
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 1.5]}}),
    right=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 0.95]}}),
    proof=accepts("the running means grow without bound"),
)
def betas_range(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = document.get(*_PARAMS, "betas")
    if isinstance(value, list):
        numbers = [number(beta) for beta in value]
        fine = len(numbers) == 2 and all(beta is not None and 0 <= beta < 1 for beta in numbers)
        if not fine:
            what = f"{show(value)} are not two numbers from 0 to below 1"
            yield Diagnostic(at(*_PARAMS, "betas"), what, write("[0.9, 0.999], for instance"))


_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")


@rule(
    code="DSC506",
    name="negative-optimizer-parameter",
    severity="error",
    family="optimizer",
    summary="A parameter of the optimizer is negative.",
    reason="The optimizers of torch refuse negative rates; DeepSpeed's own climb the loss (ops/adam/fused_adam.py).",
    wrong=config(optimizer={"type": "SGD", "params": {"lr": -0.1}}),
    right=config(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
    proof=raises("Invalid learning rate"),
)
def negative_optimizer_parameter(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key in _NOT_NEGATIVE:
        value = number(document.get(*_PARAMS, key))
        if value is not None and value < 0:
            yield Diagnostic(at(*_PARAMS, key), f"{show(value)} is negative (allowed: 0 or more)", write(show(-value)))


@rule(
    code="DSC507",
    name="large-learning-rate",
    severity="warning",
    family="optimizer",
    summary="A learning rate at which Adam or Lion diverge.",
    reason="Their steps are about as large as the learning rate, whatever the gradient (ops/adam/fused_adam.py).",
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 1.0}}),
    right=trained(),
    proof=accepts("training diverges"),
)
def large_learning_rate(document: Document, context: Context) -> Iterator[Diagnostic]:
    value = number(document.get(*_PARAMS, "lr"))
    if value is not None and value >= 0.5 and optimizer(document) in ("adam", "adamw", "lion"):
        what = f"{show(value)} moves every weight by about as much in one step (usual: 1e-5 to 1e-3)"
        yield Diagnostic(at(*_PARAMS, "lr"), what, write("a smaller number"))


@rule(
    code="DSC508",
    name="adamw-mode-ignored",
    severity="warning",
    family="optimizer",
    summary="adam_w_mode is false with type AdamW.",
    reason="The type wins (runtime/engine.py).",
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "adam_w_mode": False}}),
    right=config(optimizer={"type": "Adam", "params": {"lr": 0.0001, "adam_w_mode": False}}),
    proof=accepts("the weight decay is decoupled all the same"),
)
def adamw_mode_ignored(document: Document, context: Context) -> Iterator[Diagnostic]:
    if optimizer(document) == "adamw" and document.get(*_PARAMS, "adam_w_mode") is False:
        path = (*_PARAMS, "adam_w_mode")
        yield Diagnostic(at(*path), 'false has no effect with "AdamW"', write('"type": "Adam", or remove the key'))


@rule(
    code="DSC509",
    name="adam-is-adamw",
    severity="info",
    family="optimizer",
    summary="Adam with weight decay is AdamW.",
    reason="adam_w_mode is true unless given (runtime/config.py), unlike in torch.",
    wrong=config(optimizer={"type": "Adam", "params": {"lr": 0.0001, "weight_decay": 0.1}}),
    right=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.1}}),
    proof=accepts("the same settings regularize differently in torch"),
)
def adam_is_adamw(document: Document, context: Context) -> Iterator[Diagnostic]:
    decay = number(document.get(*_PARAMS, "weight_decay"))
    given = document.has(*_PARAMS, "adam_w_mode")
    # The Trainer's own optimizer is AdamW, and it writes its weight decay here.
    meant = given or context.framework == "hf"
    if optimizer(document) == "adam" and decay is not None and decay >= _FELT and not meant:
        what = '"Adam" means AdamW in DeepSpeed: the weight decay is decoupled'
        yield Diagnostic(
            at(*_TYPE), what, write('"AdamW" if that is meant, or "adam_w_mode": false for L2 regularization')
        )


@rule(
    code="DSC511",
    name="fp32-states-overridden",
    severity="warning",
    family="optimizer",
    summary="fp32_optimizer_states beside bf16_optimizer_states.",
    reason="The latter wins, with a warning (runtime/engine.py).",
    wrong=config(
        optimizer={"type": "AdamW", "params": {"lr": 0.0001, "fp32_optimizer_states": True}},
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ),
    right=config(
        optimizer={"type": "AdamW", "params": {"lr": 0.0001}},
        bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
        zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
    ),
    proof=accepts("the states are in bf16"),
)
def fp32_states_overridden(document: Document, context: Context) -> Iterator[Diagnostic]:
    path = (*_PARAMS, "fp32_optimizer_states")
    on_cpu = offload(document, "offload_optimizer")
    if document.get(*path) is True and on_cpu and is_true(document, "bf16", "bf16_optimizer_states"):
        yield Diagnostic(
            at(*path), "true is overridden by bf16_optimizer_states", write('false, or "bf16_optimizer_states": false')
        )


@rule(
    code="DSC512",
    name="legacy-fusion-unused",
    severity="warning",
    family="optimizer",
    summary="legacy_fusion where nothing reads it.",
    reason="Only the fp16 optimizer without ZeRO does, for fused Adam (runtime/engine.py).",
    wrong=config(optimizer={"type": "AdamW", "params": {"lr": 0.0001}, "legacy_fusion": True}),
    right=trained(),
    proof=accepts("the key has no effect"),
)
def legacy_fusion_unused(document: Document, context: Context) -> Iterator[Diagnostic]:
    used = fp16(document) and stage(document) == 0 and optimizer(document) in ("adam", "adamw")
    if document.get("optimizer", "legacy_fusion") is True and not used:
        what = "true has no effect but with fp16, without ZeRO, and Adam"
        yield Diagnostic(at("optimizer", "legacy_fusion"), what, write("nothing: remove the key"))
