"""Checks that a schedule can be followed: its patches, its ramp, and the ends of its phases."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import CompressConfig, Schedule
from deepspeed_compress.config.patches import patch_places, patched, weight_places
from deepspeed_compress.config.problems import listed, problem, show
from deepspeed_compress.config.sparse_methods import SparseConfig
from deepspeed_compress.diagnostics import Diagnostic, Path

OWN_MOMENTUM = frozenset({"dgc", "demo"})
"""Methods that give gradients a momentum before they are sent."""
THIRDS = (0.2, 0.8, 1.0)
"""Ends of three phases that leave out `until`."""
FIXED = ("error_feedback", "hierarchy", "memory")
"""Keys of gradients that are fixed for a whole run."""
FIXED_OF_WEIGHTS = frozenset({"min_numel", "overlap", "frozen"})
"""Keys of weights that are fixed for a whole run."""


def phase_ends(schedule: Schedule) -> tuple[float | None, ...]:
    """Return the fraction of training at which each phase ends; None if unknown."""
    ends = [phase.until for phase in schedule.phases]
    if len(ends) == len(THIRDS) and not any(ends):
        return THIRDS
    return tuple(ends[:-1]) + ((1.0 if ends[-1] is None else ends[-1],) if ends else ())


def total_steps(ds_config: Mapping[str, Any], schedule: Schedule) -> int | None:
    """Return the optimizer steps of the whole training, from the section or the scheduler; None if unknown."""
    if schedule.total_steps is not None:
        return schedule.total_steps
    found = _scheduler_params(ds_config).get("total_num_steps")
    return int(found) if isinstance(found, int | float) and found >= 1 else None


def _scheduler_params(ds_config: Mapping[str, Any]) -> Mapping[str, Any]:
    scheduler = ds_config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    return params if isinstance(params, Mapping) else {}


def find_schedule_problems(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield problems of the schedule of `section`."""
    yield from _ramp_problems(section)
    yield from _phase_order(section)
    yield from _weight_patches(section)
    for path, patch in patch_places(section):
        yield from _fixed_keys(section, path, patch)
        if section.gradients.method == "none" != patch.get("method", "none"):
            what = (
                f'{show(patch)} cannot start compression, because gradients.method "none" leaves reduction to DeepSpeed'
            )
            instead = 'the method in gradients, and {"method": "none"} in phases or stages without compression'
            yield problem(path, f"{what} (allowed: a method in gradients)", instead)


def find_unknown_length(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that the length of training is known if there are phases, which are fractions of it.

    "auto" is accepted, because it is filled in before training.
    """
    auto = "auto" in _scheduler_params(ds_config).values()
    if section.schedule.phases and total_steps(ds_config, section.schedule) is None and not auto:
        what = (
            "null is not enough for phases if /scheduler/params/total_num_steps is missing, because they end at "
            "fractions of it"
        )
        yield problem(("schedule", "total_steps"), f"{what} (allowed: optimizer steps of training)", '"total_steps": N')


def _ramp_problems(section: CompressConfig) -> Iterator[Diagnostic]:
    ramp, gradients = section.schedule.ramp, section.gradients
    if ramp is None or ramp.stages is not None:
        return
    if not isinstance(gradients, SparseConfig):
        what = f'method "{gradients.method}" has no density to ramp (allowed: "stages", or a sparse method)'
        yield problem(("schedule", "ramp"), what, '"stages": [{"bits": 8}], for instance')
    elif ramp.start <= gradients.density:
        what = f"{ramp.start} is not above gradients.density {gradients.density} (allowed: above it, up to 1)"
        yield problem(("schedule", "ramp", "start"), what, '0.25, or no "ramp"')


def _weight_patches(section: CompressConfig) -> Iterator[Diagnostic]:
    phases = any(phase.weights for phase in section.schedule.phases)
    if phases and section.weights.method == "none":
        what = 'cannot change weights, which weights.method "none" leaves to DeepSpeed (allowed: a method in weights)'
        instead = 'the method in weights, and {"method": "none"} in phases without compression'
        yield problem(("schedule", "phases"), what, instead)
    for path, patch in weight_places(section):
        for key in sorted(FIXED_OF_WEIGHTS & patch.keys()):
            what = (
                "cannot change during a run, because messages and hooks are set up once (allowed: the key in weights)"
            )
            yield problem((*path, key), what, f"{key} in weights")


def _phase_order(section: CompressConfig) -> Iterator[Diagnostic]:
    ends, before = phase_ends(section.schedule), 0.0
    for index, end in enumerate(ends):
        at = ("schedule", "phases", index, "until")
        if end is None:
            yield problem(at, "the key is missing (allowed: a fraction of training, up to 1)", '"until": 0.5')
        elif end <= before:
            what = f"{end} is not after the end of the previous phase, {before} (allowed: increasing fractions)"
            yield problem(at, what, "the phases in the order of their ends")
        before = end or before
    if ends and ends[-1] is not None and ends[-1] < 1:
        what = f"{ends[-1]} leaves the rest of training without a phase (allowed: 1.0 for the last)"
        yield problem(("schedule", "phases", len(ends) - 1, "until"), what, "1.0")


def _fixed_keys(section: CompressConfig, path: Path, patch: Mapping[str, Any]) -> Iterator[Diagnostic]:
    for key in FIXED:
        if key in patch:
            what = (
                f"{show(patch[key])} cannot change during a run, because residuals and process groups are created once"
            )
            yield problem((*path, key), f"{what} (allowed: keys other than {listed(FIXED)})", "the key in gradients")
    method = patched(section.gradients, {k: v for k, v in patch.items() if k not in FIXED}).method
    # For candidates of `adaptive` this is reported with all other reasons.
    if (
        path[0] == "schedule"
        and "none" != method != section.gradients.method
        and {method, section.gradients.method} & OWN_MOMENTUM
    ):
        what = (
            f'"{method}" cannot follow "{section.gradients.method}": {listed(sorted(OWN_MOMENTUM))} keep a momentum '
            'in place of a residual (allowed: the same method, or "none")'
        )
        yield problem((*path, "method"), what, f'"{section.gradients.method}"')
