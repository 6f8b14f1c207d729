"""Settings that are valid, but have no effect or cost more than they gain."""

import re
from collections.abc import Iterator

from deepspeed_compress.config.contradictions import override_places, sparse_places
from deepspeed_compress.config.methods import MethodConfig, Model
from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.places import CompressedGradients, GradientsConfig, PowerSGDGradients, QSGDGradients
from deepspeed_compress.config.problems import notice, show
from deepspeed_compress.config.rollout_problems import find_rollout_notices
from deepspeed_compress.config.sparse_methods import DensityWarmUp, LargestConfig, RandomKConfig
from deepspeed_compress.diagnostics import Diagnostic

# A pattern that matches all of these matches every name.
_ANY_NAMES = ("", "a", "0.b_1")


def find_notices(section: CompressConfig) -> list[Diagnostic]:
    """Return the settings of `section` without effect; empty for the defaults."""
    return [found for check in _CHECKS for found in check(section)]


def _no_compression(section: CompressConfig) -> Iterator[Diagnostic]:
    steps, cosine_every = section.schedule.warmup_steps, section.monitor.cosine_every
    if steps and section.gradients.method == section.weights.method == "none":
        what = f'{steps} has no effect, because method "none" does not compress (allowed: 0)'
        yield notice(("schedule", "warmup_steps"), what, "0, or choose another method")
    if cosine_every and section.gradients.method == "none":
        what = f'{cosine_every} has no effect, because method "none" does not change gradients (allowed: 0)'
        yield notice(("monitor", "cosine_every"), what, "0, or choose another method")


def _policy_without_effect(section: CompressConfig) -> Iterator[Diagnostic]:
    schedule, guard = section.schedule, section.guard
    if schedule.total_steps is not None and not schedule.phases:
        what = f"{schedule.total_steps} has no effect without phases (allowed: null)"
        yield notice(("schedule", "total_steps"), what, "null, or phases")
    if schedule.ramp is not None and schedule.ramp.stages is not None:
        for key in sorted({"shape", "start"} & schedule.ramp.model_fields_set):
            what = f"{show(getattr(schedule.ramp, key))} has no effect together with stages"
            yield notice(("schedule", "ramp", key), what, 'nothing: remove the key, or remove "stages"')
    if guard is not None and section.gradients.method == section.weights.method == "none":
        yield notice(("guard",), 'has no effect, because method "none" does not compress (allowed: null)', "null")


def _single_rank_islands(section: CompressConfig) -> Iterator[Diagnostic]:
    islands = section.islands
    if islands is not None and islands.size == 1 and section.adaptive is not None:
        what = "has no effect in islands of size 1, which send neither gradients nor weights (allowed: null)"
        yield notice(("adaptive",), what, "null, or larger islands")


def _unused_seed(section: CompressConfig) -> Iterator[Diagnostic]:
    random = any(
        part.draws_random_numbers if isinstance(part, MethodConfig) else isinstance(part, PowerSGDGradients)
        for part in _parts(section)
    )
    if section.seed and not random:
        what = f"{section.seed} has no effect, because no setting uses random numbers (allowed: 0)"
        yield notice(("seed",), what, '0, or "rounding": "stochastic"')


def _parts(node: object) -> Iterator[object]:
    """Yield `node` and every model inside it."""
    if isinstance(node, Model):
        yield node
        for name in type(node).model_fields:
            yield from _parts(getattr(node, name))
    elif isinstance(node, tuple):
        for item in node:
            yield from _parts(item)


def _density(section: CompressConfig) -> Iterator[Diagnostic]:
    for path, method in sparse_places(section):
        units = method.choices
        if method.density == 1:
            what = "1.0 drops nothing, and may send an index with every value (useful: below 0.5)"
            yield notice((*path, "density"), what, 'a smaller density, or "method": "blockwise"')
        elif units and method.density * units < 1:
            what = (
                f"{method.density} of a block of {units} is less than one value, but at least one is always sent "
                f"(useful: at least {1 / units})"
            )
            yield notice((*path, "density"), what, "a larger density or larger blocks")


def _density_warmup(section: CompressConfig) -> Iterator[Diagnostic]:
    dense = section.schedule.warmup_steps
    for path, method in sparse_places(section):
        steps = method.density_warmup_steps if isinstance(method, DensityWarmUp) else 0
        if steps and method.density >= 0.25:
            what = f"{steps} has no effect, because density {method.density} is not below 0.25 (allowed: 0)"
            yield notice((*path, "density_warmup_steps"), what, "0, or a smaller density")
        elif steps and steps <= dense:
            what = (
                f"{steps} has no effect, because the first {dense} steps (schedule.warmup_steps) are uncompressed "
                "(allowed: 0)"
            )
            yield notice((*path, "density_warmup_steps"), what, f"0, or more than {dense}")


