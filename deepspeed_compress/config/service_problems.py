"""Checks of what runs beside a step: `islands`, `communication`, `checkpointing` and `rollout`."""

from collections.abc import Callable, Iterator

from deepspeed_compress.config.islands import Islands
from deepspeed_compress.config.places import (
    CompressedGradients,
    CompressedWeights,
    ErrorFeedbackConfig,
    PowerSGDGradients,
)
from deepspeed_compress.config.problems import TENSOR, Configuration, notice, problem, show
from deepspeed_compress.diagnostics import Diagnostic, at, write


def islands_within_section(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check settings of islands against each other and the rest of the section."""
    islands, guard = configuration.section.islands, configuration.section.guard
    if islands is None:
        return
    yield from (_elastic if islands.elastic is not None else _single_job)(islands)
    if islands.outer.optimizer == "average" and "momentum" in islands.outer.model_fields_set:
        what = f'{islands.outer.momentum} has no effect with optimizer "average" (allowed: no key)'
        instead = 'nothing: remove the key, or write "optimizer": "nesterov"'
        yield problem(("islands", "outer", "momentum"), what, instead)
    if guard is not None and guard.rollback is not None and guard.rollback.checkpoint:
        what = "true would roll back the weights of one island while the others continue (allowed with islands: false)"
        yield problem(("guard", "rollback", "checkpoint"), what, "false, or remove islands")
    yield from _exchange(islands)
    pipeline = configuration.parallelism.pipeline
    if pipeline > 1 and islands.elastic is None:
        what = (
            f"{pipeline} is not available inside islands of one job, because DeepSpeed distributes stages over all "
            "ranks of the job (allowed: 1)"
        )
        yield problem(("parallelism", "pipeline"), what, '1, or islands with "elastic"')


def _exchange(islands: Islands) -> Iterator[Diagnostic]:
    exchange = islands.exchange
    if isinstance(exchange, PowerSGDGradients) or getattr(exchange, "hierarchy", None) is not None:
        what = f"{exchange.method} needs more than one round trip between islands"
        instead = '{"method": "blockwise", "bits": 4}, without hierarchy'
        yield problem(("islands", "exchange"), f"{what} (allowed: other methods, without hierarchy)", instead)
    kept = exchange.residuals if isinstance(exchange, CompressedGradients) else None
    if isinstance(kept, ErrorFeedbackConfig) and kept.reset_interval is not None:
        what = f"{kept.reset_interval} has no effect on the residuals of exchanges (allowed in exchange: null)"
        yield problem(("islands", "exchange", "error_feedback", "reset_interval"), what, "nothing: remove the key")


def _single_job(islands: Islands) -> Iterator[Diagnostic]:
    if (islands.size is None) != islands.by_host:
        what = f"{show(islands.size)} with by_host: {show(islands.by_host)} (allowed: exactly one of the two)"
        yield problem(("islands", "size"), what, '"size": 8, for islands of 8 ranks, or "by_host": true without size')
    if islands.sync_steps is None:
        what = f"{show(islands.sync_every)} is a time, on which the ranks of one job cannot agree (allowed: steps)"
        yield problem(("islands", "sync_every"), what, '30, a number of steps, or islands with "elastic"')
        return
    for key, most in (("fragments", islands.sync_steps), ("delay", islands.sync_steps - 1)):
        if getattr(islands, key) > most:
            what = f"{getattr(islands, key)} is too large for sync_every {islands.sync_every} (allowed: up to {most})"
            yield problem(("islands", key), what, f"{most}, or a larger sync_every")


_SINGLE_JOB_KEYS = {"size": None, "by_host": False, "fragments": 1, "delay": 0, "warmup_steps": 0}
"""Keys that islands that join and leave do not have, with the value that has no effect."""


def _elastic(islands: Islands) -> Iterator[Diagnostic]:
    elastic = islands.elastic
    assert elastic is not None
    for key, nothing in _SINGLE_JOB_KEYS.items():
        value = getattr(islands, key)
        if value != nothing:
            what = f"{show(value)} only applies to islands of one job (allowed with elastic: {show(nothing)})"
            yield problem(("islands", key), what, f"nothing: remove {key}, or elastic")
    if elastic.give_up_seconds < elastic.timeout_seconds:
        what = f"{show(elastic.give_up)} is shorter than timeout {show(elastic.timeout)} (allowed: at least timeout)"
        yield problem(("islands", "elastic", "give_up"), what, f"{show(elastic.timeout)}, or more")
    if elastic.parameter_server is not None and elastic.minimum > 1:
        what = f"{elastic.minimum} has no effect with parameter_server, because asynchronous islands do not wait"
        instead = "nothing: remove minimum, or parameter_server"
        yield problem(("islands", "elastic", "minimum"), f"{what} (allowed: 1)", instead)
    if elastic.parameter_server is not None and islands.second_moments is not None:
        what = "need exchanges in rounds, which asynchronous islands do not have (allowed with parameter_server: null)"
        yield problem(("islands", "second_moments"), what, "null, or remove parameter_server")


_WITH_SECOND_MOMENTS = frozenset({"adam", "adamw", "fusedadam", "lamb", "fusedlamb", "nadam", "radam", "muon"})
"""Lower-case optimizer types that keep Adam's second moment for every weight that Adam steps."""


def islands_within_file(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check islands against the optimizer, the fp32 master weights, tensor parallelism, and the number of ranks."""
    islands, tensor, world_size = configuration.section.islands, configuration.tensor, configuration.world_size
    if islands is None:
        return
    kind = configuration.native("optimizer", "type")
    if islands.second_moments is not None and isinstance(kind, str) and kind.lower() not in _WITH_SECOND_MOMENTS:
        what = f"has no effect with optimizer {show(kind)}, which has no second moments (allowed: null)"
        yield problem(("islands", "second_moments"), what, 'null, or use "type": "AdamW"')
    yield from _missing_master_weights(configuration)
    if islands.elastic is not None:
        if tensor > 1 and islands.elastic.parameter_server is not None:
            what = f"{tensor} is not available with a parameter server, which knows one shape of each parameter"
            key, instead = at(*TENSOR.place(configuration.parallelism)), '1, or "parameter_server": null'
            yield Diagnostic(key, f"{what} (allowed with it: 1)", write(instead))
        return
    for place, why in _FALSE_IN_SINGLE_JOB:
        if configuration.native(*place) is True:
            what = f"true {why} (allowed with islands: false)"
            yield Diagnostic(at(*place), what, write("false, or remove islands"))
    if islands.size is not None and world_size is not None and world_size % (islands.size * tensor):
        what = f"{islands.size} x {tensor} ranks that share each layer do not divide the {world_size} ranks of the job"
        instead = "another size, or start a multiple of that number of ranks"
        yield problem(("islands", "size"), f"{what} (allowed: divisors)", instead)


def _missing_master_weights(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that there are fp32 master weights, as `find_master_weights` does once there is an engine."""
    for key in ("bf16", "bfloat16", "fp16"):
        if configuration.stage == 0 and configuration.native(key, "enabled") is True:
            what = "true without ZeRO leaves no fp32 master weights for islands to exchange (allowed: with ZeRO 1 to 3)"
            yield Diagnostic(at(key, "enabled"), what, write('"zero_optimization": {"stage": 1}, or false'))
    place = ("zero_optimization", "offload_param", "device")
    if configuration.stage == 3 and configuration.native(*place) == "nvme":
        what = '"nvme" stores weights where islands cannot exchange them (allowed with islands: "cpu", "none")'
        yield Diagnostic(at(*place), what, write('"cpu"'))


_OF_ONE_ISLAND = "distributes data over the ranks of one island only"
_SAMPLING = ("data_efficiency", "data_sampling")
_FALSE_IN_SINGLE_JOB: tuple[tuple[tuple[str, ...], str], ...] = (
    (("checkpoint", "use_node_local_storage"), "gives hosts different files, but all islands must load the same ones"),
    ((*_SAMPLING, "curriculum_learning", "enabled"), _OF_ONE_ISLAND),
    ((*_SAMPLING, "dynamic_batching", "enabled"), _OF_ONE_ISLAND),
)
"""DeepSpeed's keys that must not be true with islands of one job, and why."""


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


def idle_weights(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find compressed weights that checkpoints in memory make exact in every step."""
    section = configuration.section
    memory = section.checkpointing and section.checkpointing.memory
    if memory and memory.every == 1 and section.weights.method != "none":
        what = "1 gathers exact weights in every step, so compressing them has no effect (useful: 10 or more)"
        yield notice(("checkpointing", "memory", "every"), what, '10, or "weights": {"method": "none"}')


def idle_rollout(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find settings of `rollout` without effect."""
    settings = configuration.section.rollout
    if settings is None:
        return
    if settings.lossy_bits == 8 and settings.dtype != "fp32":
        what = f"8 has no effect with dtype {settings.dtype}, whose exact changes are shorter (useful: 4, or fp32)"
        yield notice(("rollout", "bits"), what, '4, or "method": "exact"')
