"""What Hugging Face's Trainer and Accelerate demand of a configuration."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.lint.document import Document
from deepspeed_compress.lint.edits import fix, replace
from deepspeed_compress.lint.hit import Hit, Path
from deepspeed_compress.lint.rule import Context, Rule, accepts, raises, unproved
from deepspeed_compress.lint.rules.common import AUTO, ZERO, config, hugging_face, name, show, stage, trained

_FAMILY = "hugging-face"
_HF = {"framework": "hf"}
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_ARGUMENTS: Mapping[Path, str] = {
    ("train_micro_batch_size_per_gpu",): "per_device_train_batch_size",
    ("gradient_accumulation_steps",): "gradient_accumulation_steps",
    ("train_batch_size",): "their product with the number of ranks",
    ("gradient_clipping",): "max_grad_norm",
    ("optimizer", "params", "lr"): "learning_rate",
    ("optimizer", "params", "betas"): "adam_beta1 and adam_beta2",
    ("optimizer", "params", "eps"): "adam_epsilon",
    ("optimizer", "params", "weight_decay"): "weight_decay",
    ("scheduler", "params", "warmup_max_lr"): "learning_rate",
    ("scheduler", "params", "warmup_num_steps"): "warmup_steps",
    ("scheduler", "params", "total_num_steps"): "the number of steps",
    ("fp16", "enabled"): "fp16",
    ("bf16", "enabled"): "bf16",
}
"""Settings that the Trainer compares with its own arguments."""


def _no_zero(document: Document, context: Context) -> Iterator[Hit]:
    if hugging_face(context) and not document.has(ZERO):
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
    for path, argument in _ARGUMENTS.items() if context.framework == "hf" else ():
        value = document.get(*path)
        if value not in (None, AUTO):
            what = f"{show(value)} must equal the argument of the Trainer ({argument}), or it stops"
            correction = fix("Write auto", replace(document, path, AUTO), safe=False)
            yield Hit(
                path,
                f"{what}: {name(path)}" if len(path) > 1 else what,
                '"auto", which takes it from there',
                fix=correction,
            )


def _dummies(document: Document, context: Context) -> Iterator[Hit]:
    for part, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if context.framework == "accelerate" and document.has(part):
            what = f"with {part} in the file, the program must pass accelerate.utils.{dummy} in its place"
            yield Hit((part,), what, f"the {part} in one of the two places only", "key")


_GATHER = "stage3_gather_16bit_weights_on_model_save"


def _no_gather(document: Document, context: Context) -> Iterator[Hit]:
    names = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if hugging_face(context) and stage(document) == 3 and not any(document.has(ZERO, key) for key in names):
        what = "without stage3_gather_16bit_weights_on_model_save no model is saved with stage 3, only its partitions"
        yield Hit((ZERO,), what, f'"{_GATHER}": true besides, or run zero_to_fp32.py afterwards', "key")


RULES = (
    Rule(
        "DSC710",
        "hf-needs-zero-section",
        "error",
        _FAMILY,
        "Hugging Face needs a section zero_optimization.",
        "Accelerate, and the Trainer through it, stop without one (accelerate/utils/dataclasses.py).",
        config(train_micro_batch_size_per_gpu=1),
        config(train_micro_batch_size_per_gpu=1, zero_optimization={"stage": 0}),
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
        config(train_micro_batch_size_per_gpu="auto", zero_optimization={"stage": 0, "reduce_bucket_size": "auto"}),
        config(train_micro_batch_size_per_gpu="auto", zero_optimization={"stage": 0, "reduce_bucket_size": 500000000}),
        _no_hidden_size,
        raises("neither `hidden_size` nor `hidden_sizes`"),
        {"framework": "hf", "model": {"num_attention_heads": 4}},
    ),
    Rule(
        "DSC712",
        "hf-fixed-value",
        "info",
        _FAMILY,
        "A number that the Trainer compares with its arguments.",
        'The Trainer stops where the two differ (transformers/integrations/deepspeed.py); "auto" takes its own.',
        config(train_micro_batch_size_per_gpu=4, zero_optimization={"stage": 0}),
        config(train_micro_batch_size_per_gpu="auto", zero_optimization={"stage": 0}),
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
        trained(zero_optimization={"stage": 0}),
        config(zero_optimization={"stage": 0}),
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
        config(train_micro_batch_size_per_gpu="auto", zero_optimization={"stage": 3}),
        config(
            train_micro_batch_size_per_gpu="auto",
            zero_optimization={"stage": 3, "stage3_gather_16bit_weights_on_model_save": True},
        ),
        _no_gather,
        accepts("save_model writes no weights that from_pretrained reads"),
        _HF,
    ),
)
