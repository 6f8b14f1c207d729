"""Checks of what changes settings during a run: `schedule`, `adaptive`, `auto` and `guard`."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.candidates import reason_against, weight_candidates
from deepspeed_compress.config.methods import NoCompression
from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.places import CompressedWeights, TopKWeights, WeightsConfig
from deepspeed_compress.config.problems import (
    Configuration,
    Conflicts,
    find_conflicts_with,
    listed,
    notice,
    problem,
    show,
)
from deepspeed_compress.config.schedules import (
    FIXED,
    FIXED_OF_WEIGHTS,
    OWN_MOMENTUM,
    Schedule,
    patch_places,
    patched,
    patched_weights,
    phase_ends,
    total_steps,
)
from deepspeed_compress.config.sparse_methods import SparseConfig
from deepspeed_compress.diagnostics import Diagnostic, Path


def schedule(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a schedule can be followed: its ramp, the ends of its phases, and its patches."""
    section = configuration.section
    yield from _ramp(section)
    yield from _phase_order(section.schedule)
    yield from _weight_patches(section)
    for path, patch in patch_places(section, "gradients"):
        yield from _fixed_keys(section, path, patch)
        if section.gradients.method == "none" != patch.get("method", "none"):
            what = (
                f'{show(patch)} cannot start compression, because gradients.method "none" leaves reduction to DeepSpeed'
            )
            instead = 'the method in gradients, and {"method": "none"} in phases or stages without compression'
            yield problem(path, f"{what} (allowed: a method in gradients)", instead)


def _ramp(section: CompressConfig) -> Iterator[Diagnostic]:
    ramp, gradients = section.schedule.ramp, section.gradients
    if ramp is None or ramp.stages is not None:
        return
    if not isinstance(gradients, SparseConfig):
        what = f'method "{gradients.method}" has no density to ramp (allowed: "stages", or a sparse method)'
        yield problem(("schedule", "ramp"), what, '"stages": [{"bits": 8}], for instance')
    elif ramp.start <= gradients.density:
        what = f"{ramp.start} is not above gradients.density {gradients.density} (allowed: above it, up to 1)"
        yield problem(("schedule", "ramp", "start"), what, '0.25, or no "ramp"')


def _phase_order(schedule: Schedule) -> Iterator[Diagnostic]:
    ends, before = phase_ends(schedule), 0.0
    for index, end in enumerate(ends):
        place = ("schedule", "phases", index, "until")
        if end is None:
            yield problem(place, "the key is missing (allowed: a fraction of training, up to 1)", '"until": 0.5')
        elif end <= before:
            what = f"{end} is not after the end of the previous phase, {before} (allowed: increasing fractions)"
            yield problem(place, what, "the phases in the order of their ends")
        before = end or before
    if ends and ends[-1] is not None and ends[-1] < 1:
        what = f"{ends[-1]} leaves the rest of training without a phase (allowed: 1.0 for the last)"
        yield problem(("schedule", "phases", len(ends) - 1, "until"), what, "1.0")


def _weight_patches(section: CompressConfig) -> Iterator[Diagnostic]:
    if section.weights.method == "none" and any(phase.weights for phase in section.schedule.phases):
        what = 'cannot change weights, which weights.method "none" leaves to DeepSpeed (allowed: a method in weights)'
        instead = 'the method in weights, and {"method": "none"} in phases without compression'
        yield problem(("schedule", "phases"), what, instead)
    for path, patch in patch_places(section, "weights"):
        for key in sorted(FIXED_OF_WEIGHTS & patch.keys()):
            what = "cannot change during a run, because messages and hooks are set up once"
            yield problem((*path, key), f"{what} (allowed: the key in weights)", f"{key} in weights")


def _fixed_keys(section: CompressConfig, path: Path, patch: Mapping[str, Any]) -> Iterator[Diagnostic]:
    for key in FIXED:
        if key in patch:
            what = f"{show(patch[key])} cannot change during a run, because residuals and groups are created once"
            yield problem((*path, key), f"{what} (allowed: keys other than {listed(FIXED)})", "the key in gradients")
    written, method = section.gradients.method, patched(section.gradients, _changeable(patch)).method
    # For candidates of `adaptive` this is reported with all other reasons.
    if path[0] == "schedule" and "none" != method != written and {method, written} & OWN_MOMENTUM:
        what = f'"{method}" cannot follow "{written}": one keeps a momentum in place of a residual (allowed: "none")'
        yield problem((*path, "method"), what, f'"{written}"')


def _changeable(patch: Mapping[str, Any]) -> dict[str, Any]:
    """Return a patch of gradients without the keys that may not change."""
    return {key: value for key, value in patch.items() if key not in FIXED}


