"""Rules on the requirements of Hugging Face's Trainer, of Accelerate, and of Lightning's DeepSpeedStrategy (2.6)."""

from collections.abc import Mapping

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import BUCKETS, ZERO, Context, Findings, finding, key_finding, rule
from deepspeed_compress.tools.lint.values import AUTO, leaves, name, show, truth

_CALCULATED: Mapping[Path, str] = {
    ("train_batch_size",): "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    ("scheduler", "params", "total_num_steps"): "the number of steps of the run",
}
"""Settings that the Trainer compares with values it computes. All others it compares with arguments that users give."""
_GATHER = "stage3_gather_16bit_weights_on_model_save"


@rule("DSC710", "error")
def hf_needs_zero_section(document: Document, context: Context) -> Findings:
    """Hugging Face needs a section zero_optimization.

    Accelerate stops without one (accelerate/utils/dataclasses.py), and so does the Trainer, which uses it.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto"}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": "auto", "zero_optimization": {"stage": 0}}
    Context: {"framework": "accelerate"}
    Proof: raises Please specify the ZeRO optimization config
    """
    # DeepSpeed's autotuner adds the section to the configurations that it tries.
    if context.hugging_face and not document.has(ZERO) and document.get("autotuning", "enabled") is not True:
        what = "zero_optimization is missing, without which Accelerate stops"
        yield finding((ZERO,), what, f'"{ZERO}": {{"stage": 0}}, or another stage')


@rule("DSC711", "error")
def hf_hidden_size_missing(document: Document, context: Context) -> Findings:
    """Bucket sizes of "auto" need the hidden size of the model.

    The Trainer and Accelerate compute the sizes from model.config.hidden_size or hidden_sizes. The Trainer also looks
    into text_config (transformers/integrations/deepspeed.py).

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": 0, "reduce_bucket_size": "auto"}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": 0, "reduce_bucket_size": 500000000}}
    Context: {"framework": "hf", "model": {"num_attention_heads": 4}}
    Proof: raises neither `hidden_size` nor `hidden_sizes`
    """
    model = context.model or {}
    text = model.get("text_config")
    places = [model, text] if context.framework == "hf" and isinstance(text, dict) else [model]
    found = any(key in place for place in places for key in ("hidden_size", "hidden_sizes", "n_embd"))
    for bucket in BUCKETS:
        if context.model is not None and context.hugging_face and not found and document.get(ZERO, bucket) == AUTO:
            what = f'"auto" at {bucket} needs the hidden_size of the model, whose config.json has none'
            yield finding((ZERO, bucket), what, "a number of elements")


@rule("DSC712", "info")
def hf_fixed_value(document: Document, context: Context) -> Findings:
    """The file has a number that the Trainer calculates and compares.

    The total batch size is right for one number of ranks only, and the number of steps for one data set only. The
    Trainer stops if the file has other numbers than it calculates (transformers/integrations/deepspeed.py). With
    "auto", it fills in its own.

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "train_batch_size": 24}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0}}
    Context: {"framework": "hf"}
    Proof: raises mismatch TrainingArguments
    """
    for path, meaning in _CALCULATED.items() if context.framework == "hf" else ():
        value = document.number(*path)
        if value is not None and value > 0:
            what = f"the Trainer stops unless {show(value)} is what it calculates: {meaning}"
            yield finding(path, what, '"auto", which takes it from there')


@rule("DSC714", "warning")
def hf_stage_3_saves_partitions(document: Document, context: Context) -> Findings:
    """With stage 3, the Trainer does not save a whole model.

    Weights are gathered for saving only if the file asks for it (runtime/zero/config.py). Otherwise, the Trainer saves
    the partitions.

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 3}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto",
        "zero_optimization": {"stage": 3, "stage3_gather_16bit_weights_on_model_save": true}}
    Context: {"framework": "hf"}
    Proof: accepts save_model writes no weights that from_pretrained reads
    """
    names = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if context.hugging_face and document.stage == 3 and not any(document.has(ZERO, key) for key in names):
        what = "without stage3_gather_16bit_weights_on_model_save no model is saved with stage 3, only its partitions"
        yield key_finding((ZERO,), what, f'"{_GATHER}": true as well, or run zero_to_fp32.py afterwards')


@rule("DSC716", "warning")
def hf_no_clipping(document: Document, context: Context) -> Findings:
    """gradient_clipping is missing in a file for Hugging Face.

    DeepSpeed clips only according to its own configuration, by default to a norm of 1.0, and not at all before 0.19.3
    (runtime/constants.py). Accelerate's clip_grad_norm_ does nothing with it (accelerate/accelerator.py). The Trainer's
    max_grad_norm therefore has no effect. If the value is "auto", the Trainer fills in max_grad_norm, and Accelerate
    fills in 1.0.

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 0}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0}}
    Context: {"framework": "hf"}
    Proof: accepts gradients are clipped by DeepSpeed's default, whatever the arguments say
    """
    if context.hugging_face and not document.has("gradient_clipping"):
        what = "without gradient_clipping DeepSpeed's default clips, whatever max_grad_norm and clip_grad_norm_ say"
        value: object = AUTO if context.framework == "hf" else 1.0
        remark = ", which is max_grad_norm" if value == AUTO else _WITH_ACCELERATE
        yield finding(("gradient_clipping",), what, f'"gradient_clipping": {show(value)}{remark}')


_WITH_ACCELERATE = (
    ' or the number that clip_grad_norm_ is given ("auto" is 1.0 with Accelerate, whatever it is given), or 0.0 to'
    " clip nothing"
)