def _unused_block_size(section: CompressConfig) -> Iterator[Diagnostic]:
    for path, method in sparse_places(section):
        default = LargestConfig.model_fields["block_size"].default
        if isinstance(method, LargestConfig) and method.scope != "block" and method.block_size != default:
            what = f'{method.block_size} has no effect with scope "{method.scope}" (allowed: {default})'
            yield notice((*path, "block_size"), what, 'nothing: remove the key, or "scope": "block"')


_LOSSY = frozenset({"sign", "topk", "block_topk", "powersgd"})


def _keeps_residuals(gradients: GradientsConfig) -> bool:
    return isinstance(gradients, CompressedGradients) and gradients.residuals is not None


def _lossy_without_feedback(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that methods that lose most of the gradient have error feedback."""
    methods = [section.gradients, *(override for _, override in override_places(section))]
    lossy = [m.method for m in methods if m.method in _LOSSY or (isinstance(m, RandomKConfig) and not m.rescale)]
    if lossy and not _keeps_residuals(section.gradients):
        what = f'null with method "{lossy[0]}" loses every value that is not sent (allowed: an object)'
        yield notice(("gradients", "error_feedback"), what, '{}, or an unbiased method such as "qsgd"')


def _rescale_with_feedback(section: CompressConfig) -> Iterator[Diagnostic]:
    for path, method in sparse_places(section):
        if isinstance(method, RandomKConfig) and method.rescale and _keeps_residuals(section.gradients):
            what = "true together with error feedback sends values that are too large, and diverges (allowed: false)"
            yield notice((*path, "rescale"), what, 'false, or "error_feedback": null')


def _qsgd_with_feedback(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check QSGD with error feedback, whose residuals may grow without bound.

    Its error is up to sqrt(block_size) / levels times the values sent.
    """
    method = section.gradients
    if isinstance(method, QSGDGradients) and method.error_feedback and method.block_size**0.5 > method.levels:
        what = (
            f"with {method.levels} levels and blocks of {method.block_size}, residuals may grow without bound "
            "(allowed: null)"
        )
        yield notice(
            ("gradients", "error_feedback"), what, "null, or at least as many levels as the square root of block_size"
        )


def _overrides(section: CompressConfig) -> Iterator[Diagnostic]:
    seen: set[str] = set()
    for path, override in override_places(section):
        at, pattern = (*path, "parameters"), override.parameters
        if pattern in seen:
            yield notice(
                at, f"{show(pattern)} has no effect, because an earlier override has the same pattern", "it once"
            )
        elif override.every == 1 and all(re.search(pattern, name) for name in _ANY_NAMES):
            what = f"{show(pattern)} matches every parameter, so gradients.method has no effect"
            yield notice(at, what, f'a narrower pattern, or "method": "{override.method}" for all gradients')
        if override.spread and override.every == 1:
            what = "true has no effect with every: 1, which sends in each step (allowed: false)"
            yield notice((*path, "spread"), what, 'false, or "every" above 1')
        seen.add(pattern)


def _memory_checkpoints(section: CompressConfig) -> Iterator[Diagnostic]:
    settings = section.checkpointing
    if settings is None or settings.memory is None:
        return
    memory, place = settings.memory, ("checkpointing", "memory")
    if memory.max_rate is not None and not memory.copies:
        what = f"{show(memory.max_rate)} has no effect without copies: 1 (allowed: null)"
        yield notice((*place, "max_rate"), what, 'nothing: remove the key, or add "copies": 1')
    if isinstance(memory.every, int) and isinstance(settings.every, int) and memory.every >= settings.every:
        what = (
            f"{memory.every} has no effect, because checkpoints in directory are at least as frequent (useful: "
            "fewer steps)"
        )
        yield notice((*place, "every"), what, f"less than {settings.every}")
    if memory.every == 1 and section.weights.method != "none":
        what = "1 gathers exact weights in every step, so compressing them has no effect (useful: 10 or more)"
        yield notice((*place, "every"), what, '10, or "weights": {"method": "none"}')


_CHECKS = (
    _memory_checkpoints,
    _no_compression,
    _policy_without_effect,
    _single_rank_islands,
    _unused_seed,
    _density,
    _density_warmup,
    _unused_block_size,
    _lossy_without_feedback,
    _rescale_with_feedback,
    _qsgd_with_feedback,
    _overrides,
    find_rollout_notices,
)
