"""The value "auto", which no program fills in within the section. It is refused before the models validate it."""

from collections.abc import Iterator

from deepspeed_compress.config.problems import problem
from deepspeed_compress.diagnostics import Diagnostic, Path

_AUTO = (
    '"auto" is not accepted in this section (allowed: a value), because no program fills it in, and Accelerate '
    "refuses a configuration that contains it"
)


def find_auto_values(section: object) -> Iterator[Diagnostic]:
    """Yield a problem for every scalar "auto" of a raw section."""
    for path, value in _walk(section, ()):
        if value == "auto":
            instead = "nothing: leave the key out for its default" if path else '{"preset": "auto"}'
            yield problem(path, _AUTO, instead)


def _walk(value: object, path: Path) -> Iterator[tuple[Path, object]]:
    yield path, value
    if isinstance(value, dict):
        items: list[tuple[str | int, object]] = list(value.items())
    else:
        items = list(enumerate(value)) if isinstance(value, list | tuple) else []
    for key, child in items:
        yield from _walk(child, (*path, key))
