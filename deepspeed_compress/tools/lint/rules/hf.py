"""Rules on the requirements of Hugging Face's Trainer and Accelerate."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, Path, at, at_key, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import add, fix, remove, replace
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, unproved
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

_HF = {"framework": "hf"}
_HALVES: tuple[Path, ...] = (("fp16", "enabled"), ("bf16", "enabled"))
_BUCKETS = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
_CALCULATED: Mapping[Path, str] = {
    ("train_batch_size",): "per_device_train_batch_size x gradient_accumulation_steps x ranks",
    ("scheduler", "params", "total_num_steps"): "the number of steps of the run",
}
"""Settings that the Trainer compares with values it computes. All others it compares with arguments that users give."""
_GATHER = "stage3_gather_16bit_weights_on_model_save"
_STAGE3 = {"stage": 3, _GATHER: True}
_INSTALLED = {"lint": {"ignore": ["compress-needs-install"]}}


def _hf(**keys: object) -> str:
    """Return the text of an example for Hugging Face."""
    usual = {"train_micro_batch_size_per_gpu": AUTO, "gradient_clipping": AUTO, ZERO: {"stage": 0}}
    return config(**{**usual, **keys})


@rule(
    code="DSC710",
    name="hf-needs-zero-section",
    severity="error",
    family="hugging-face",
    summary="Hugging Face needs a section zero_optimization.",
    reason="Accelerate, and the Trainer through it, stop without one (accelerate/utils/dataclasses.py).",
    wrong=config(train_micro_batch_size_per_gpu=1, gradient_clipping=AUTO),
    right=_hf(train_micro_batch_size_per_gpu=1),
    proof=raises("Please specify the ZeRO optimization config"),
    context={"framework": "accelerate"},
)
def hf_needs_zero_section(document: Document, context: Context) -> Iterator[Diagnostic]:
    # DeepSpeed's autotuner adds the section to the configurations that it tries.
    if hugging_face(context) and not document.has(ZERO) and document.get("autotuning", "enabled") is not True:
        what = "zero_optimization is missing, without which Accelerate stops"
        yield Diagnostic(at(ZERO), what, write(f'"{ZERO}": {{"stage": 0}}, or another stage'))


def _hidden_size(model: Mapping[str, Any], framework: str | None) -> bool:
    """Return True if the hidden size of the model is where Hugging Face looks for it."""
    text = model.get("text_config")
    places = [model, text] if framework == "hf" and isinstance(text, dict) else [model]
    return any(key in place for place in places for key in ("hidden_size", "hidden_sizes", "n_embd"))


@rule(
    code="DSC711",
    name="hf-hidden-size-missing",
    severity="error",
    family="hugging-face",
    summary='"auto" bucket sizes need the hidden size of the model.',
    reason=(
        "Both take the sizes from model.config.hidden_size or hidden_sizes; the Trainer looks into text_config, too "
        "(transformers/integrations/deepspeed.py)."
    ),
    wrong=_hf(zero_optimization={"stage": 0, "reduce_bucket_size": AUTO}),
    right=_hf(zero_optimization={"stage": 0, "reduce_bucket_size": 500000000}),
    proof=raises("neither `hidden_size` nor `hidden_sizes`"),
    context={"framework": "hf", "model": {"num_attention_heads": 4}},
)
def hf_hidden_size_missing(document: Document, context: Context) -> Iterator[Diagnostic]:
    if context.model is None or not hugging_face(context) or _hidden_size(context.model, context.framework):
        return
    for bucket in _BUCKETS:
        if document.get(ZERO, bucket) == AUTO:
            what = f'"auto" at {bucket} needs the hidden_size of the model, whose config.json has none'
            yield Diagnostic(at(ZERO, bucket), what, write("a number of elements"))


@rule(
    code="DSC712",
    name="hf-fixed-value",
    severity="info",
    family="hugging-face",
    summary="A number that the Trainer calculates and compares.",
    reason=(
        "The batch of all ranks holds for one number of ranks, and the number of steps for one set of data: the "
        'Trainer stops where the file has others (transformers/integrations/deepspeed.py); "auto" takes its own.'
    ),
    wrong=_hf(train_batch_size=24),
    right=_hf(),
    proof=raises("mismatch TrainingArguments"),
    context=_HF,
)
def hf_fixed_value(document: Document, context: Context) -> Iterator[Diagnostic]:
    for path, meaning in _CALCULATED.items() if context.framework == "hf" else ():
        value = number(document.get(*path))
        if value is not None and value > 0:
            what = f"the Trainer stops unless {show(value)} is what it calculates: {meaning}"
            correction = fix("Write auto", replace(document, path, AUTO), safe=False)
            yield Diagnostic(at(*path), what, write('"auto", which takes it from there'), fix=correction)


@rule(
    code="DSC713",
    name="accelerate-needs-dummy",
    severity="info",
    family="hugging-face",
    summary="Accelerate wants stand-ins for an optimizer or scheduler of the file.",
    reason="Accelerator.prepare refuses one in the file together with one in the program (accelerate/accelerator.py).",
    wrong=trained(zero_optimization={"stage": 0}, gradient_clipping=AUTO),
    right=_hf(),
    proof=unproved("it depends on the program, not on the file"),
    context={"framework": "accelerate"},
)
def accelerate_needs_dummy(document: Document, context: Context) -> Iterator[Diagnostic]:
    for part, dummy in (("optimizer", "DummyOptim"), ("scheduler", "DummyScheduler")):
        if context.framework == "accelerate" and document.has(part):
            what = f"with {part} in the file, the program must pass accelerate.utils.{dummy} in its place"
            yield Diagnostic(at_key(part), what, write(f"the {part} in one of the two places only"))


@rule(
    code="DSC714",
    name="hf-stage-3-saves-partitions",
    severity="warning",
    family="hugging-face",
    summary="With stage 3 the Trainer saves no whole model.",
    reason=(
        "Weights are gathered for saving only if told so (runtime/zero/config.py); else the Trainer saves the "
        "partitions."
    ),
    wrong=_hf(zero_optimization={"stage": 3}),
    right=_hf(zero_optimization=_STAGE3),
    proof=accepts("save_model writes no weights that from_pretrained reads"),
    context=_HF,
)
def hf_stage_3_saves_partitions(document: Document, context: Context) -> Iterator[Diagnostic]:
    names = (_GATHER, "gather_16bit_weights_on_model_save", "stage3_gather_fp16_weights_on_model_save")
    if hugging_face(context) and stage(document) == 3 and not any(document.has(ZERO, key) for key in names):
        what = "without stage3_gather_16bit_weights_on_model_save no model is saved with stage 3, only its partitions"
        yield Diagnostic(at_key(ZERO), what, write(f'"{_GATHER}": true besides, or run zero_to_fp32.py afterwards'))


@rule(
    code="DSC715",
    name="hf-text-for-a-boolean",
    severity="error",
    family="hugging-face",
    summary="fp16 or bf16 is enabled or disabled by text.",
    reason=(
        "DeepSpeed would convert it; the Trainer compares it with its own fp16 and bf16, which are booleans, and stops "
        "(transformers/integrations/deepspeed.py)."
    ),
    wrong=_hf(bf16={"enabled": "false"}),
    right=_hf(bf16={"enabled": False}),
    proof=raises("mismatch TrainingArguments"),
    context=_HF,
)
def hf_text_for_a_boolean(document: Document, context: Context) -> Iterator[Diagnostic]:
    for path in _HALVES if context.framework == "hf" else ():
        meant = truth(document.get(*path))
        if isinstance(document.get(*path), str) and meant is not None:
            what = f"{show(document.get(*path))} is text, which is unequal to the Trainer's {path[0]}, and it stops"
            yield Diagnostic(
                at(*path), what, write(show(meant)), fix=fix("Write a boolean", replace(document, path, meant))
            )


@rule(
    code="DSC716",
    name="hf-no-clipping",
    severity="warning",
    family="hugging-face",
    summary="Hugging Face, and no gradient_clipping in the file.",
    reason=(
        "DeepSpeed clips by its own configuration alone: with it Accelerate's clip_grad_norm_ does nothing "
        "(accelerate/accelerator.py), so that the Trainer's max_grad_norm, 1.0 unless given, has no effect. "
        'The Trainer fills in "auto" with that argument; Accelerate fills in 1.0, whatever clip_grad_norm_ is given.'
    ),
    wrong=config(train_micro_batch_size_per_gpu=AUTO, zero_optimization={"stage": 0}),
    right=_hf(),
    proof=accepts("gradients are not clipped, although the arguments say so"),
    context=_HF,
)
def hf_no_clipping(document: Document, context: Context) -> Iterator[Diagnostic]:
    if hugging_face(context) and not document.has("gradient_clipping"):
        what = "without gradient_clipping nothing is clipped, whatever max_grad_norm and clip_grad_norm_ say"
        value, why = _CLIPPING[context.framework == "hf"]
        correction = fix(f"Write {show(value)}", add(document, (), "gradient_clipping", value), safe=False)
        instead = f'"gradient_clipping": {show(value)}{why}, or 0.0 to have it so'
        yield Diagnostic(at("gradient_clipping"), what, write(instead), fix=correction)


_CLIPPING: tuple[tuple[object, str], tuple[object, str]] = (
    (1.0, ' or the number that clip_grad_norm_ is given ("auto" is 1.0 with Accelerate, whatever it is given)'),
    (AUTO, ""),
)
"""Value to write and a remark on it: with Accelerate, and with the Trainer."""


_UNUSED: Mapping[str, str] = {
    "activation_checkpointing": "the Trainer's gradient_checkpointing instead",
    "pipeline": "nothing: remove the section",
}


@rule(
    code="DSC717",
    name="hf-section-unused",
    severity="warning",
    family="hugging-face",
    summary="A section that nobody reads under Hugging Face.",
    reason=(
        "activation_checkpointing is for programs that call deepspeed.checkpointing "
        "(runtime/activation_checkpointing/checkpointing.py), pipeline for a PipelineModule (runtime/pipe/engine.py)."
    ),
    wrong=_hf(activation_checkpointing={"partition_activations": True}),
    right=_hf(),
    proof=accepts("the section has no effect"),
    context=_HF,
)
def hf_section_unused(document: Document, context: Context) -> Iterator[Diagnostic]:
    for key, instead in _UNUSED.items() if hugging_face(context) else ():
        asked = key == "pipeline" or any(value not in (False, None, 0) for value in section(document, key).values())
        if isinstance(document.get(key), dict) and asked:
            yield Diagnostic(at_key(key), f"{key} has no effect: no model of Hugging Face reads it", write(instead))


@rule(
    code="DSC718",
    name="hf-scheduler-replaced",
    severity="warning",
    family="hugging-face",
    summary="The file has a scheduler, and so lr_scheduler_type has no effect.",
    reason=(
        "The Trainer makes a scheduler only where the file has none (transformers/integrations/deepspeed.py). WarmupLR "
        "never decays, where the Trainer's default falls to zero. WarmupDecayLR falls to zero too and is left out: "
        "beside --lr_scheduler_type cosine it counts all the same."
    ),
    wrong=_hf(
        optimizer={"type": "AdamW", "params": {"lr": AUTO}},
        scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": AUTO}},
    ),
    right=_hf(optimizer={"type": "AdamW", "params": {"lr": AUTO}}),
    proof=accepts("the learning rate takes another course than the arguments say"),
    context=_HF,
)
def hf_scheduler_replaced(document: Document, context: Context) -> Iterator[Diagnostic]:
    """Report a scheduler that replaces the Trainer's. WarmupDecayLR decays like the default and is left out."""
    value = document.get("scheduler", "type")
    if context.framework == "hf" and isinstance(value, str) and value != "WarmupDecayLR":
        what = f"{show(value)} is taken in place of the Trainer's lr_scheduler_type, without a word"
        correction = fix("Remove the section", remove(document, ("scheduler",)), safe=False)
        yield Diagnostic(at_key("scheduler"), what, write("nothing, and lr_scheduler_type counts"), fix=correction)


