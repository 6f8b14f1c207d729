"""Input of the checks of settings, DeepSpeed's own keys in it, and diagnostics. `section` has the table of checks."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.diagnostics import Diagnostic, Path, at, encodable, pointer, write
from deepspeed_compress.errors import ConfigError


@dataclass(frozen=True, slots=True)
class NativeKey:
    """Field of `Parallelism` and the corresponding key of DeepSpeed."""

    field: str
    section: str
    key: str
    off: int  # smaller values mean this one: DeepSpeed's autotp_size is 0 by default
    on: int | None = None  # value if DeepSpeed's whole section is `true`

    @property
    def ours(self) -> Path:
        return SECTION, "parallelism", self.field

    @property
    def theirs(self) -> Path:
        return self.section, self.key

    def given(self, parallelism: Parallelism) -> int | None:
        """Return the value that the user wrote into our section; None for a default."""
        value: int | None = getattr(parallelism, self.field)
        return value if self.field in parallelism.model_fields_set else None

    def native(self, ds_config: Mapping[str, Any]) -> object:
        """Return the value of DeepSpeed's own key; None if it is absent or "auto", which DeepSpeed drops."""
        section = ds_config.get(self.section)
        if section is True:
            return self.on
        value = section.get(self.key) if isinstance(section, dict) else None
        return None if value == "auto" else value

    def effective(self, ds_config: Mapping[str, Any], parallelism: Parallelism) -> int:
        """Return the effective value. A value that is not a number is left for DeepSpeed to refuse."""
        given, native = self.given(parallelism), self.native(ds_config)
        value = _number(native) if given is None else given
        return max(value, self.off) if isinstance(value, int) else self.off

    def place(self, parallelism: Parallelism) -> Path:
        """Return the place of the key that decides."""
        return self.theirs if self.given(parallelism) is None else self.ours


def _number(value: object) -> object:
    """Convert "2" and 2.0 to 2, as DeepSpeed does."""
    try:
        number = float(value) if isinstance(value, str | float) else 0.5
    except ValueError:
        return value
    return int(number) if number.is_integer() else value


STAGE = NativeKey("zero_stage", "zero_optimization", "stage", 0, on=1)
TENSOR = NativeKey("tensor", "tensor_parallel", "autotp_size", 1)
NATIVE_KEYS = (STAGE, TENSOR)


def value_at(value: Any, path: Path) -> Any:
    """Return what `value`, a configuration or a part of one, holds at `path`; None if there is nothing."""
    for part in path:
        if isinstance(value, dict):
            value = value.get(part)
        else:
            value = value[part] if isinstance(value, list | tuple) and isinstance(part, int) else None
    return value


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