_UNUSED: Mapping[str, str] = {
    "activation_checkpointing": (
        "gradient_checkpointing=True in TrainingArguments, or call model.gradient_checkpointing_enable(), instead"
    ),
    "pipeline": "nothing: remove the section",
}


@rule("DSC717", "warning")
def hf_section_unused(document: Document, context: Context) -> Findings:
    """A section has no effect under Hugging Face.

    activation_checkpointing is for programs that call deepspeed.checkpointing
    (runtime/activation_checkpointing/checkpointing.py), and pipeline is for a PipelineModule (runtime/pipe/engine.py).

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "activation_checkpointing": {"partition_activations": true}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0}}
    Context: {"framework": "hf"}
    Proof: accepts the section has no effect
    """
    for key, instead in _UNUSED.items() if context.hugging_face else ():
        asked = key == "pipeline" or any(value not in (False, None, 0) for value in document.section(key).values())
        if isinstance(document.get(key), dict) and asked:
            yield key_finding((key,), f"{key} has no effect: no Hugging Face model reads it", instead)


@rule("DSC718", "warning")
def hf_scheduler_replaced(document: Document, context: Context) -> Findings:
    """The file has a scheduler, and so lr_scheduler_type has no effect.

    The Trainer creates a scheduler only if the file has none (transformers/integrations/deepspeed.py). WarmupLR never
    decays, while the Trainer's default falls to zero. WarmupDecayLR also falls to zero and is not reported, although it
    replaces a cosine schedule too.

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}}}
    Context: {"framework": "hf"}
    Proof: accepts the learning rate does not follow the arguments
    """
    # WarmupDecayLR decays like the Trainer's default.
    value = document.get("scheduler", "type")
    if context.framework == "hf" and isinstance(value, str) and value != "WarmupDecayLR":
        what = f"{show(value)} silently replaces the Trainer's lr_scheduler_type"
        instead = "nothing: remove the section, and lr_scheduler_type takes effect"
        yield key_finding(("scheduler",), what, instead)


@rule("DSC720", "warning")
def hf_momentum_twice(document: Document, context: Context) -> Findings:
    """The method is dgc or demo, and the Trainer chooses the momentum of the optimizer.

    These methods give gradients a momentum, so the optimizer must not have one. The Trainer creates the optimizer, or
    fills in "betas": "auto", with its argument adam_beta1 (transformers/integrations/deepspeed.py), which is 0.9 by
    default. It refuses other betas in the file.

    Wrong: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "deepspeed_compress": {"gradients": {"method": "demo"}, "lint": {"ignore": ["compress-needs-install"]}}}
    Right: {"train_micro_batch_size_per_gpu": "auto", "gradient_clipping": "auto", "zero_optimization": {"stage": 0},
        "deepspeed_compress": {"gradients": {"method": "blockwise"}, "lint": {"ignore": ["compress-needs-install"]}}}
    Context: {"framework": "hf"}
    Proof: unproved it depends on the command line
    """
    # The rules of the section check betas that the file states.
    left_open = not document.has("optimizer") or document.get("optimizer", "params", "betas") == AUTO
    path = (OUR_SECTION, "gradients", "method")
    if context.framework == "hf" and document.get(*path) in ("demo", "dgc") and left_open:
        what = f"{show(document.get(*path))} brings a momentum, and the Trainer's optimizer has another one of 0.9"
        yield finding(path, what, "--adam_beta1 0 on the command line (TrainingArguments(adam_beta1=0.0))")


_SHOWN = 8


@rule("DSC741", "error")
def lightning_auto(document: Document, context: Context) -> Findings:
    """The value "auto" is used in a file for Lightning.

    The strategy does not fill in values (pytorch/strategies/deepspeed.py, _format_config). DeepSpeed fails when it
    calculates with the word, or uses its default. With "enabled": "auto" in bf16 or fp16, training is in fp32 for every
    precision of the Trainer.

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": "auto"}}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    # Report all keys in one finding, because such a file was written for Hugging Face.
    found = [path for path, value in leaves(document.data) if value == AUTO and path[0] != OUR_SECTION]
    if found and context.framework == "lightning":
        more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
        what = f'Lightning does not fill in "auto" at {", ".join(map(name, found[:_SHOWN]))}{more}'
        instead = "a value, or remove the key: batch sizes and clipping then come from the Trainer"
        yield finding(found[0], what, instead)


@rule("DSC742", "warning")
def lightning_precision_off(document: Document, context: Context) -> Findings:
    """A section fp16 or bf16 that is not enabled keeps Lightning from enabling it.

    Lightning adds the Trainer's precision only if the file has no such section (fabric/strategies/deepspeed.py,
    _format_precision_config). An existing section is not changed, so the inputs are converted but the model is not.

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": false}}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    for half, precision in (("bf16", "bf16-mixed"), ("fp16", "16-mixed")):
        off = document.has(half) and truth(document.section(half).get("enabled", False)) is False
        if context.framework == "lightning" and off and isinstance(document.get(half), dict):
            what = f'{half} stays off, also with Trainer(precision="{precision}")'
            yield key_finding((half,), what, "nothing: the Trainer's precision then takes effect")


@rule("DSC743", "info")
def lightning_optimizer_replaced(document: Document, context: Context) -> Findings:
    """Lightning does not call configure_optimizers, because the file has an optimizer.

    Neither the optimizer nor the learning-rate scheduler of configure_optimizers is used
    (pytorch/strategies/deepspeed.py, _initialize_deepspeed_train).

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2},
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    if context.framework == "lightning" and document.has("optimizer"):
        what = "configure_optimizers of the LightningModule is not called, its scheduler included"
        yield key_finding(("optimizer",), what, "the optimizer in one of the two places only")
