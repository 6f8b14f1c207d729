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
from deepspeed_compress.tools.lint.rule import Context, accepts, raises, rule, warns
from deepspeed_compress.tools.lint.rules.common import (
    section,
    show,
    trained,
    zero,
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


def with_section(**keys: object) -> dict[str, object]:
    """Return the keys of an example with our section."""
    return {OUR_SECTION: keys}


@rule(
    code="DSC900",
    name="compress-invalid",
    severity="error",
    family="compress",
    summary="The section deepspeed_compress is invalid.",
    reason='What `ds-compress check` reports: unknown keys, wrong values, "auto", settings that contradict each other.',
    wrong=trained(**with_section(gradients={"method": "blockwise", "bits": 5})),
    right=trained(**with_section(gradients={"method": "blockwise", "bits": 4})),
    proof=raises("ConfigError"),
)
def compress_invalid(document: Document, context: Context) -> Iterator[Diagnostic]:
    for problem in _wrong(document, context)["invalid"]:
        yield replace(problem, fix=_correction(document, problem))


def _correction(document: Document, problem: Diagnostic) -> Fix | None:
    """Return the fix of a misspelled key or value. It is a guess that the user has to confirm."""
    path, meant = problem.place.path, problem.meant
    if meant is None or (problem.place.on == "key" and document.has(*path[:-1], meant)):
        return None
    edits = rename(document, path, str(meant)) if problem.place.on == "key" else put(document, path, meant)
    return fix(f"Write {show(meant)}", edits, safe=False)


@rule(
    code="DSC901",
    name="compress-parallelism",
    severity="error",
    family="compress",
    summary="parallelism contradicts DeepSpeed's keys or the number of ranks.",
    reason="It is written into DeepSpeed's own keys, so that both must agree, and ZeRO 2 and 3 exclude pipelines.",
    wrong=zero(2, also=with_section(parallelism={"zero_stage": 1})),
    right=trained(**with_section(parallelism={"zero_stage": 1})),
    proof=raises("disagrees with"),
)
def compress_parallelism(document: Document, context: Context) -> Iterator[Diagnostic]:
    yield from _wrong(document, context)["parallelism"]


@rule(
    code="DSC902",
    name="compress-against-file",
    severity="error",
    family="compress",
    summary="A method cannot be right with the rest of the file.",
    reason=(
        "Without ZeRO no weights are gathered, and differences of weights can be sent with ZeRO 1 and 2 only. DGC and "
        "DeMo bring a momentum of their own, so that the optimizer must have none. Nodes must divide the ranks."
    ),
    wrong=zero(3, also=with_section(weights={"method": "sign"})),
    right=zero(1, also=with_section(weights={"method": "sign"})),
    proof=raises("cannot be combined with"),
)
def compress_against_file(document: Document, context: Context) -> Iterator[Diagnostic]:
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


@rule(
    code="DSC903",
    name="compress-no-effect",
    severity="warning",
    family="compress",
    summary="A setting of deepspeed_compress has no effect, or costs more than it gives.",
    reason="What training warns of (CompressWarning).",
    wrong=trained(**with_section(gradients={"method": "topk", "error_feedback": None})),
    right=trained(**with_section(gradients={"method": "topk", "error_feedback": {}})),
    proof=warns("loses every value that is not sent"),
)
def compress_no_effect(document: Document, context: Context) -> Iterator[Diagnostic]:
    parsed = parsed_section(document)
    if parsed is not None:
        from deepspeed_compress.config import find_notices

        yield from find_notices(parsed)


@rule(
    code="DSC904",
    name="compress-unsupported",
    severity="error",
    family="compress",
    summary="A feature of DeepSpeed that cannot be compressed.",
    reason="Such engines are refused (UnsupportedError): their gradients take other ways.",
    wrong=zero(3, zero_quantized_gradients=True, also=with_section()),
    right=zero(3, also=with_section()),
    proof=raises("UnsupportedError"),
)
def compress_unsupported(document: Document, context: Context) -> Iterator[Diagnostic]:
    found = _wrong(document, context)["unsupported"]
    yield from (one for one in found if one.place.path != _AUTOCAST)


@rule(
    code="DSC912",
    name="compress-scaled-autocast",
    severity="error",
    family="compress",
    summary="torch_autocast in fp16 without ZeRO beside deepspeed_compress.",
    reason="The gradient scaler of torch works outside of DeepSpeed there, and the engine is refused.",
    wrong=trained(torch_autocast={"enabled": True, "dtype": "fp16"}, **with_section()),
    right=trained(torch_autocast={"enabled": True, "dtype": "bf16"}, **with_section()),
    proof=raises("torch_autocast in fp16 without ZeRO"),
)
def compress_scaled_autocast(document: Document, context: Context) -> Iterator[Diagnostic]:
    found = _wrong(document, context)["unsupported"]
    yield from (one for one in found if one.place.path == _AUTOCAST)


@rule(
    code="DSC913",
    name="compress-universal-resume",
    severity="info",
    family="compress",
    summary="checkpoint.load_universal beside checkpoints that training goes on from by itself.",
    reason=(
        "Going on by itself takes the universal checkpoint until the run has saved a newer one. But "
        "`engine.load_checkpoint` of the program takes the universal one each time, and fails without one (DeepSpeed, "
        "runtime/engine.py, `load_checkpoint`)."
    ),
    wrong=trained(
        checkpoint={"load_universal": True},
        **with_section(checkpointing={"every": 100, "directory": "checkpoints", "resume": True}),
    ),
    right=trained(**with_section(checkpointing={"every": 100, "directory": "checkpoints", "resume": True})),
    proof=accepts("every load_checkpoint of the program returns to the universal checkpoint"),
)
def compress_universal_resume(document: Document, context: Context) -> Iterator[Diagnostic]:
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
