"""Keys of the section that are planned for later versions: recognized, and refused instead of ignored.

One walk over the raw section finds them, and every scalar "auto", before the models validate it.
"""

from collections.abc import Iterator, Mapping
from types import MappingProxyType

from deepspeed_compress.config.problems import listed, problem
from deepspeed_compress.config.schema import SchemaView
from deepspeed_compress.diagnostics import Diagnostic, Path

# Keys by the place in which they may stand.
PLANNED_KEYS: Mapping[Path, frozenset[str]] = MappingProxyType(
    {
        (): frozenset({"activations", "tensor_collectives"}),
    }
)
_AUTO = (
    '"auto" is not accepted in this section (allowed: a value), because no program fills it in, and Accelerate '
    "refuses a configuration that contains it"
)


def find_planned(section: object) -> Iterator[Diagnostic]:
    """Yield a problem for every planned key and scalar "auto" of a raw section."""
    view = SchemaView(section)
    for path, value in _walk(section, ()):
        if path and path[-1] in PLANNED_KEYS.get(path[:-1], ()):
            available = listed(view.keys(path[:-1]))
            what = f'key "{path[-1]}" is not available in this version (available: {available})'
            yield problem(path, what, "nothing: remove the key")
        elif value == "auto":
            yield problem(path, _AUTO, "nothing: leave the key out for its default")


def _walk(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    yield path, value
    if isinstance(value, dict):
        items: list[tuple[str | int, object]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, child in items:
        yield from _walk(child, (*path, key))
