"""Settings that contradict `auto`, which compares compressed steps with uncompressed ones at the start of a run."""

from collections.abc import Iterator

from deepspeed_compress.config.models import CompressConfig, Schedule
from deepspeed_compress.config.problems import Conflicts, find_conflicts_with, problem
from deepspeed_compress.diagnostics import Diagnostic

_CONFLICTS: Conflicts = {
    ("adaptive",): (None, "it chooses settings by measurements of its own", "one of the two"),
    ("islands",): (None, "islands seldom exchange, so steps do not show what an exchange costs", "one of the two"),
    ("communication", "max_rate"): (
        None,
        "DeepSpeed sends uncompressed steps itself, without this limit",
        "one of the two",
    ),
}


def find_auto_contradictions(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield settings of the section that cannot be combined with `auto`."""
    if section.auto is None:
        return
    yield from find_conflicts_with("auto", section, _CONFLICTS)
    if section.gradients.method == "none":
        what = 'cannot be combined with auto: "none" leaves nothing to compare (allowed: other methods)'
        yield problem(("gradients", "method"), what, '"blockwise", or no auto')
    if section.schedule != Schedule(total_steps=section.schedule.total_steps):
        what = "cannot be combined with auto: a comparison needs the same settings in all compressed steps"
        yield problem(("schedule",), f"{what} (allowed: no warm-up, ramp or phases)", "one of the two")
