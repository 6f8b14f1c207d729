"""Rules on the optimizer: its type, its parameters, and values that DeepSpeed calculates with without a check."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import ONE_BIT, Context, Findings, finding, key_finding, meant, rule
from deepspeed_compress.tools.lint.values import means_auto, number, show, text_number

_PARAMS = ("optimizer", "params")
_TYPE = ("optimizer", "type")


def known_optimizer(document: Document) -> str | None:
    """Return the entry of the key table for the optimizer: DeepSpeed's names in lower case, torch's as they are."""
    value = document.get(*_TYPE)
    if not isinstance(value, str):
        return None
    name = value.lower() if value.lower() in keys().optimizers else value
    if name not in keys().optimizers or "+" in name:
        return None
    with_torch = document.get("optimizer", "params", "torch_adam") is True
    variants = (("torch", with_torch), ("offload", document.offload("offload_optimizer")))
    asked = [f"{name}+{variant}" for variant, is_asked in variants if is_asked]
    return next((variant for variant in asked if variant in keys().optimizers), name)


@rule("DSC501", "error")
def unknown_optimizer(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know optimizer.type.

    DeepSpeed has its own optimizers, whose names may be in any case, and takes others from torch.optim by their exact
    names (runtime/engine.py). A value that is no text fails, too.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW8", "params": {"lr": 0.0001}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: raises is not a supported DeepSpeed Optimizer
    """
    value = document.get(*_TYPE)
    removed = isinstance(value, str) and value.lower() in ONE_BIT
    if value is not None and not removed and known_optimizer(document) is None:
        names = [name for name in keys().optimizers if "+" not in name]
        what = f"{show(value)} is neither an optimizer of DeepSpeed nor of torch.optim"
        yield finding(_TYPE, what, meant(document.string(*_TYPE), names, '"AdamW", for instance'))


@rule("DSC503", "warning")
def section_without_type(document: Document, context: Context) -> Findings:
    """The section optimizer or scheduler has no type.

    DeepSpeed ignores such a section (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"params": {"lr": 0.0001}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: ignores
    """
    for part, example in (("optimizer", "AdamW"), ("scheduler", "WarmupLR")):
        if isinstance(document.get(part), dict) and not document.has(part, "type"):
            yield key_finding((part,), f'without "type" the {part} is ignored', f'"type": "{example}" as well')


@rule("DSC502", "error")
def unknown_optimizer_parameter(document: Document, context: Context) -> Findings:
    """The optimizer does not have a parameter.

    DeepSpeed passes optimizer.params on to the constructor (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "weight_decays": 0.01}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.01}}}
    Proof: raises unexpected keyword argument
    """
    known = known_optimizer(document)
    names = keys().optimizers.get(known or "", frozenset())
    # The parameters of some optimizers are not known, and Muon ignores those that it does not know.
    for key in document.section("optimizer", "params") if names and known != "muon" else ():
        if key not in names and key != "max_grad_norm":
            what = f'"{key}" is not a parameter of {show(document.get(*_TYPE))}'
            yield key_finding((*_PARAMS, key), what, meant(key, names, "nothing: remove the key"))


@rule("DSC510", "warning")
def muon_parameter_ignored(document: Document, context: Context) -> Findings:
    """Muon does not have a parameter, and ignores it.

    DeepSpeed passes on only the parameters that Muon knows (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "nesterov": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}}
    Proof: accepts the parameter has no effect
    """
    for key in document.section("optimizer", "params") if document.optimizer == "muon" else ():
        if key not in keys().optimizers["muon"] and key != "max_grad_norm":
            what = f'"{key}" is not a parameter of Muon, which ignores it'
            yield key_finding((*_PARAMS, key), what, f'"{closest(key, keys().optimizers["muon"]) or "lr"}", if meant')


@rule("DSC513", "warning")
def muon_update_clipped(document: Document, context: Context) -> Findings:
    """Muon is used with stage 1, 2 or 3 while gradients are clipped.

    DeepSpeed first orthogonalizes matrices and then clips the result, whose norm depends on the model's shape alone
    (runtime/zero/stage_1_and_2.py, DeepSpeed issue 8439). With the default gradient_clipping of 1.0, the steps of a
    model with 10M parameters are a hundred times too small.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}},
        "zero_optimization": {"stage": 2}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}, "gradient_clipping": 0,
        "zero_optimization": {"stage": 2}}
    Proof: accepts the learning rate has almost no effect
    """
    value = document.get("gradient_clipping", default=1.0)
    clipping = 1.0 if means_auto(value) else document.number("gradient_clipping", default=1.0)
    clips_updates = document.stage in (1, 2, 3) and not document.chooses_bf16_optimizer
    if document.optimizer == "muon" and clips_updates and clipping is not None and clipping > 0:
        trainer = context.framework == "hf"
        filled = "max_grad_norm, 1.0 by default" if trainer else 'a norm of 1.0, which stands for "auto"'
        norm = filled if means_auto(value) else f"a norm of {show(clipping)}"
        what = f"Muon's steps are clipped to {norm}, whatever the learning rate is"
        instead = '"gradient_clipping": 0 as well' + (", and max_grad_norm=0 for the Trainer" if trainer else "")
        yield finding(("optimizer", "type"), what, instead)


