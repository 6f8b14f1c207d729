"""Rules on the value "auto", which Hugging Face replaces and DeepSpeed does not."""

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, remove
from deepspeed_compress.tools.lint.keys import OUR_SECTION, known_values
from deepspeed_compress.tools.lint.rule import BUCKETS, READ_RAW, Context, Findings, corrected, finding, rule
from deepspeed_compress.tools.lint.values import AUTO, leaves, means_auto, name, show

_BY_BOTH: frozenset[Path] = frozenset(
    {
        ("train_batch_size",),
        ("train_micro_batch_size_per_gpu",),
        ("gradient_accumulation_steps",),
        ("gradient_clipping",),
        ("steps_per_print",),
        ("fp16", "enabled"),
        ("bf16", "enabled"),
        ("optimizer", "params", "lr"),
        ("optimizer", "params", "weight_decay"),
        ("scheduler", "params", "warmup_min_lr"),
        ("scheduler", "params", "warmup_max_lr"),
        ("scheduler", "params", "warmup_num_steps"),
        ("scheduler", "params", "total_num_steps"),
        ("zero_optimization", "stage"),
        ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
        *(("zero_optimization", bucket) for bucket in BUCKETS),
        *(
            ("zero_optimization", part, key)
            for part in ("offload_optimizer", "offload_param")
            for key in ("device", "nvme_path")
        ),
    }
)
"""Keys that Accelerate fills in, and therefore also the Trainer of Transformers, which uses it."""
BY_TRAINER = _BY_BOTH | {("optimizer", "params", "betas"), ("optimizer", "params", "eps")}
# Keys of which "auto" is a regular value.
_ITS_OWN = frozenset({"keep_in_fp32_modules", "stages"})
# Keys whose values are names chosen by users.
_NAMES = frozenset({"job_name", "group", "team", "project", "workspace", "experiment_name"})
_OWN_SECTIONS = frozenset({"autotuning", "expert_parallel"})


def _meant_for_deepspeed(document: Document, context: Context) -> bool:
    """Return True if nothing fills in "auto". DeepSpeed's autotuner does."""
    return context.framework == "deepspeed" and document.get("autotuning", "enabled") is not True


@rule("DSC700", "error")
def unresolved_auto(document: Document, context: Context) -> Findings:
    """The value "auto" is used where DeepSpeed needs another one.

    Only Hugging Face replaces the word. DeepSpeed calculates with it (runtime/config.py) or fails at the first step, as
    with gradient_clipping.

    Wrong: {"train_batch_size": "auto"}
    Right: {"train_batch_size": 8}
    Context: {"framework": "deepspeed"}
    Proof: raises TypeError
    """
    if not _meant_for_deepspeed(document, context):
        return
    paths = [path for path, _, member in known_values(document, strict=False) if member.value.value == AUTO]
    for path in (*paths, *document.parameter_paths, *READ_RAW):
        if document.get(*path) == AUTO and path[0] not in _OWN_SECTIONS and path[-1] not in _ITS_OWN:
            what = f'"auto" at {name(path)} is used as it is, because DeepSpeed fills in nothing (allowed: a value)'
            yield finding(path, what, "a value, or use Hugging Face")


@rule("DSC701", "warning")
def auto_means_default(document: Document, context: Context) -> Findings:
    """With the value "auto", DeepSpeed uses its default.

    DeepSpeed's models drop keys whose value is "auto" (runtime/config_utils.py). Buckets then have 5e8 elements for
    every model.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000000}}
    Context: {"framework": "deepspeed"}
    Proof: ignores
    """
    for path, _, member in known_values(document, strict=True):
        fails = path in READ_RAW or path[1:2] == ("zenflow",)
        if member.value.value == AUTO and _meant_for_deepspeed(document, context) and not fails:
            what = f'"auto" at {name(path)} means the default to DeepSpeed, as if the key were missing'
            yield finding(path, what, "a value, or remove the key", fix("Remove it", remove(document, path)))


@rule("DSC702", "error")
def auto_not_filled(document: Document, context: Context) -> Findings:
    """The value "auto" is used where Hugging Face does not fill it in.

    Accelerate stops at an "auto" that it has no value for (accelerate/utils/dataclasses.py); the Trainer also
    fills in betas and eps (transformers/integrations/deepspeed.py).

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},
        "wall_clock_breakdown": "auto"}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},
        "wall_clock_breakdown": false}
    Context: {"framework": "accelerate"}
    Proof: raises not found in kwargs
    """
    # Report all keys in one finding, because a block of keys at the wrong place has many.
    filled = BY_TRAINER if context.framework == "hf" else _BY_BOTH
    everything = leaves(document.data) if context.hugging_face else ()
    left = [path for path, value in everything if value == AUTO and path not in filled]
    left = [path for path in left if path[0] != OUR_SECTION]
    if left:
        who = "the Trainer" if context.framework == "hf" else "Accelerate"
        what = f'{who} does not fill in "auto" at {", ".join(map(name, left))}, and stops'
        yield finding(left[0], what, "a value, or remove the key")


@rule("DSC703", "error")
def auto_misspelled(document: Document, context: Context) -> Findings:
    """The value "auto" is written as "Auto" or "AUTO".

    Hugging Face (transformers/integrations/deepspeed.py) and DeepSpeed's models (runtime/config_utils.py) recognize
    only the word in lower case. Any other spelling reaches DeepSpeed as text.

    Wrong: {"train_batch_size": "Auto"}
    Right: {"train_batch_size": 8}
    Proof: raises TypeError
    """
    known = [path for strict in (True, False) for path, key, _ in known_values(document, strict=strict)]
    for path in (*known, *document.parameter_paths):
        value = document.get(*path)
        if value != AUTO and means_auto(value) and path[-1] not in _NAMES:
            what = f'{show(value)} is not the word that Hugging Face replaces (allowed: "auto")'
            yield corrected(document, path, what, AUTO, "Write auto")
