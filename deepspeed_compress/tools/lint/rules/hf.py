"""What Hugging Face's Trainer and Accelerate demand of a configuration."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import add, fix, remove, replace
from deepspeed_compress.tools.lint.hit import Hit, Path
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises, unproved
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    ZERO,
    config,
    hugging_face,
    number,
    section,
    show,
    stage,
    trained,
    truth,
)

_FAMILY = "hugging-face"
_HF = {"framework": "hf"}
_HALVES: tuple[Path, ...] = (("fp16", "enabled"), ("bf16", "enabled"))
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_CALCULATED: Mapping[Path, str] = {
    ("train_batch_size",): "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    ("scheduler", "params", "total_num_steps"): "the number of steps of the run",
}
"""Settings that the Trainer compares with what it calculates; its other arguments are given, and so meant."""


def _no_zero(document: Document, context: Context) -> Iterator[Hit]:
    # The autotuner of DeepSpeed adds the section to the configurations that it tries.
    if hugging_face(context) and not document.has(ZERO) and document.get("autotuning", "enabled") is not True:
        what = "zero_optimization is missing, without which Accelerate stops"
        yield Hit((ZERO,), what, f'"{ZERO}": {{"stage": 0}}, or another stage')


def _hidden_size(model: Mapping[str, Any], framework: str | None) -> bool:
    """Whether the size of the model is where Hugging Face looks for it."""
    text = model.get("text_config")
    places = [model, text] if framework == "hf" and isinstance(text, dict) else [model]
    return any(key in place for place in places for key in ("hidden_size", "hidden_sizes", "n_embd"))


def _no_hidden_size(document: Document, context: Context) -> Iterator[Hit]:
    if context.model is None or not hugging_face(context) or _hidden_size(context.model, context.framework):
        return
    for bucket in _BUCKETS:
        if document.get(ZERO, bucket) == AUTO:
            what = f'"auto" at {bucket} needs the hidden_size of the model, whose config.json has none'
            yield Hit((ZERO, bucket), what, "a number of elements")


def _fixed(document: Document, context: Context) -> Iterator[Hit]:
    for path, meaning in _CALCULATED.items() if context.framework == "hf" else ():
        value = number(document.get(*path))
        if value is not None and value > 0:
            what = f"the Trainer stops unless {show(value)} is what it calculates: {meaning}"
            correction = fix("Write auto", replace(document, path, AUTO), safe=False)
            yield Hit(path, what, '"auto", which takes it from there', fix=correction)


def _dummies(document: Document, context: Context) -> Iterator[Hit]:
    for part, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if context.framework == "accelerate" and document.has(part):
            what = f"with {part} in the file, the program must pass accelerate.utils.{dummy} in its place"
            yield Hit((part,), what, f"the {part} in one of the two places only", "key")


_GATHER = "stage3_gather_16bit_weights_on_model_save"
_STAGE3 = {"stage": 3, _GATHER: True}
_INSTALLED = {"lint": {"ignore": ["compress-needs-install"]}}


def _no_gather(document: Document, context: Context) -> Iterator[Hit]:
    names = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if hugging_face(context) and stage(document) == 3 and not any(document.has(ZERO, key) for key in names):
        what = "without stage3_gather_16bit_weights_on_model_save no model is saved with stage 3, only its partitions"
        yield Hit((ZERO,), what, f'"{_GATHER}": true besides, or run zero_to_fp32.py afterwards', "key")


def _text_for_boolean(document: Document, context: Context) -> Iterator[Hit]:
    for path in _HALVES if context.framework == "hf" else ():
        meant = truth(document.get(*path))
        if isinstance(document.get(*path), str) and meant is not None:
            what = f"{show(document.get(*path))} is text, which is unequal to the Trainer's {path[0]}, and it stops"
            yield Hit(path, what, show(meant), fix=fix("Write a boolean", replace(document, path, meant)))


def _no_clipping(document: Document, context: Context) -> Iterator[Hit]:
    if hugging_face(context) and not document.has("gradient_clipping"):
        what = "without gradient_clipping nothing is clipped, whatever max_grad_norm and clip_grad_norm_ say"
        correction = fix("Write auto", add(document, (), "gradient_clipping", AUTO), safe=False)
        yield Hit(("gradient_clipping",), what, '"gradient_clipping": "auto", or 0.0 to have it so', fix=correction)


_UNUSED: Mapping[str, str] = {
    "activation_checkpointing": "the Trainer's gradient_checkpointing instead",
    "pipeline": "nothing: remove the section",
}


def _unused(document: Document, context: Context) -> Iterator[Hit]:
    for key, write in _UNUSED.items() if hugging_face(context) else ():
        asked = key == "pipeline" or any(value not in (False, None, 0) for value in section(document, key).values())
        if isinstance(document.get(key), dict) and asked:
            yield Hit((key,), f"{key} has no effect: no model of Hugging Face reads it", write, "key")


def _scheduler(document: Document, context: Context) -> Iterator[Hit]:
    """WarmupDecayLR decays as the Trainer's own does unless told otherwise."""
    value = document.get("scheduler", "type")
    if context.framework == "hf" and isinstance(value, str) and value != "WarmupDecayLR":
        what = f"{show(value)} is taken in place of the Trainer's lr_scheduler_type, without a word"
        correction = fix("Remove the section", remove(document, ("scheduler",)), safe=False)
        yield Hit(("scheduler",), what, "nothing, and lr_scheduler_type counts", "key", correction)


