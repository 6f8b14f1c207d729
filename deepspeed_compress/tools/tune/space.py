"""Candidates to try: methods and settings as variants of the user's section, without those that contradict the file."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deepspeed_compress.config import SECTION, CompressConfig, brief, with_preset
from deepspeed_compress.config.gradient_problems import find_unknown_momentum
from deepspeed_compress.config.schedules import merged
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.errors import ConfigError

BASELINE = "none"
FILE = "file"
"""Name of the candidate with the section as the user wrote it."""
DENSE_START = 100
"""Minimum number of uncompressed steps at the start for lossy methods. docs/methods.md shows what they gain."""

Patch = Mapping[str, Any]

_INT4: Patch = {"method": "blockwise", "bits": 4}
_PLAIN: Patch = {"weights": {"method": "none"}}
_MOST: Patch = {"weights": _INT4, "schedule": {"warmup_steps": DENSE_START}}
SPACE: Mapping[str, Patch] = {
    "bf16": {"gradients": {"method": "bf16"}, **_PLAIN},
    "blockwise8": {"gradients": {"method": "blockwise", "bits": 8}, **_PLAIN},
    "blockwise4": {"gradients": _INT4, **_PLAIN},
    "blockwise4-weights4": {"gradients": _INT4, "weights": _INT4},
    "blockwise2": {"gradients": {"method": "blockwise", "bits": 2}, **_MOST},
    "topk10-values4": {"gradients": {"method": "topk", "density": 0.1, "values": _INT4}, **_MOST},
    "topk1-values4": {"gradients": {"method": "topk", "density": 0.01, "values": _INT4}, **_MOST},
    "powersgd4": {"gradients": {"method": "powersgd", "rank": 4}, **_MOST},
    "sign": {"gradients": {"method": "sign"}, **_MOST},
    "demo": {"gradients": {"method": "demo"}, **_MOST},
}
"""Patches of the section by name.

The methods that send least also send weights in 4 bits, if weights are gathered. `demo` is for optimizers without a
first moment and is tried only if the file states that the optimizer has none.
"""

_OF_COMPRESSION = frozenset(
    {"schedule", "guard", "adaptive", "auto", "seed", "on_missing_state", "ownership", "communication"}
)
"""Keys of the section without effect, or refused, if nothing is compressed."""


@dataclass(frozen=True)
class Candidate:
    """Name of a candidate, and the complete section of the user's file that it stands for."""

    name: str
    section: Mapping[str, Any]

    @cached_property
    def config(self) -> CompressConfig:
        return CompressConfig.model_validate(self.section)

    @property
    def settings(self) -> str:
        """Return a short text of the settings, such as "blockwise bits=4, weights blockwise bits=4"."""
        weights = self.config.weights
        return brief(self.config.gradients) + (f", weights {brief(weights)}" if weights.method != "none" else "")


def find_candidates(
    ds_config: Mapping[str, Any], patches: Mapping[str, Patch] | None = None
) -> tuple[list[Candidate], dict[str, str]]:
    """Return the candidates, and the reasons for those that are left out by name.

    The baseline comes first, then the section of the file if it compresses, then the patches applied to that section. A
    patch is left out if it contradicts the file or equals an earlier candidate.

    Args:
        ds_config: The user's file. Its section is valid or missing.
        patches: Patches to try. Defaults to those of `SPACE`.
    """
    written: Mapping[str, Any] = with_preset(ds_config) or {}
    sections = {FILE: written} if SECTION in ds_config else {}
    sections |= {name: _patched(written, patch) for name, patch in (patches or _built_in(ds_config)).items()}
    kept, left = [_baseline(written)], dict[str, str]()
    for name, section in sections.items():
        candidate = Candidate(name, section)
        reason = _reason(ds_config, section) or _same(candidate, kept)
        if patches is None and name != FILE and not reason:
            reason = str(find_unknown_momentum(ds_config, candidate.config) or "")
        if reason:
            left[name] = reason
        else:
            kept.append(candidate)
    return kept, left


def _built_in(ds_config: Mapping[str, Any]) -> Mapping[str, Patch]:
    """Return `SPACE`, without compressed weights if no weights are gathered under this file."""
    gathered = not _reason(ds_config, _patched(with_preset(ds_config) or {}, {"weights": _INT4}))
    return SPACE if gathered else {name: {**patch, **_PLAIN} for name, patch in SPACE.items()}


def _baseline(written: Mapping[str, Any]) -> Candidate:
    """Return the baseline: the section of the file with everything uncompressed."""
    kept = {key: value for key, value in written.items() if key not in _OF_COMPRESSION}
    if "monitor" in kept:
        kept["monitor"] = {key: value for key, value in kept["monitor"].items() if key != "cosine_every"}
    return Candidate(BASELINE, {**kept, "gradients": {"method": "none"}, "weights": {"method": "none"}})


def _patched(written: Mapping[str, Any], patch: Patch) -> dict[str, Any]:
    """Return `written` with `patch` applied, and without `auto`, because the search compares with uncompressed steps.

    Gradient settings are merged as in the phases of a schedule, and a longer warm-up is kept. All other keys of the
    patch replace those of the section.
    """
    section = {**{key: value for key, value in written.items() if key != "auto"}, **patch}
    if isinstance(patch.get("gradients"), Mapping):
        section["gradients"] = merged(CompressConfig.model_validate(written).gradients, patch["gradients"])
    if isinstance(patch.get("schedule"), Mapping):
        section["schedule"] = {**written.get("schedule", {}), **patch["schedule"]}
        if patch["schedule"] == _MOST["schedule"]:
            section["schedule"]["warmup_steps"] = max(DENSE_START, written.get("schedule", {}).get("warmup_steps", 0))
    return section


def _reason(ds_config: Mapping[str, Any], section: Mapping[str, Any]) -> str:
    problems = find_problems({**ds_config, SECTION: dict(section)})
    return str(problems[0]) if problems else ""


def _same(candidate: Candidate, others: Sequence[Candidate]) -> str:
    same = [other.name for other in others if _methods(other) == _methods(candidate)]
    return f'the same as "{same[0]}"' if same else ""


def _methods(candidate: Candidate) -> tuple[Any, ...]:
    """Return the settings in which trials differ."""
    config = candidate.config
    return config.gradients, config.weights, config.parallelism


def load_space(file: Path) -> dict[str, Patch]:
    """Return the patches of a JSON file by name: a list of objects with keys of the section and perhaps "name".

    Raises:
        ConfigError: The file is not such a list, or two names are equal or cannot be those of directories.
    """
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
        named = [(entry.pop("name", f"own{number}"), entry) for number, entry in enumerate(entries, 1)]
        valid = [name for name, _ in named if re.fullmatch(r"\w[\w.+-]{0,60}", name) and name not in (BASELINE, FILE)]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(f"--space {file}: cannot be read as a list of objects ({error}). {_EXAMPLE}") from error
    if not named or len(set(valid)) < len(named):
        once = f"each once, other than {BASELINE!r} and {FILE!r}"
        raise ConfigError(f"--space {file}: needs names of letters, digits and . + - _, {once}. {_EXAMPLE}")
    return dict(named)


_EXAMPLE = 'Write [{"name": "int4", "gradients": {"bits": 4}}], for instance.'
