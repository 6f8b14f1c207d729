"""Checks of what runs next to training: `communication`, `checkpointing` and `rollout`."""

from collections.abc import Callable, Iterator

from deepspeed_compress.config.places import CompressedWeights
from deepspeed_compress.config.problems import Configuration, notice, problem, show
from deepspeed_compress.diagnostics import Diagnostic


def rate_limit(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a rate cap applies to something, and that no adaptation measures the link as if uncapped."""
    section, place = configuration.section, ("communication", "max_rate")
    rate = section.communication.max_rate
    if rate is not None and not configuration.compresses and section.islands is None:
        what = f"{show(rate)} has no effect if nothing is compressed, because DeepSpeed sends all messages itself"
        yield problem(place, f"{what} (allowed: null)", "a method for gradients or weights, or no max_rate")
    if rate is not None and section.adaptive is not None:
        what = f"{show(rate)} cannot be combined with adaptive, which measures the link without a limit"
        yield problem(place, f"{what} (allowed: null)", "no max_rate, or no adaptive")


def checkpoints(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that automatic checkpoints have a directory, and that no key about them is without effect."""
    settings = configuration.section.checkpointing
    if settings is None:
        return
    if configuration.divides_job:
        what = "cannot be combined with islands of one job, which write their files to several directories"
        instead = 'no checkpointing, or islands with "elastic"'
        yield problem(("checkpointing",), f"{what} (allowed: one of the two)", instead)
    placed = [key for key in ("every", "resume", "save_on_sigterm") if getattr(settings, key)]
    if (placed or settings.memory) and settings.directory is None:
        why = f"{placed[0]} needs it" if placed else "checkpoints in memory need it to identify their job"
        yield problem(("checkpointing", "directory"), f"the key is missing, but {why}", '"directory": "checkpoints"')
    for key, needed in (("directory", placed or settings.memory), ("keep", settings.every)):
        if getattr(settings, key) is not None and not needed:
            what = f"{show(getattr(settings, key))} has no effect without every (allowed: null)"
            yield problem(("checkpointing", key), what, f'"every": "10 min", or remove {key}')


def idle_memory_checkpoints(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find settings of checkpoints in memory that have no effect, or cost more than they gain."""
    settings = configuration.section.checkpointing
    if settings is None or settings.memory is None:
        return
    memory, place = settings.memory, ("checkpointing", "memory")
    if memory.max_rate is not None and not memory.copies:
        what = f"{show(memory.max_rate)} has no effect without copies: 1 (allowed: null)"
        yield notice((*place, "max_rate"), what, 'nothing: remove the key, or add "copies": 1')
    if isinstance(memory.every, int) and isinstance(settings.every, int) and memory.every >= settings.every:
        what = f"{memory.every} has no effect, because checkpoints in directory are at least as frequent"
        yield notice((*place, "every"), f"{what} (useful: fewer steps)", f"less than {settings.every}")
    if memory.every == 1 and configuration.section.weights.method != "none":
        what = "1 gathers exact weights in every step, so compressing them has no effect (useful: 10 or more)"
        yield notice((*place, "every"), what, '10, or "weights": {"method": "none"}')


def _overlaps(configuration: Configuration) -> bool:
    weights = configuration.section.weights
    return isinstance(weights, CompressedWeights) and weights.overlap


_AGAINST_ROLLOUT: tuple[tuple[str, Callable[[Configuration], bool]], ...] = (
    ("weights with overlap, which arrive during the next step", _overlaps),
    ("hybrid sharding", lambda configuration: configuration.parallelism.shard_within is not None),
    ("islands of one job, which have several models", lambda configuration: configuration.divides_job),
)
"""Settings that weights are not published with, and functions that find them."""


def rollout(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check what the section combines with `rollout`, although no rank publishes it correctly."""
    settings = configuration.section.rollout
    if settings is None:
        return
    if settings.method == "exact" and settings.bits is not None:
        what = "has no effect with the method exact (allowed: null)"
        yield problem(("rollout", "bits"), what, '"method": "blockwise"')
    for other, applies in _AGAINST_ROLLOUT:
        if applies(configuration):
            yield problem(("rollout",), f"cannot be combined with {other} (allowed: null)", "one of the two")


def costly_rollout(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find settings of `rollout` that cost more than they gain."""
    settings = configuration.section.rollout
    if settings is None:
        return
    if settings.lossy_bits == 8 and settings.dtype != "fp32":
        what = f"8 has no effect with dtype {settings.dtype}, whose exact changes are shorter (useful: 4, or fp32)"
        yield notice(("rollout", "bits"), what, '4, or "method": "exact"')
    if settings.full_every == 1:
        what = "1 writes all values in every version, next to the changes (useful: 10 or more)"
        yield notice(("rollout", "full_every"), what, "100")