def _batch_before_start(document: Document, context: Context) -> Iterator[Hit]:
    ours = isinstance(document.get(OUR_SECTION), dict)
    if context.framework == "hf" and ours and stage(document) == 3 and document.get("train_batch_size") == AUTO:
        what = (
            '"auto" may fail on CPUs with stage 3 and several processes: weights are partitioned before DeepSpeed '
            "counts more than one"
        )
        correction = fix("Remove it", remove(document, ("train_batch_size",)))
        yield Hit(("train_batch_size",), what, "nothing: train_micro_batch_size_per_gpu says enough", fix=correction)


def _momentum(document: Document, context: Context) -> Iterator[Hit]:
    """What the file gives as betas is compared with the method by the rules of that section."""
    left_open = not document.has("optimizer") or document.get("optimizer", "params", "betas") == AUTO
    path = (OUR_SECTION, "gradients", "method")
    if context.framework == "hf" and document.get(*path) in ("demo", "dgc") and left_open:
        what = f"{show(document.get(*path))} brings a momentum, and the Trainer's optimizer has one of 0.9 besides"
        yield Hit(path, what, "--adam_beta1 0 on the command line (TrainingArguments(adam_beta1=0.0))")


def _hf(**keys: object) -> str:
    """Text of an example for Hugging Face."""
    usual = {"train_micro_batch_size_per_gpu": AUTO, "gradient_clipping": AUTO, ZERO: {"stage": 0}}
    return config(**{**usual, **keys})