@rule(
    code="DSC719",
    name="hf-stage-3-batch-on-cpu",
    severity="info",
    family="hugging-face",
    summary='"auto" at train_batch_size, with stage 3 and on CPUs.',
    reason=(
        "A model that from_config or from_pretrained makes is partitioned at once, by a configuration whose batch "
        "sizes are compared with the number of ranks (runtime/config.py). With use_cpu and several processes "
        "DeepSpeed's communication has not been started then, unless the program has called "
        "deepspeed.init_distributed, and it counts one. Only for files with a section deepspeed_compress: on GPUs, and "
        "with one process, nothing is wrong."
    ),
    wrong=_hf(train_batch_size=AUTO, zero_optimization=_STAGE3, deepspeed_compress=_INSTALLED),
    right=_hf(zero_optimization=_STAGE3, deepspeed_compress=_INSTALLED),
    proof=unproved("it takes a model that is made while two ranks have the Trainer's arguments"),
    context=_HF,
)
def hf_stage_3_batch_on_cpu(document: Document, context: Context) -> Iterator[Diagnostic]:
    ours = isinstance(document.get(OUR_SECTION), dict)
    if context.framework == "hf" and ours and stage(document) == 3 and document.get("train_batch_size") == AUTO:
        what = (
            '"auto" may fail on CPUs with stage 3 and several processes: weights are partitioned before DeepSpeed '
            "counts more than one"
        )
        correction = fix("Remove it", remove(document, ("train_batch_size",)))
        yield Diagnostic(
            at("train_batch_size"), what, write("nothing: train_micro_batch_size_per_gpu says enough"), fix=correction
        )


