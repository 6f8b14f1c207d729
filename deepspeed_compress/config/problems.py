"""One thing wrong with a configuration, and the error that lists them all."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from deepspeed_compress.errors import ConfigError

Path = tuple[str | int, ...]


def pointer(path: Iterable[str | int]) -> str:
    """JSON pointer (RFC 6901) of a path of keys and indices."""
    return "".join("/" + str(part).replace("~", "~0").replace("/", "~1") for part in path)


def show(value: object) -> str:
    """A value as it stands in JSON, shortened to one line of a message."""
    text = json.dumps(value, default=repr, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def listed(values: Iterable[object]) -> str:
    """Values as in JSON, separated by commas."""
    return ", ".join(show(value) for value in values)


@dataclass(frozen=True, slots=True)
class Problem:
    """A key, what is wrong with its value (and what is allowed), and what to write instead."""

    pointer: str
    what: str
    write: str

    def __str__(self) -> str:
        return f"{self.pointer or '/'}: {self.what}. Write {self.write}."


def raise_problems(problems: Sequence[Problem]) -> NoReturn:
    """Raise one ConfigError that lists every problem."""
    noun = "problem" if len(problems) == 1 else "problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} {noun} in the DeepSpeed configuration:{lines}")