RULES = (
    Rule(
        "DSC710",
        "hf-needs-zero-section",
        "error",
        _FAMILY,
        "Hugging Face needs a section zero_optimization.",
        "Accelerate, and the Trainer through it, stop without one (accelerate/utils/dataclasses.py).",
        config(train_micro_batch_size_per_gpu=1, gradient_clipping=AUTO),
        _hf(train_micro_batch_size_per_gpu=1),
        _no_zero,
        raises("Please specify the ZeRO optimization config"),
        {"framework": "accelerate"},
    ),
    Rule(
        "DSC711",
        "hf-hidden-size-missing",
        "error",
        _FAMILY,
        '"auto" bucket sizes need the hidden size of the model.',
        "Both take the sizes from model.config.hidden_size or hidden_sizes; the Trainer looks into text_config, too "
        "(transformers/integrations/deepspeed.py).",
        _hf(zero_optimization={"stage": 0, "reduce_bucket_size": AUTO}),
        _hf(zero_optimization={"stage": 0, "reduce_bucket_size": 500000000}),
        _no_hidden_size,
        raises("neither `hidden_size` nor `hidden_sizes`"),
        {"framework": "hf", "model": {"num_attention_heads": 4}},
    ),
    Rule(
        "DSC712",
        "hf-fixed-value",
        "info",
        _FAMILY,
        "A number that the Trainer calculates and compares.",
        "The batch of all ranks holds for one number of ranks, and the number of steps for one set of data: the "
        'Trainer stops where the file has others (transformers/integrations/deepspeed.py); "auto" takes its own.',
        _hf(train_batch_size=24),
        _hf(),
        _fixed,
        raises("mismatch TrainingArguments"),
        _HF,
    ),
    Rule(
        "DSC713",
        "accelerate-needs-dummy",
        "info",
        _FAMILY,
        "Accelerate wants stand-ins for an optimizer or scheduler of the file.",
        "Accelerator.prepare refuses one in the file together with one in the program (accelerate/accelerator.py).",
        trained(zero_optimization={"stage": 0}, gradient_clipping=AUTO),
        _hf(),
        _dummies,
        unproved("it depends on the program, not on the file"),
        {"framework": "accelerate"},
    ),
    Rule(
        "DSC714",
        "hf-stage-3-saves-partitions",
        "warning",
        _FAMILY,
        "With stage 3 the Trainer saves no whole model.",
        "Weights are gathered for saving only if told so (runtime/zero/config.py); else the Trainer saves the "
        "partitions.",
        _hf(zero_optimization={"stage": 3}),
        _hf(zero_optimization=_STAGE3),
        _no_gather,
        accepts("save_model writes no weights that from_pretrained reads"),
        _HF,
    ),
    Rule(
        "DSC715",
        "hf-text-for-a-boolean",
        "error",
        _FAMILY,
        "fp16 or bf16 is enabled or disabled by text.",
        "DeepSpeed would convert it; the Trainer compares it with its own fp16 and bf16, which are booleans, and stops "
        "(transformers/integrations/deepspeed.py).",
        _hf(bf16={"enabled": "false"}),
        _hf(bf16={"enabled": False}),
        _text_for_boolean,
        raises("mismatch TrainingArguments"),
        _HF,
    ),
    Rule(
        "DSC716",
        "hf-no-clipping",
        "warning",
        _FAMILY,
        "Hugging Face, and no gradient_clipping in the file.",
        "DeepSpeed clips by its own configuration alone: with it Accelerate's clip_grad_norm_ does nothing "
        "(accelerate/accelerator.py), so that the Trainer's max_grad_norm, 1.0 unless given, has no effect.",
        config(train_micro_batch_size_per_gpu=AUTO, zero_optimization={"stage": 0}),
        _hf(),
        _no_clipping,
        accepts("gradients are not clipped, although the arguments say so"),
        _HF,
    ),
    Rule(
        "DSC717",
        "hf-section-unused",
        "warning",
        _FAMILY,
        "A section that nobody reads under Hugging Face.",
        "activation_checkpointing is for programs that call deepspeed.checkpointing "
        "(runtime/activation_checkpointing/checkpointing.py), pipeline for a PipelineModule (runtime/pipe/engine.py).",
        _hf(activation_checkpointing={"partition_activations": True}),
        _hf(),
        _unused,
        accepts("the section has no effect"),
        _HF,
    ),
    Rule(
        "DSC718",
        "hf-scheduler-replaced",
        "warning",
        _FAMILY,
        "The file has a scheduler, and so lr_scheduler_type has no effect.",
        "The Trainer makes a scheduler only where the file has none (transformers/integrations/deepspeed.py). WarmupLR "
        "never decays, where the Trainer's default falls to zero. WarmupDecayLR falls to zero too and is left out: "
        "beside --lr_scheduler_type cosine it counts all the same.",
        _hf(
            optimizer={"type": "AdamW", "params": {"lr": AUTO}},
            scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": AUTO}},
        ),
        _hf(optimizer={"type": "AdamW", "params": {"lr": AUTO}}),
        _scheduler,
        accepts("the learning rate takes another course than the arguments say"),
        _HF,
    ),
    Rule(
        "DSC719",
        "hf-stage-3-batch-on-cpu",
        "info",
        _FAMILY,
        '"auto" at train_batch_size, with stage 3 and on CPUs.',
        "A model that from_config or from_pretrained makes is partitioned at once, by a configuration whose batch "
        "sizes are compared with the number of ranks (runtime/config.py). With use_cpu and several processes "
        "DeepSpeed's communication has not been started then, unless the program has called "
        "deepspeed.init_distributed, and it counts one. Only for files with a section deepspeed_compress: on GPUs, and "
        "with one process, nothing is wrong.",
        _hf(train_batch_size=AUTO, zero_optimization=_STAGE3, deepspeed_compress=_INSTALLED),
        _hf(zero_optimization=_STAGE3, deepspeed_compress=_INSTALLED),
        _batch_before_start,
        unproved("it takes a model that is made while two ranks have the Trainer's arguments"),
        _HF,
    ),
    Rule(
        "DSC720",
        "hf-momentum-twice",
        "warning",
        _FAMILY,
        "dgc or demo, and an optimizer whose momentum the Trainer chooses.",
        "The methods give gradients a momentum, so that the optimizer must have none. The Trainer makes the optimizer, "
        'or fills in "betas": "auto", with its argument adam_beta1 (transformers/integrations/deepspeed.py), which is '
        "0.9; betas in the file that differ from it, it refuses.",
        _hf(deepspeed_compress={"gradients": {"method": "demo"}, **_INSTALLED}),
        _hf(deepspeed_compress={"gradients": {"method": "blockwise"}, **_INSTALLED}),
        _momentum,
        unproved("it depends on the command line"),
        _HF,
    ),
)
