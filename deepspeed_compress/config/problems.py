"""Input of the checks of settings, and the diagnostics that they yield. `checks` has the table of all checks."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE, TENSOR, value_at
from deepspeed_compress.diagnostics import Diagnostic, Path, at, encodable, pointer, write
from deepspeed_compress.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Configuration:
    """Section, with the file around it and the number of ranks, as far as they are known."""

    section: CompressConfig
    ds_config: Mapping[str, Any] = field(default_factory=dict)
    world_size: int | None = None
    """Number of all ranks of the job."""

    @property
    def parallelism(self) -> Parallelism:
        return self.section.parallelism or Parallelism()

    @property
    def stage(self) -> int:
        """Return the ZeRO stage in force."""
        return STAGE.effective(self.ds_config, self.parallelism)

    @property
    def stage_place(self) -> str:
        """Return the pointer of the key that sets the ZeRO stage."""
        return pointer(STAGE.place(self.parallelism))

    @property
    def tensor(self) -> int:
        """Return the number of ranks in force that share each layer."""
        return TENSOR.effective(self.ds_config, self.parallelism)

    @property
    def compresses(self) -> bool:
        """Return True if gradients or weights are compressed."""
        return not self.section.gradients.method == self.section.weights.method == "none"

    @property
    def divides_job(self) -> bool:
        """Return True if one job is divided into islands."""
        return self.section.islands is not None and self.section.islands.elastic is None

    def native(self, *path: str) -> Any:
        """Return the value of a key of DeepSpeed; None if there is none."""
        return value_at(self.ds_config, path)


Check = Callable[[Configuration], Iterator[Diagnostic]]


def show(value: object) -> str:
    """Return a value as JSON, shortened to fit one line of a message."""
    text = encodable(json.dumps(value, default=repr, ensure_ascii=False))
    return text if len(text) <= 80 else text[:77] + "..."


def listed(values: Iterable[object]) -> str:
    """Return values as JSON, separated by commas."""
    return ", ".join(show(value) for value in values)


def problem(path: Path, message: str, instead: str) -> Diagnostic:
    """Return a diagnostic of what is wrong at `path` of the section, and what to write instead."""
    return Diagnostic(at(SECTION, *path), message, write(instead))


def notice(path: Path, message: str, instead: str) -> Diagnostic:
    """Return a warning about a valid setting at `path` that has no effect or costs more than it gains."""
    return Diagnostic(at(SECTION, *path), message, write(instead), severity="warning")


Conflicts = Mapping[Path, tuple[object, str, str]]
"""Places of settings, each with the value that turns it off, a reason against others, and what to write instead."""


def find_conflicts_with(other: str, section: CompressConfig, conflicts: Conflicts) -> Iterator[Diagnostic]:
    """Yield a problem for each setting of `conflicts` that is not off, and so cannot be combined with `other`."""
    for path, (off, why, instead) in conflicts.items():
        value: object = section
        for key in path:
            value = getattr(value, str(key), None)
        if value not in (None, off):
            yield problem(path, f"cannot be combined with {other}: {why} (allowed: {show(off)})", instead)


def raise_problems(problems: Sequence[Diagnostic]) -> NoReturn:
    """Raise one ConfigError that lists every problem."""
    noun = "problem" if len(problems) == 1 else "problems"
    lines = "".join(f"\n  - {problem}" for problem in problems)
    raise ConfigError(f"{len(problems)} {noun} in the DeepSpeed configuration:{lines}")
