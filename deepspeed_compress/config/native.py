"""DeepSpeed's own keys: reading their values, and those that correspond to keys of the section's `parallelism`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.models import SECTION, Parallelism
from deepspeed_compress.diagnostics import Path


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