def unknown_length(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that the length of training is known if there are phases, which are fractions of it.

    "auto" is accepted, because it is filled in before training.
    """
    schedule, params = configuration.section.schedule, configuration.native("scheduler", "params")
    auto = isinstance(params, Mapping) and "auto" in params.values()
    if schedule.phases and total_steps(configuration.ds_config, schedule) is None and not auto:
        what = "null is not enough for phases, which end at fractions of it, without /scheduler/params/total_num_steps"
        yield problem(("schedule", "total_steps"), f"{what} (allowed: optimizer steps of training)", '"total_steps": N')


def adaptive_choice(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that `adaptive` can choose among its candidates."""
    section = configuration.section
    if section.adaptive is None:
        return
    yield from _gradient_candidates(section)
    yield from _weight_candidates(section)
    if section.gradients.method == "none":
        what = 'cannot be combined with gradients.method "none", which leaves reduction to DeepSpeed'
        instead = 'another method in gradients; "none" is always a candidate'
        yield problem(("adaptive",), f"{what} (allowed: another method)", instead)
    for key in ("ramp", "phases"):
        if getattr(section.schedule, key):
            what = f"cannot be combined with schedule.{key}, which sets the same keys (allowed: one of the two)"
            yield problem(("adaptive",), what, f"adaptive without schedule.{key}")


def _gradient_candidates(section: CompressConfig) -> Iterator[Diagnostic]:
    written, adaptive = section.gradients, section.adaptive
    assert adaptive is not None
    for index, patch in enumerate(adaptive.candidates or ()):
        # Keys that may not change are reported separately.
        settings = patched(written, _changeable(patch))
        reason = reason_against(written, settings)
        if reason is not None:
            yield problem(("adaptive", "candidates", index, "method"), f'"{settings.method}" {reason[0]}', reason[1])
    if written.method == "powersgd":
        what = 'cannot be combined with gradients.method "powersgd", which cannot alternate with other methods'
        yield problem(("adaptive",), f"{what} (allowed: another method)", "no adaptive, or another method in gradients")
    if written.method in OWN_MOMENTUM and len(weight_candidates(section, differences=True)) == 1:
        yield problem(("adaptive",), *_nothing_to_choose(written.method))


def _weight_candidates(section: CompressConfig) -> Iterator[Diagnostic]:
    adaptive, weights = section.adaptive, section.weights
    assert adaptive is not None
    if adaptive.weights is None:
        return
    if not isinstance(weights, CompressedWeights):
        what = 'cannot be combined with weights.method "none", which leaves weights to DeepSpeed (allowed: others)'
        yield problem(("adaptive", "weights"), what, '"weights": {"bits": 4}, and {"method": "none"} as a candidate')
        return
    places: list[tuple[Path, WeightsConfig]] = [(("weights",), weights)]
    # An empty patch means that weights stay as they are.
    for index, patch in ((index, patch) for index, patch in enumerate(adaptive.weights) if patch):
        places.append((("adaptive", "weights", index), patched_weights(weights, patch)))
    for path, settings in places if any(adaptive.weights) else ():
        if isinstance(settings, TopKWeights):
            what = '"topk" cannot be a candidate, because its effect on the loss depends on how far weights lag behind'
            yield problem((*path, "method"), f"{what} (allowed: none, blockwise, sign)", '"method": "sign"')


def empty_choice(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that something can be chosen at the file's ZeRO stage: under ZeRO 3 no rank keeps the gathered weights."""
    section, place = configuration.section, configuration.stage_place
    if configuration.stage != 3 or section.adaptive is None or isinstance(section.weights, NoCompression):
        return
    if section.adaptive.weights is not None:
        what = f"cannot be combined with {place}: 3, where weights are rounded instead of sent as differences"
        yield problem(("adaptive", "weights"), f"{what} (allowed: null)", f"null, or 1 or 2 as {place}")
    elif section.gradients.method in OWN_MOMENTUM:
        yield problem(("adaptive",), *_nothing_to_choose(f"{section.gradients.method} under ZeRO 3"))


def _nothing_to_choose(method: str) -> tuple[str, str]:
    what = f'has nothing to choose: "{method}" cannot alternate with other methods, and neither can its weights'
    return f"{what} (allowed: another method, or ZeRO 1 or 2 with blockwise or sign weights)", "no adaptive"


_AGAINST_AUTO: Conflicts = {
    ("adaptive",): (None, "it chooses settings by measurements of its own", "one of the two"),
    ("islands",): (None, "islands seldom exchange, so steps do not show what an exchange costs", "one of the two"),
    ("communication", "max_rate"): (None, "DeepSpeed sends uncompressed steps without this limit", "one of the two"),
}


def auto_comparison(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that `auto` can compare compressed steps with uncompressed ones at the start of a run."""
    section = configuration.section
    if section.auto is None:
        return
    yield from find_conflicts_with("auto", section, _AGAINST_AUTO)
    if section.gradients.method == "none":
        what = 'cannot be combined with auto: "none" leaves nothing to compare (allowed: other methods)'
        yield problem(("gradients", "method"), what, '"blockwise", or no auto')
    if section.schedule != Schedule(total_steps=section.schedule.total_steps):
        what = "cannot be combined with auto: a comparison needs the same settings in all compressed steps"
        yield problem(("schedule",), f"{what} (allowed: no warm-up, ramp or phases)", "one of the two")


def guard_without_norms(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that DeepSpeed computes the gradient norms that the guard watches."""
    place = ("zero_optimization", "compute_grad_norm")
    if configuration.section.guard is not None and configuration.native(*place) is False:
        what = f"cannot be combined with /{'/'.join(place)}: false, because the guard needs gradient norms"
        yield problem(("guard",), f"{what} (allowed: null)", f"null, or true at /{'/'.join(place)}")


def idle_policy(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find a guard or adaptation that has nothing to act on, although a user may rely on it."""
    section = configuration.section
    if section.guard is not None and not configuration.compresses:
        yield notice(("guard",), 'has no effect, because method "none" does not compress (allowed: null)', "null")
    if section.adaptive is not None and section.islands is not None and section.islands.size == 1:
        what = "has no effect in islands of size 1, which send neither gradients nor weights (allowed: null)"
        yield notice(("adaptive",), what, "null, or larger islands")
