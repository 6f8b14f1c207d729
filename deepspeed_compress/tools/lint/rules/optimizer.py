"""The optimizer: its type and its parameters."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, move, remove, rename, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, ignores, raises
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

_FAMILY = "optimizer"
_PARAMS = ("optimizer", "params")
_TYPE = ("optimizer", "type")
_FELT = 0.05
"""Weight decay from which its kind makes a difference; examples have 3e-7 to 0.01."""
_REMOVED = frozenset({"onebitadam", "zerooneadam", "onebitlamb"})


def _known(document: Document) -> str | None:
    """The row of the key table for the optimizer: DeepSpeed's names in lower case, else torch's as they are."""
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


def _unknown_type(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(*_TYPE)
    if isinstance(value, str) and value.lower() not in _REMOVED and _known(document) is None:
        names = {name: None for name in keys().optimizers if "+" not in name}
        close = closest(value, names)
        what = f"{show(value)} is neither an optimizer of DeepSpeed nor of torch.optim"
        correction = fix(f"Write {close}", replace(document, _TYPE, close), safe=False) if close else None
        yield Hit(_TYPE, what, f'"{close}", if you meant that' if close else '"AdamW", for instance', fix=correction)


def _no_type(document: Document, context: Context) -> Iterator[Hit]:
    if isinstance(document.get("optimizer"), dict) and not document.has(*_TYPE):
        yield Hit(("optimizer",), 'without "type" the optimizer is ignored', '"type": "AdamW" besides', "key")


def _unknown_parameter(document: Document, context: Context) -> Iterator[Hit]:
    known = _known(document)
    names = keys().optimizers.get(known or "", frozenset())
    # Of some optimizers the parameters are not known, and Muon takes what it knows.
    for key in params(document, "optimizer") if names and known != "muon" else ():
        if key not in names and key != "max_grad_norm":
            close = closest(key, names)
            what = f'"{key}" is no parameter of {show(document.get(*_TYPE))}'
            path = (*_PARAMS, key)
            correction = fix(f"Rename to {close}", rename(document, path, close), safe=False) if close else None
            write = f'"{close}", if you meant that' if close else "nothing: remove the key"
            yield Hit(path, what, write, "key", correction if not (close and document.has(*_PARAMS, close)) else None)


def _muon_parameter(document: Document, context: Context) -> Iterator[Hit]:
    for key in params(document, "optimizer") if optimizer(document) == "muon" else ():
        if key not in keys().optimizers["muon"] and key != "max_grad_norm":
            what = f'"{key}" is no parameter of Muon, which ignores it'
            yield Hit((*_PARAMS, key), what, f'"{closest(key, keys().optimizers["muon"]) or "lr"}", if meant', "key")


def _max_grad_norm(document: Document, context: Context) -> Iterator[Hit]:
    path = (*_PARAMS, "max_grad_norm")
    if document.has(*path):
        clips = document.has("gradient_clipping")
        edits = remove(document, path) if clips else move(document, path, ("gradient_clipping",))
        correction = fix("Use gradient_clipping", edits, safe=not clips)
        value = show(document.get(*path))
        what = f"{value} is refused here (allowed: as gradient_clipping, outside of the optimizer)"
        yield Hit(path, what, f'"gradient_clipping": {value} in the outermost object', "key", correction)


def _lamb(document: Document, context: Context) -> Iterator[Hit]:
    scale = number(document.get("fp16", "loss_scale"))
    if optimizer(document) == "lamb" and scale is not None and scale > 0:
        what = f"{show(scale)} is a fixed scale, which Lamb refuses (allowed: 0, a dynamic one)"
        yield Hit(("fp16", "loss_scale"), what, "0")


def _betas(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(*_PARAMS, "betas")
    if isinstance(value, list):
        numbers = [number(beta) for beta in value]
        fine = len(numbers) == 2 and all(beta is not None and 0 <= beta < 1 for beta in numbers)
        if not fine:
            what = f"{show(value)} are not two numbers from 0 to below 1"
            yield Hit((*_PARAMS, "betas"), what, "[0.9, 0.999], for instance")


_NOT_NEGATIVE = ("lr", "eps", "weight_decay", "momentum")


def _negative(document: Document, context: Context) -> Iterator[Hit]:
    for key in _NOT_NEGATIVE:
        value = number(document.get(*_PARAMS, key))
        if value is not None and value < 0:
            yield Hit((*_PARAMS, key), f"{show(value)} is negative (allowed: 0 or more)", show(-value))


def _large_rate(document: Document, context: Context) -> Iterator[Hit]:
    value = number(document.get(*_PARAMS, "lr"))
    if value is not None and value >= 0.5 and optimizer(document) in ("adam", "adamw", "lion"):
        what = f"{show(value)} moves every weight by about as much in one step (usual: 1e-5 to 1e-3)"
        yield Hit((*_PARAMS, "lr"), what, "a smaller number")


def _adamw_mode(document: Document, context: Context) -> Iterator[Hit]:
    if optimizer(document) == "adamw" and document.get(*_PARAMS, "adam_w_mode") is False:
        path = (*_PARAMS, "adam_w_mode")
        yield Hit(path, 'false has no effect with "AdamW"', '"type": "Adam", or remove the key')


def _adam_decay(document: Document, context: Context) -> Iterator[Hit]:
    decay = number(document.get(*_PARAMS, "weight_decay"))
    given = document.has(*_PARAMS, "adam_w_mode")
    # The Trainer's own optimizer is AdamW, whose weight decay it writes here.
    meant = given or context.framework == "hf"
    if optimizer(document) == "adam" and decay is not None and decay >= _FELT and not meant:
        what = '"Adam" means AdamW in DeepSpeed: the weight decay is decoupled'
        yield Hit(_TYPE, what, '"AdamW" if that is meant, or "adam_w_mode": false for L2 regularization')


def _fp32_states(document: Document, context: Context) -> Iterator[Hit]:
    path = (*_PARAMS, "fp32_optimizer_states")
    on_cpu = offload(document, "offload_optimizer")
    if document.get(*path) is True and on_cpu and is_true(document, "bf16", "bf16_optimizer_states"):
        yield Hit(path, "true is overridden by bf16_optimizer_states", 'false, or "bf16_optimizer_states": false')


def _legacy_fusion(document: Document, context: Context) -> Iterator[Hit]:
    used = fp16(document) and stage(document) == 0 and optimizer(document) in ("adam", "adamw")
    if document.get("optimizer", "legacy_fusion") is True and not used:
        what = "true has no effect but with fp16, without ZeRO, and Adam"
        yield Hit(("optimizer", "legacy_fusion"), what, "nothing: remove the key")


RULES = (
    Rule(
        "DSC500",
        "max-grad-norm-in-params",
        "error",
        _FAMILY,
        "max_grad_norm is a parameter of the optimizer.",
        "DeepSpeed refuses it there and clips by gradient_clipping (runtime/engine.py).",
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "max_grad_norm": 1.0}}),
        trained(gradient_clipping=1.0),
        _max_grad_norm,
        raises("is not supported as an optimizer parameter"),
    ),
    Rule(
        "DSC501",
        "unknown-optimizer",
        "error",
        _FAMILY,
        "optimizer.type is not known.",
        "DeepSpeed has its own, by name in any case, and takes others from torch.optim by their exact name "
        "(runtime/engine.py).",
        config(optimizer={"type": "AdamW8", "params": {"lr": 0.0001}}),
        trained(),
        _unknown_type,
        raises("is not a supported DeepSpeed Optimizer"),
    ),
    Rule(
        "DSC502",
        "unknown-optimizer-parameter",
        "error",
        _FAMILY,
        "A parameter that the optimizer does not have.",
        "DeepSpeed passes optimizer.params on to the constructor (runtime/engine.py).",
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decays": 0.01}}),
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.01}}),
        _unknown_parameter,
        raises("unexpected keyword argument"),
    ),
    Rule(
        "DSC503",
        "optimizer-without-type",
        "warning",
        _FAMILY,
        "An optimizer section without a type.",
        "DeepSpeed takes it for no optimizer at all (runtime/config.py).",
        config(optimizer={"params": {"lr": 0.0001}}),
        trained(),
        _no_type,
        ignores(),
    ),
    Rule(
        "DSC504",
        "lamb-with-fixed-scale",
        "error",
        _FAMILY,
        "Lamb with a fixed loss scale.",
        "Asserted by the engine (runtime/engine.py).",
        config(optimizer={"type": "Lamb", "params": {"lr": 0.001}}, fp16={"enabled": True, "loss_scale": 128}),
        trained(fp16={"enabled": True, "loss_scale": 0}),
        _lamb,
        raises("requires dynamic loss scaling"),
    ),
    Rule(
        "DSC505",
        "betas-range",
        "error",
        _FAMILY,
        "betas are not two numbers from 0 to below 1.",
        "DeepSpeed's own Adam does not check them (ops/adam/fused_adam.py): training diverges or fails at its first "
        "step. Those of torch refuse them.",
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 1.5]}}),
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 0.95]}}),
        _betas,
        accepts("the running means grow without bound"),
    ),
    Rule(
        "DSC506",
        "negative-optimizer-parameter",
        "error",
        _FAMILY,
        "A parameter of the optimizer is negative.",
        "The optimizers of torch refuse negative rates; DeepSpeed's own climb the loss (ops/adam/fused_adam.py).",
        config(optimizer={"type": "SGD", "params": {"lr": -0.1}}),
        config(optimizer={"type": "SGD", "params": {"lr": 0.1}}),
        _negative,
        raises("Invalid learning rate"),
    ),
    Rule(
        "DSC507",
        "large-learning-rate",
        "warning",
        _FAMILY,
        "A learning rate at which Adam or Lion diverge.",
        "Their steps are about as large as the learning rate, whatever the gradient (ops/adam/fused_adam.py).",
        config(optimizer={"type": "AdamW", "params": {"lr": 1.0}}),
        trained(),
        _large_rate,
        accepts("training diverges"),
    ),
    Rule(
        "DSC508",
        "adamw-mode-ignored",
        "warning",
        _FAMILY,
        "adam_w_mode is false with type AdamW.",
        "The type wins (runtime/engine.py).",
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "adam_w_mode": False}}),
        config(optimizer={"type": "Adam", "params": {"lr": 0.0001, "adam_w_mode": False}}),
        _adamw_mode,
        accepts("the weight decay is decoupled all the same"),
    ),
    Rule(
        "DSC509",
        "adam-is-adamw",
        "info",
        _FAMILY,
        "Adam with weight decay is AdamW.",
        "adam_w_mode is true unless given (runtime/config.py), unlike in torch.",
        config(optimizer={"type": "Adam", "params": {"lr": 0.0001, "weight_decay": 0.1}}),
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.1}}),
        _adam_decay,
        accepts("the same settings regularize differently in torch"),
    ),
    Rule(
        "DSC510",
        "muon-parameter-ignored",
        "warning",
        _FAMILY,
        "A parameter that Muon does not have.",
        "Muon takes the parameters that it knows and leaves the others (runtime/engine.py).",
        config(optimizer={"type": "Muon", "params": {"lr": 0.02, "nesterov": True}}),
        config(optimizer={"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}),
        _muon_parameter,
        accepts("the parameter has no effect"),
    ),
    Rule(
        "DSC511",
        "fp32-states-overridden",
        "warning",
        _FAMILY,
        "fp32_optimizer_states beside bf16_optimizer_states.",
        "The latter wins, with a warning (runtime/engine.py).",
        config(
            optimizer={"type": "AdamW", "params": {"lr": 0.0001, "fp32_optimizer_states": True}},
            bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
        config(
            optimizer={"type": "AdamW", "params": {"lr": 0.0001}},
            bf16={"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
            zero_optimization={"stage": 2, "offload_optimizer": {"device": "cpu"}},
        ),
        _fp32_states,
        accepts("the states are in bf16"),
    ),
    Rule(
        "DSC512",
        "legacy-fusion-unused",
        "warning",
        _FAMILY,
        "legacy_fusion where nothing reads it.",
        "Only the fp16 optimizer without ZeRO does, for fused Adam (runtime/engine.py).",
        config(optimizer={"type": "AdamW", "params": {"lr": 0.0001}, "legacy_fusion": True}),
        trained(),
        _legacy_fusion,
        accepts("the key has no effect"),
    ),
)
