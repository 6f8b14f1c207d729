"""What the section will hold in later versions: recognised, and refused rather than ignored.

One walk over the raw section finds these, and every scalar "auto", before the models look at it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.problems import Path, Problem, listed, pointer, show
from deepspeed_compress.config.schema import SchemaView, choices

_QUANTIZERS = frozenset({"linear", "stochastic_linear", "percentile", "qsgd", "fp8_e4m3", "fp8_e5m2", "sign"})
_METHODS = _QUANTIZERS | {"randomk", "block_topk", "dgc", "demo", "powersgd"}

# Keys and values by the place where they may stand; "*" is any index of a list.
PLANNED_KEYS: Mapping[Path, frozenset[str]] = MappingProxyType(
    {
        (): frozenset({"weights", "guard", "adaptive", "activations", "tensor_collectives"}),
        ("gradients",): frozenset({"hierarchy", "chunk_bytes", "min_numel", "rotation"}),
        ("gradients", "error_feedback"): frozenset({"decay", "reset_interval", "device"}),
        ("gradients", "overrides", "*"): frozenset({"every"}),
        ("schedule",): frozenset({"ramp", "phases"}),
    }
)
PLANNED_VALUES: Mapping[Path, frozenset[str | int]] = MappingProxyType(
    {
        ("gradients", "method"): _METHODS,
        ("gradients", "bits"): frozenset({2}),
        ("gradients", "error_feedback", "dtype"): frozenset({"int8"}),
        ("gradients", "overrides", "*", "method"): _METHODS | {"bf16", "fp16", "blockwise", "topk"},
        ("gradients", "values", "method"): _QUANTIZERS,
        ("gradients", "values", "bits"): frozenset({2}),
    }
)
_AUTO = (
    '"auto" is not accepted in this section (allowed: a value): no one fills it in, and Accelerate refuses '
    "a configuration that holds it"
)


def find_planned(section: object) -> Iterator[Problem]:
    """Problems for every planned key, planned value and scalar "auto" of a raw section."""
    view = SchemaView(section)
    for path, value in _walk(section, ()):
        place = tuple("*" if isinstance(part, int) else part for part in path)
        at = pointer((SECTION, *path))
        if path and path[-1] in PLANNED_KEYS.get(place[:-1], ()):
            yield _unavailable(at, f'key "{path[-1]}"', listed(view.keys(path[:-1])), "nothing: remove the key")
        elif value == "auto":
            yield Problem(at, _AUTO, "nothing: leave the key out for its default")
        elif isinstance(value, str | int) and value in PLANNED_VALUES.get(place, ()):
            available = listed(choices(view.at(path)))
            yield _unavailable(at, show(value), available, "one of the available values")


def _unavailable(at: str, what: str, available: str, write: str) -> Problem:
    return Problem(at, f"{what} is not available in this version (available: {available})", write)


def _walk(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    yield path, value
    if isinstance(value, dict):
        items: list[tuple[str | int, object]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, child in items:
        yield from _walk(child, (*path, key))
