"""Rules on our own section that report what `config` finds. Rules that need facts about the run are in `run`.

`config` imports pydantic, which takes a third of the linter's time, so it is imported only for files with the section.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from deepspeed_compress.diagnostics import Diagnostic, Fix, Path, at, write
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, rename
from deepspeed_compress.tools.lint.fixes import replace as put
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, rule
from deepspeed_compress.tools.lint.rules.common import (
    section,
    show,
)

if TYPE_CHECKING:
    from deepspeed_compress.config import CompressConfig, Parallelism


def _wrong(document: Document, context: Context) -> dict[str, list[Diagnostic]]:
    """Return the problems that `config` finds, by the rule that reports them."""
    if OUR_SECTION not in document.data:
        return {"invalid": [], "parallelism": [], "file": [], "unsupported": []}
    from deepspeed_compress.config import find_problems
    from deepspeed_compress.config.contradictions import find_mismatches
    from deepspeed_compress.config.expand import find_conflicts
    from deepspeed_compress.config.unsupported import find_unsupported

    parsed, parallelism = parsed_section(document), _parsed_parallelism(document)
    mismatches = [] if parsed is None else find_mismatches(document.data, parsed, context.world_size)
    unsupported = find_unsupported(document.data, parsed)
    conflicts = [] if parallelism is None else find_conflicts(document.data, parallelism, context.world_size)
    everything, others = find_problems(document.data, context.world_size), [*conflicts, *mismatches, *unsupported]
    return {
        "invalid": [problem for problem in everything if problem not in others],
        "parallelism": [problem for problem in everything if problem in conflicts],
        "file": [problem for problem in everything if problem in mismatches and problem not in conflicts],
        "unsupported": [problem for problem in everything if problem in unsupported],
    }


@rule("DSC900", "error")
def compress_invalid(document: Document, context: Context) -> Iterator[Diagnostic]:
    """The section deepspeed_compress is invalid.

    What `ds-compress check` reports: unknown keys, wrong values, "auto", settings that contradict each other.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: raises ConfigError
    """
    for problem in _wrong(document, context)["invalid"]:
        yield replace(problem, fix=_correction(document, problem))


def _correction(document: Document, problem: Diagnostic) -> Fix | None:
    """Return the fix of a misspelled key or value. It is a guess that the user has to confirm."""
    path, meant = problem.place.path, problem.meant
    if meant is None or (problem.place.on == "key" and document.has(*path[:-1], meant)):
        return None
    edits = rename(document, path, str(meant)) if problem.place.on == "key" else put(document, path, meant)
    return fix(f"Write {show(meant)}", edits, safe=False)


@rule("DSC901", "error")
def compress_parallelism(document: Document, context: Context) -> Iterator[Diagnostic]:
    """The section parallelism contradicts DeepSpeed's keys or the number of ranks.

    It is written into DeepSpeed's own keys, so that both must agree, and ZeRO 2 and 3 exclude pipelines.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Proof: raises disagrees with
    """
    yield from _wrong(document, context)["parallelism"]


@rule("DSC902", "error")
def compress_against_file(document: Document, context: Context) -> Iterator[Diagnostic]:
    """A method cannot be right with the rest of the file.

    Without ZeRO no weights are gathered, and differences of weights can be sent with ZeRO 1 and 2 only. DGC and DeMo
    bring a momentum of their own, so that the optimizer must have none. Nodes must divide the ranks.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Proof: raises cannot be combined with
    """
    yield from _wrong(document, context)["file"]


def _parsed_parallelism(document: Document) -> "Parallelism | None":
    from pydantic import ValidationError

    from deepspeed_compress.config import Parallelism

    try:
        return Parallelism.model_validate(section(document, OUR_SECTION).get("parallelism") or {})
    except ValidationError:
        return None


def parsed_section(document: Document) -> "CompressConfig | None":
    """Return the section if there is one and it is valid, else None."""
    if OUR_SECTION not in document.data:
        return None
    from pydantic import ValidationError

    from deepspeed_compress.config import CompressConfig

    try:
        return CompressConfig.model_validate(document.get(OUR_SECTION))
    except ValidationError:
        return None


@rule("DSC903", "warning")
def compress_no_effect(document: Document, context: Context) -> Iterator[Diagnostic]:
    """A setting of deepspeed_compress has no effect, or costs more than it gives.

    What training warns of (CompressWarning).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": null}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": {}}}}
    Proof: warns loses every value that is not sent
    """
    parsed = parsed_section(document)
    if parsed is not None:
        from deepspeed_compress.config import find_notices

        yield from find_notices(parsed)


@rule("DSC904", "error")
def compress_unsupported(document: Document, context: Context) -> Iterator[Diagnostic]:
    """A feature of DeepSpeed that cannot be compressed.

    Such engines are refused (UnsupportedError): their gradients take other ways.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "deepspeed_compress": {}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {}}
    Proof: raises UnsupportedError
    """
    found = _wrong(document, context)["unsupported"]
    yield from (one for one in found if one.place.path != _AUTOCAST)


@rule("DSC912", "error")
def compress_scaled_autocast(document: Document, context: Context) -> Iterator[Diagnostic]:
    """torch_autocast in fp16 without ZeRO beside deepspeed_compress.

    The gradient scaler of torch works outside of DeepSpeed there, and the engine is refused.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "torch_autocast": {"enabled": true, "dtype": "fp16"}, "deepspeed_compress": {}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "torch_autocast": {"enabled": true, "dtype": "bf16"}, "deepspeed_compress": {}}
    Proof: raises torch_autocast in fp16 without ZeRO
    """
    found = _wrong(document, context)["unsupported"]
    yield from (one for one in found if one.place.path == _AUTOCAST)


@rule("DSC913", "info")
def compress_universal_resume(document: Document, context: Context) -> Iterator[Diagnostic]:
    """checkpoint.load_universal beside checkpoints that training goes on from by itself.

    Going on by itself takes the universal checkpoint until the run has saved a newer one. But `engine.load_checkpoint`
    of the program takes the universal one each time, and fails without one (DeepSpeed, runtime/engine.py,
    `load_checkpoint`).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "checkpoint": {"load_universal": true},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Proof: accepts every load_checkpoint of the program returns to the universal checkpoint
    """
    saving = section(document, OUR_SECTION, "checkpointing")
    goes_on = saving.get("directory") is not None and saving.get("resume") is not False
    if goes_on and document.get("checkpoint", "load_universal") is True:
        yield Diagnostic(
            at("checkpoint", "load_universal"),
            "load_checkpoint loads the universal checkpoint each time, whatever this run has saved since",
            write("nothing, once the run has saved a checkpoint of its own"),
        )


_AUTOCAST: Path = ("torch_autocast", "dtype")
"""Path of a problem that `config.unsupported` also finds. It has its own rule here."""
