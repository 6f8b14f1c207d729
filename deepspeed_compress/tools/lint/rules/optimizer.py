"""Rules on the optimizer: its type, and parameters that it does not have or ignores."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, move, remove
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ONE_BIT, finding, key_finding, unknown_parameter, unknown_word
from deepspeed_compress.tools.lint.values import means_auto, show

_PARAMS = ("optimizer", "params")
_TYPE = ("optimizer", "type")
_FELT = 0.05
"""Weight decay from which its kind makes a difference. Examples have 3e-7 to 0.01."""


def known_optimizer(document: Document) -> str | None:
    """Return the entry of the key table for the optimizer: DeepSpeed's names in lower case, torch's as they are."""
    value = document.get(*_TYPE)
    if not isinstance(value, str):
        return None
    name = value.lower() if value.lower() in keys().optimizers else value
    if name not in keys().optimizers or "+" in name:
        return None
    variant = name
    if document.params("optimizer").get("torch_adam") is True and f"{name}+torch" in keys().optimizers:
        variant = f"{name}+torch"
    elif document.offload("offload_optimizer") and f"{name}+offload" in keys().optimizers:
        variant = f"{name}+offload"
    return variant


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
        names = {name: None for name in keys().optimizers if "+" not in name}
        what = f"{show(value)} is neither an optimizer of DeepSpeed nor of torch.optim"
        yield unknown_word(document, _TYPE, names, what, '"AdamW"')


@rule("DSC503", "warning")
def optimizer_without_type(document: Document, context: Context) -> Findings:
    """The section optimizer has no type.

    DeepSpeed ignores such a section (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"params": {"lr": 0.0001}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: ignores
    """
    if isinstance(document.get("optimizer"), dict) and not document.has(*_TYPE):
        yield key_finding(("optimizer",), 'without "type" the optimizer is ignored', '"type": "AdamW" as well')


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
    for key in document.params("optimizer") if names and known != "muon" else ():
        if key not in names and key != "max_grad_norm":
            what = f'"{key}" is not a parameter of {show(document.get(*_TYPE))}'
            yield unknown_parameter(document, (*_PARAMS, key), names, what)


@rule("DSC510", "warning")
def muon_parameter_ignored(document: Document, context: Context) -> Findings:
    """Muon does not have a parameter, and ignores it.

    DeepSpeed passes on only the parameters that Muon knows (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "nesterov": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02, "momentum": 0.95}}}
    Proof: accepts the parameter has no effect
    """
    for key in document.params("optimizer") if document.optimizer == "muon" else ():
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
        clips = document.has("gradient_clipping")
        edits = remove(document, path) if clips else move(document, path, ("gradient_clipping",))
        correction = fix("Use gradient_clipping", edits, safe=not clips)
        value = show(document.get(*path))
        what = f"{value} is refused here (allowed: as gradient_clipping, outside of the optimizer)"
        yield key_finding(path, what, f'"gradient_clipping": {value} in the outermost object', correction)


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


@rule("DSC508", "warning")
def adamw_mode_ignored(document: Document, context: Context) -> Findings:
    """adam_w_mode false has no effect with type AdamW.

    The type takes precedence (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "adam_w_mode": false}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.0001, "adam_w_mode": false}}}
    Proof: accepts the weight decay is decoupled all the same
    """
    if document.optimizer == "adamw" and document.get(*_PARAMS, "adam_w_mode") is False:
        path = (*_PARAMS, "adam_w_mode")
        yield finding(path, 'false has no effect with "AdamW"', '"type": "Adam", or remove the key')


@rule("DSC509", "info")
def adam_is_adamw(document: Document, context: Context) -> Findings:
    """Adam with weight decay is AdamW.

    adam_w_mode is true by default (runtime/config.py), unlike in torch.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"lr": 0.0001, "weight_decay": 0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "weight_decay": 0.1}}}
    Proof: accepts the same settings regularize differently in torch
    """
    decay = document.number(*_PARAMS, "weight_decay")
    given = document.has(*_PARAMS, "adam_w_mode")
    # The Trainer's own optimizer is AdamW, and it writes its weight decay here.
    meant = given or context.framework == "hf"
    if document.optimizer == "adam" and decay is not None and decay >= _FELT and not meant:
        what = '"Adam" means AdamW in DeepSpeed: the weight decay is decoupled'
        yield finding(_TYPE, what, '"AdamW" if that is meant, or "adam_w_mode": false for L2 regularization')


@rule("DSC511", "warning")
def fp32_states_overridden(document: Document, context: Context) -> Findings:
    """fp32_optimizer_states is given together with bf16_optimizer_states.

    The latter takes precedence, with a warning (runtime/engine.py).

    Wrong: {"train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "fp32_optimizer_states": true}},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "bf16": {"enabled": true, "bf16_master_weights_and_grads": true, "bf16_optimizer_states": true},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
    Proof: accepts the states are in bf16
    """
    path = (*_PARAMS, "fp32_optimizer_states")
    on_cpu = document.offload("offload_optimizer")
    if document.get(*path) is True and on_cpu and document.is_true("bf16", "bf16_optimizer_states"):
        yield finding(path, "true is overridden by bf16_optimizer_states", 'false, or "bf16_optimizer_states": false')


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
