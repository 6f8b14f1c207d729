"""Settings that contradict `auto`, which compares compressed steps with uncompressed ones at the start of a run."""

from collections.abc import Callable, Iterator

from deepspeed_compress.config.models import CompressConfig, Schedule
from deepspeed_compress.config.problems import problem
from deepspeed_compress.diagnostics import Diagnostic, Path

_CONFLICTS: tuple[tuple[Path, Callable[[CompressConfig], bool], str, str], ...] = (
    (
        ("gradients", "method"),
        lambda section: section.gradients.method == "none",
        '"none" leaves nothing to compare (allowed: other methods)',
        '"blockwise", or no auto',
    ),
    (
        ("adaptive",),
        lambda section: section.adaptive is not None,
        "it chooses settings by measurements of its own (allowed: null)",
        "one of the two",
    ),
    (
        ("islands",),
        lambda section: section.islands is not None,
        "islands seldom exchange, so steps do not show what an exchange costs (allowed: null)",
        "one of the two",
    ),
    (
        ("communication", "max_rate"),
        lambda section: section.communication.max_rate is not None,
        "DeepSpeed sends uncompressed steps itself, without this limit (allowed: null)",
        "one of the two",
    ),
    (
        ("schedule",),
        lambda section: section.schedule != Schedule(total_steps=section.schedule.total_steps),
        "a comparison needs the same settings in all compressed steps (allowed: no warm-up, ramp or phases)",
        "one of the two",
    ),
)
"""Place of each setting, predicate, reason, and what to write instead."""


def find_auto_contradictions(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield settings of the section that cannot be combined with `auto`."""
    if section.auto is None:
        return
    for path, applies, why, instead in _CONFLICTS:
        if applies(section):
            yield problem(path, f"cannot be combined with auto: {why}", instead)
