"""Our own section. What `config` finds is reported here; `run` has what needs to be known of the run.

`config` loads pydantic, which takes a third of the time that the linter has: only for files with the section.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.hit import Hit, Path
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Rule, raises, warns
from deepspeed_compress.tools.lint.rules.common import (
    section,
    trained,
    zero,
)

if TYPE_CHECKING:
    from deepspeed_compress.config import CompressConfig, Parallelism, Problem


_FAMILY = "compress"


def _hits(document: Document, problems: list["Problem"]) -> Iterator[Hit]:
    for problem in problems:
        yield Hit(_path(document, problem.pointer), problem.what, problem.write)


def _path(document: Document, pointer: str) -> Path:
    """The place that a JSON pointer means: numbers are indices in arrays."""
    path: Path = ()
    for part in pointer.split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        path = (*path, int(key) if isinstance(document.get(*path), list) and key.isdigit() else key)
    return path


def _wrong(document: Document, context: Context) -> dict[str, list["Problem"]]:
    """What `config` finds, by the rule that reports it."""
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


def _invalid(document: Document, context: Context) -> Iterator[Hit]:
    yield from _hits(document, _wrong(document, context)["invalid"])


def _parallelism(document: Document, context: Context) -> Iterator[Hit]:
    yield from _hits(document, _wrong(document, context)["parallelism"])


def _against_file(document: Document, context: Context) -> Iterator[Hit]:
    yield from _hits(document, _wrong(document, context)["file"])


def _parsed_parallelism(document: Document) -> "Parallelism | None":
    from pydantic import ValidationError

    from deepspeed_compress.config import Parallelism

    try:
        return Parallelism.model_validate(section(document, OUR_SECTION).get("parallelism") or {})
    except ValidationError:
        return None


def parsed_section(document: Document) -> "CompressConfig | None":
    """The section, if there is one and it is valid."""
    if OUR_SECTION not in document.data:
        return None
    from pydantic import ValidationError

    from deepspeed_compress.config import CompressConfig

    try:
        return CompressConfig.model_validate(document.get(OUR_SECTION))
    except ValidationError:
        return None


def _notices(document: Document, context: Context) -> Iterator[Hit]:
    parsed = parsed_section(document)
    if parsed is not None:
        from deepspeed_compress.config import find_notices

        yield from _hits(document, find_notices(parsed))


def _unsupported(document: Document, context: Context) -> Iterator[Hit]:
    found = _hits(document, _wrong(document, context)["unsupported"])
    yield from (hit for hit in found if hit.path != _AUTOCAST)


def _scaled_autocast(document: Document, context: Context) -> Iterator[Hit]:
    found = _hits(document, _wrong(document, context)["unsupported"])
    yield from (hit for hit in found if hit.path == _AUTOCAST)


_AUTOCAST: Path = ("torch_autocast", "dtype")
"""`config.unsupported` finds it; it has a rule of its own."""


def with_section(**keys: object) -> dict[str, object]:
    """Our section as an example has it."""
    return {OUR_SECTION: keys}


RULES = (
    Rule(
        "DSC900",
        "compress-invalid",
        "error",
        _FAMILY,
        "The section deepspeed_compress is invalid.",
        'What `ds-compress check` reports: unknown keys, wrong values, "auto", settings that contradict each other.',
        trained(**with_section(gradients={"method": "blockwise", "bits": 5})),
        trained(**with_section(gradients={"method": "blockwise", "bits": 4})),
        _invalid,
        raises("ConfigError"),
    ),
    Rule(
        "DSC901",
        "compress-parallelism",
        "error",
        _FAMILY,
        "parallelism contradicts DeepSpeed's keys or the number of ranks.",
        "It is written into DeepSpeed's own keys, so that both must agree, and ZeRO 2 and 3 exclude pipelines.",
        zero(2, also=with_section(parallelism={"zero_stage": 1})),
        trained(**with_section(parallelism={"zero_stage": 1})),
        _parallelism,
        raises("disagrees with"),
    ),
    Rule(
        "DSC902",
        "compress-against-file",
        "error",
        _FAMILY,
        "A method cannot be right with the rest of the file.",
        "Without ZeRO no weights are gathered, and differences of weights can be sent with ZeRO 1 and 2 only. DGC and "
        "DeMo bring a momentum of their own, so that the optimizer must have none. Nodes must divide the ranks.",
        zero(3, also=with_section(weights={"method": "sign"})),
        zero(1, also=with_section(weights={"method": "sign"})),
        _against_file,
        raises("cannot be combined with"),
    ),
    Rule(
        "DSC903",
        "compress-no-effect",
        "warning",
        _FAMILY,
        "A setting of deepspeed_compress has no effect, or costs more than it gives.",
        "What training warns of (CompressWarning).",
        trained(**with_section(gradients={"method": "topk", "error_feedback": None})),
        trained(**with_section(gradients={"method": "topk", "error_feedback": {}})),
        _notices,
        warns("loses for ever what is not sent"),
    ),
    Rule(
        "DSC904",
        "compress-unsupported",
        "error",
        _FAMILY,
        "A feature of DeepSpeed that cannot be compressed.",
        "Such engines are refused (UnsupportedError): their gradients take other ways.",
        zero(3, zero_quantized_gradients=True, also=with_section()),
        zero(3, also=with_section()),
        _unsupported,
        raises("UnsupportedError"),
    ),
    Rule(
        "DSC912",
        "compress-scaled-autocast",
        "error",
        _FAMILY,
        "torch_autocast in fp16 without ZeRO beside deepspeed_compress.",
        "The gradient scaler of torch works outside of DeepSpeed there, and the engine is refused.",
        trained(torch_autocast={"enabled": True, "dtype": "fp16"}, **with_section()),
        trained(torch_autocast={"enabled": True, "dtype": "bf16"}, **with_section()),
        _scaled_autocast,
        raises("torch_autocast in fp16 without ZeRO"),
    ),
)