@rule(
    code="DSC720",
    name="hf-momentum-twice",
    severity="warning",
    family="hugging-face",
    summary="dgc or demo, and an optimizer whose momentum the Trainer chooses.",
    reason=(
        "The methods give gradients a momentum, so that the optimizer must have none. The Trainer makes the optimizer, "
        'or fills in "betas": "auto", with its argument adam_beta1 (transformers/integrations/deepspeed.py), which is '
        "0.9; betas in the file that differ from it, it refuses."
    ),
    wrong=_hf(deepspeed_compress={"gradients": {"method": "demo"}, **_INSTALLED}),
    right=_hf(deepspeed_compress={"gradients": {"method": "blockwise"}, **_INSTALLED}),
    proof=unproved("it depends on the command line"),
    context=_HF,
)
def hf_momentum_twice(document: Document, context: Context) -> Iterator[Diagnostic]:
    """Report a second momentum if the file leaves the betas open. The section's rules check betas in the file."""
    left_open = not document.has("optimizer") or document.get("optimizer", "params", "betas") == AUTO
    path = (OUR_SECTION, "gradients", "method")
    if context.framework == "hf" and document.get(*path) in ("demo", "dgc") and left_open:
        what = f"{show(document.get(*path))} brings a momentum, and the Trainer's optimizer has one of 0.9 besides"
        yield Diagnostic(
            at(*path), what, write("--adam_beta1 0 on the command line (TrainingArguments(adam_beta1=0.0))")
        )
