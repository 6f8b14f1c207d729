"""Rules on our own section that report what `config` finds. Rules that need facts about the run are in `run`.

`config` imports pydantic, which takes a third of the linter's time, so it is imported only for files with the section.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

from deepspeed_compress.diagnostics import Diagnostic, Fix
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, rename
from deepspeed_compress.tools.lint.fixes import replace as put
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import finding
from deepspeed_compress.tools.lint.values import show

if TYPE_CHECKING:
    from deepspeed_compress.config import CompressConfig
    from deepspeed_compress.config.section import Kind


def _problems(kind: "Kind", document: Document, context: Context) -> list[Diagnostic]:
    """Return the problems of a kind that `config` finds; none if there is no section."""
    if OUR_SECTION not in document.data:
        return []
    from deepspeed_compress.config.section import problems_by_kind

    return problems_by_kind(document.data, context.world_size).get(kind, [])


@rule("DSC900", "error")
def compress_invalid(document: Document, context: Context) -> Findings:
    """The section deepspeed_compress is invalid.

    These are the errors of `ds-compress check`: unknown keys, wrong values, "auto", and contradictory settings.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: raises ConfigError
    """
    for problem in _problems("section", document, context):
        yield replace(problem, fix=_correction(document, problem))


def _correction(document: Document, problem: Diagnostic) -> Fix | None:
    """Return the fix of a misspelled key or value. It is a guess that the user has to confirm."""
    path, meant = problem.place.path, problem.meant
    if meant is None or (problem.place.on == "key" and document.has(*path[:-1], meant)):
        return None
    edits = rename(document, path, str(meant)) if problem.place.on == "key" else put(document, path, meant)
    return fix(f"Write {show(meant)}", edits, safe=False)


@rule("DSC901", "error")
def compress_parallelism(document: Document, context: Context) -> Findings:
    """The section parallelism contradicts DeepSpeed's keys or the number of ranks.

    The section is written into DeepSpeed's own keys, so both must agree. ZeRO 2 and 3 exclude pipelines.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Proof: raises disagrees with
    """
    yield from _problems("parallelism", document, context)


@rule("DSC902", "error")
def compress_against_file(document: Document, context: Context) -> Findings:
    """A method does not work with the rest of the file.

    Without ZeRO, no weights are gathered, and differences of weights can only be sent with ZeRO 1 and 2. DGC and DeMo
    have a momentum of their own, so the optimizer must not have one. The ranks of a node must divide all ranks.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Proof: raises cannot be combined with
    """
    yield from _problems("file", document, context)


def parsed_section(document: Document) -> "CompressConfig | None":
    """Return the section if there is one and it is valid, else None."""
    if OUR_SECTION not in document.data:
        return None
    from pydantic import ValidationError

    from deepspeed_compress.config import CompressConfig, with_preset

    try:
        return CompressConfig.model_validate(with_preset(document.data))
    except ValidationError:
        return None


@rule("DSC903", "warning")
def compress_no_effect(document: Document, context: Context) -> Findings:
    """A setting of deepspeed_compress has no effect, or costs more than it gains.

    Training warns of it, too (CompressWarning).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": null}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": {}}}}
    Proof: warns loses every value that is not sent
    """
    parsed = parsed_section(document)
    if parsed is not None:
        from deepspeed_compress.config.section import find_notices

        yield from find_notices(parsed)


@rule("DSC904", "error")
def compress_unsupported(document: Document, context: Context) -> Findings:
    """The file uses a feature of DeepSpeed that does not work with compression.

    Such engines are refused (UnsupportedError), because they do not reduce gradients in the code that compresses them.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "deepspeed_compress": {}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {}}
    Proof: raises UnsupportedError
    """
    yield from _problems("unsupported", document, context)


@rule("DSC913", "info")
def compress_universal_resume(document: Document, context: Context) -> Findings:
    """checkpoint.load_universal is used together with checkpoints from which training resumes by itself.

    A run that resumes by itself loads the universal checkpoint until it has saved a newer one. But the program's
    `engine.load_checkpoint` always loads the universal one, and fails without one (DeepSpeed, runtime/engine.py,
    `load_checkpoint`).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "checkpoint": {"load_universal": true},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Proof: accepts every load_checkpoint of the program returns to the universal checkpoint
    """
    saving = document.section(OUR_SECTION, "checkpointing")
    goes_on = saving.get("directory") is not None and saving.get("resume") is not False
    if goes_on and document.get("checkpoint", "load_universal") is True:
        what = "load_checkpoint loads the universal checkpoint each time, whatever this run has saved since"
        yield finding(("checkpoint", "load_universal"), what, "nothing, once the run has saved a checkpoint of its own")


@rule("DSC916", "warning")
def compress_backward_sums(document: Document, context: Context) -> Findings:
    """Tensor-parallel ranks sum gradients in 4 bits.

    Gradients need more bits than outputs do: if they have 8 bits, the loss rises by half as much as with 4 bits in both
    passes (docs/activations.md).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "deepspeed_compress": {"gradients": {"method": "none"}, "activations": {"tensor": {"bits": 4}}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}, "deepspeed_compress": {"gradients": {"method": "none"},
        "activations": {"tensor": {"bits": 4, "backward_bits": 8}}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts the loss ends higher
    """
    tensor = document.section(OUR_SECTION, "activations", "tensor")
    key = "bits" if tensor.get("backward_bits") is None else "backward_bits"
    if tensor.get(key) == 4:
        path = (OUR_SECTION, "activations", "tensor", key)
        yield finding(path, "gradients are summed in 4 bits", '"backward_bits": 8')


@rule("DSC914", "warning")
def compress_rollout_rounding(document: Document, context: Context) -> Findings:
    """Weights for rollout workers are rounded, although exact changes are about as small.

    At a learning rate of 1e-5 or less, few 16-bit weights change in a step. Exact changes of these take about as many
    bytes as rounded ones (docs/rollout.md), and lose nothing.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-06}},
        "deepspeed_compress": {"rollout": {"directory": "policy", "method": "blockwise", "bits": 4}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-06}},
        "deepspeed_compress": {"rollout": {"directory": "policy"}}}
    Proof: accepts rollout workers have weights that are off by half of a step, and versions are not smaller
    """
    rollout, rate = document.section(OUR_SECTION, "rollout"), document.get("optimizer", "params", "lr")
    rounded = rollout.get("method") == "blockwise" and rollout.get("bits") == 4
    if rounded and rollout.get("dtype") != "fp32" and isinstance(rate, int | float) and 0 < rate <= _FEW_CHANGES:
        what = f'"blockwise" loses accuracy and saves nothing at a learning rate of {rate:g}'
        instead = '"exact", or "dtype": "fp32" if rollout workers need more than 16 bits'
        yield finding((OUR_SECTION, "rollout", "method"), what, instead)


_FEW_CHANGES = 1e-5
"""Learning rate up to which exact changes of 16-bit weights are about as small as rounded ones."""
