"""Rules on the requirements of Lightning's DeepSpeedStrategy (Lightning 2.6)."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, finding, key_finding
from deepspeed_compress.tools.lint.values import AUTO, leaves, name, show, truth

_ACCUMULATION = "gradient_accumulation_steps"
_UNTESTED = "zero_allow_untested_optimizer"
_SHOWN = 8


def _reads(context: Context) -> bool:
    return context.framework == "lightning"


@rule("DSC740", "error")
def lightning_accumulation(document: Document, context: Context) -> Findings:
    """A file for Lightning sets gradient_accumulation_steps.

    The strategy refuses the key, because it sets it from the Trainer's accumulate_grad_batches
    (pytorch/strategies/deepspeed.py, _format_batch_size_and_grad_accum_config).

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    if _reads(context) and document.has(_ACCUMULATION):
        what = f"Lightning refuses {_ACCUMULATION}, whatever its value"
        correction = fix("Remove it", remove(document, (_ACCUMULATION,)), safe=False)
        instead = "Trainer(accumulate_grad_batches=...) in the program, and remove the key"
        yield key_finding((_ACCUMULATION,), what, instead, correction)


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
    if found and _reads(context):
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
        if _reads(context) and off and isinstance(document.get(half), dict):
            what = f'{half} stays off, also with Trainer(precision="{precision}")'
            correction = fix("Remove the section", remove(document, (half,)), safe=False)
            yield key_finding((half,), what, "nothing: the Trainer's precision then takes effect", correction)


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
    if _reads(context) and document.has("optimizer"):
        what = "configure_optimizers of the LightningModule is not called, its scheduler included"
        yield key_finding(("optimizer",), what, "the optimizer in one of the two places only")


@rule("DSC744", "warning")
def lightning_untested_optimizer_key(document: Document, context: Context) -> Findings:
    """A file for Lightning has stage 3 but not zero_allow_untested_optimizer.

    With stage 3, Trainer.validate, test and predict read the key without checking that it exists
    (pytorch/strategies/deepspeed.py, _initialize_deepspeed_inference).

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3}}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 3},
        "zero_allow_untested_optimizer": true}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    if _reads(context) and document.stage == 3 and document.has(ZERO) and not document.has(_UNTESTED):
        what = f"without {_UNTESTED} Trainer.validate, test and predict end with KeyError"
        yield finding((_UNTESTED,), what, f'"{_UNTESTED}": true as well')


@rule("DSC745", "info")
def lightning_fixed_batch(document: Document, context: Context) -> Findings:
    """A file for Lightning sets train_batch_size.

    The strategy adds the batch size of the data loader and accumulate_grad_batches (pytorch/strategies/deepspeed.py,
    _format_batch_size_and_grad_accum_config), and DeepSpeed asserts that the product with the number of ranks is the
    same (runtime/config.py).

    Wrong: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}, "train_batch_size": 32}
    Right: {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": 2}}
    Context: {"framework": "lightning"}
    Proof: unproved Lightning is not installed with this project, and its strategy needs a GPU; read in its source
    """
    value = document.get("train_batch_size")
    if _reads(context) and value is not None and value != AUTO:
        what = f"DeepSpeed stops unless {show(value)} is batch size x accumulate_grad_batches x ranks of the Trainer"
        correction = fix("Remove it", remove(document, ("train_batch_size",)), safe=False)
        yield finding(("train_batch_size",), what, "nothing: Lightning sets the sizes that DeepSpeed needs", correction)