@rule("DSC500", "error")
def max_grad_norm_in_params(document: Document, context: Context) -> Findings:
    """max_grad_norm is a parameter of the optimizer.

    DeepSpeed refuses it there and clips by gradient_clipping (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "max_grad_norm": 1.0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "gradient_clipping": 1.0}
    Proof: raises is not supported as an optimizer parameter
    """
    path = (*_PARAMS, "max_grad_norm")
    if document.has(*path):
        value = show(document.get(*path))
        what = f"{value} is refused here (allowed: as gradient_clipping, outside of the optimizer)"
        yield key_finding(path, what, f'"gradient_clipping": {value} in the outermost object')


@rule("DSC504", "error")
def lamb_with_fixed_scale(document: Document, context: Context) -> Findings:
    """Lamb is used with a fixed loss scale.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Lamb", "params": {"lr": 0.001}},
        "fp16": {"enabled": true, "loss_scale": 128}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "fp16": {"enabled": true, "loss_scale": 0}}
    Proof: raises requires dynamic loss scaling
    """
    scale = document.number("fp16", "loss_scale")
    if document.optimizer == "lamb" and scale is not None and scale > 0:
        what = f"{show(scale)} is a fixed scale, which Lamb refuses (allowed: 0, a dynamic one)"
        yield finding(("fp16", "loss_scale"), what, "0")


@rule("DSC507", "warning")
def large_learning_rate(document: Document, context: Context) -> Findings:
    """The learning rate is so large that Adam or Lion diverges.

    Their steps are about as large as the learning rate, for every gradient (ops/adam/fused_adam.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: accepts training diverges
    """
    value = document.number(*_PARAMS, "lr")
    if value is not None and value >= 0.5 and document.optimizer in ("adam", "adamw", "lion"):
        what = f"{show(value)} moves every weight by about as much in one step (usual: 1e-5 to 1e-3)"
        yield finding((*_PARAMS, "lr"), what, "a smaller number")


@rule("DSC516", "error")
def legacy_fusion_fails(document: Document, context: Context) -> Findings:
    """legacy_fusion is true with Adam in 16 bits, without ZeRO.

    The optimizer then passes arguments that FusedAdam no longer takes (ops/adam/fused_adam.py), and the first step
    fails.

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}, "legacy_fusion": true}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: accepts the first step ends with RuntimeError
    """
    wrapped = (document.fp16 or document.bf16) and document.stage == 0
    fused = known_optimizer(document) in ("adam", "adamw")
    if wrapped and fused and document.is_true("optimizer", "legacy_fusion"):
        what = "true makes the first step fail (allowed: false)"
        correction = fix("Remove it", remove(document, ("optimizer", "legacy_fusion")))
        yield finding(("optimizer", "legacy_fusion"), what, "nothing: remove the key", correction)


@rule("DSC505", "error")
def betas_range(document: Document, context: Context) -> Findings:
    """The betas are not two numbers from 0 to below 1.

    DeepSpeed's own Adam does not check them (ops/adam/fused_adam.py), and training diverges or fails at its first step.
    The optimizers of torch refuse them.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 1.5]}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 0.95]}}}
    Proof: accepts the running means grow without bound
    """
    path = (*_PARAMS, "betas")
    value = document.get(*path)
    numbers = map(number, value) if isinstance(value, list) else ()
    are_betas = [beta is not None and 0 <= beta < 1 for beta in numbers] == [True, True]
    # Numbers in text have their own rule.
    if document.has(*path) and not means_auto(value) and text_number(value) is None and not are_betas:
        what = f"{show(value)} are not two numbers from 0 to below 1 (allowed: a list of them)"
        yield finding(path, what, "[0.9, 0.999], for instance")


_NOT_NEGATIVE = (
    *("lr", "eps", "weight_decay", "momentum", "lr_decay", "alpha", "rho", "momentum_decay"),
    "initial_accumulator_value",
)


@rule("DSC506", "error")
def negative_optimizer_parameter(document: Document, context: Context) -> Findings:
    """A parameter of the optimizer is negative.

    The optimizers of torch refuse negative rates. With DeepSpeed's own, the loss rises (ops/adam/fused_adam.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": -0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    Proof: raises Invalid learning rate
    """
    for key in _NOT_NEGATIVE:
        value = document.number(*_PARAMS, key)
        accepted = key == "alpha" and document.get("optimizer", "type") == "ASGD"  # an exponent
        if value is not None and value < 0 and not accepted:
            yield finding((*_PARAMS, key), f"{show(value)} is negative (allowed: 0 or more)", show(-value))
