"""Settings that contradict islands: their own, those of the rest of the section, and those of the rest of the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.islands import Islands
from deepspeed_compress.config.models import CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE, TENSOR, value_at
from deepspeed_compress.config.places import CompressedGradients, ErrorFeedbackConfig, PowerSGDGradients
from deepspeed_compress.config.problems import problem, show
from deepspeed_compress.diagnostics import Diagnostic, at, write


def find_island_contradictions(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield settings of islands that contradict each other."""
    islands = section.islands
    if islands is None:
        return
    yield from (_elastic_problems if islands.elastic is not None else _single_job_problems)(islands)
    if islands.outer.optimizer == "average" and "momentum" in islands.outer.model_fields_set:
        what = f'{islands.outer.momentum} has no effect with optimizer "average" (allowed: no key)'
        yield problem(
            ("islands", "outer", "momentum"), what, 'nothing: remove the key, or write "optimizer": "nesterov"'
        )
    yield from _checkpoint_rollback(section)
    yield from _exchange_problems(islands)
    pipeline = (section.parallelism or Parallelism()).pipeline
    if pipeline > 1 and islands.elastic is None:
        what = (
            f"{pipeline} is not available inside islands of one job, because DeepSpeed distributes stages over all "
            "ranks of the job"
        )
        yield problem(("parallelism", "pipeline"), f"{what} (allowed: 1)", '1, or islands with "elastic"')


def _exchange_problems(islands: Islands) -> Iterator[Diagnostic]:
    if isinstance(islands.exchange, PowerSGDGradients) or getattr(islands.exchange, "hierarchy", None) is not None:
        what = (
            f"{islands.exchange.method} needs more than one round trip between islands (allowed: other methods, "
            "without hierarchy)"
        )
        yield problem(("islands", "exchange"), what, '{"method": "blockwise", "bits": 4}, without hierarchy')
    kept = islands.exchange.residuals if isinstance(islands.exchange, CompressedGradients) else None
    if isinstance(kept, ErrorFeedbackConfig) and kept.reset_interval is not None:
        what = f"{kept.reset_interval} has no effect on the residuals of exchanges (allowed in exchange: null)"
        yield problem(("islands", "exchange", "error_feedback", "reset_interval"), what, "nothing: remove the key")


def _checkpoint_rollback(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check settings that would let one island alone change weights that it shares with the others."""
    rollback = None if section.guard is None else section.guard.rollback
    if rollback is not None and rollback.checkpoint:
        what = "true would roll back the weights of one island while the others continue (allowed with islands: false)"
        yield problem(("guard", "rollback", "checkpoint"), what, "false, or remove islands")


def _single_job_problems(islands: Islands) -> Iterator[Diagnostic]:
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


def _elastic_problems(islands: Islands) -> Iterator[Diagnostic]:
    for key, nothing in _SINGLE_JOB_KEYS.items():
        if getattr(islands, key) != nothing:
            what = (
                f"{show(getattr(islands, key))} only applies to islands of one job (allowed with elastic: "
                f"{show(nothing)})"
            )
            yield problem(("islands", key), what, f"nothing: remove {key}, or elastic")
    elastic = islands.elastic
    if elastic is not None and elastic.give_up_seconds < elastic.timeout_seconds:
        what = f"{show(elastic.give_up)} is shorter than timeout {show(elastic.timeout)} (allowed: at least timeout)"
        yield problem(("islands", "elastic", "give_up"), what, f"{show(elastic.timeout)}, or more")
    if elastic is not None and elastic.parameter_server is not None and elastic.minimum > 1:
        what = (
            f"{elastic.minimum} has no effect with parameter_server, because asynchronous islands do not wait "
            "(allowed: 1)"
        )
        yield problem(("islands", "elastic", "minimum"), what, "nothing: remove minimum, or parameter_server")
    if elastic is not None and elastic.parameter_server is not None and islands.second_moments is not None:
        what = "need exchanges in rounds, which asynchronous islands do not have (allowed with parameter_server: null)"
        yield problem(("islands", "second_moments"), what, "null, or remove parameter_server")


_WITH_SECOND_MOMENTS = frozenset({"adam", "adamw", "fusedadam", "lamb", "fusedlamb", "nadam", "radam", "muon"})
"""Lower-case optimizer types that keep Adam's second moment for every weight that Adam steps."""


def find_island_mismatches(
    ds_config: Mapping[str, Any], section: CompressConfig, world_size: int | None = None
) -> Iterator[Diagnostic]:
    """Yield contradictions of islands with the rest of the file, or with `world_size` ranks in total.

    They concern the optimizer, fp32 master weights that cannot be found, and tensor parallelism, which both the section
    and DeepSpeed's own key may request.
    """
    islands, parallelism = section.islands, section.parallelism or Parallelism()
    if islands is None:
        return
    kind = value_at(ds_config, ("optimizer", "type"))
    if islands.second_moments is not None and isinstance(kind, str) and kind.lower() not in _WITH_SECOND_MOMENTS:
        what = f"has no effect with optimizer {show(kind)}, which has no second moments (allowed: null)"
        yield problem(("islands", "second_moments"), what, 'null, or use "type": "AdamW"')
    yield from _missing_master_weights(ds_config, STAGE.effective(ds_config, parallelism))
    tensor = TENSOR.effective(ds_config, parallelism)
    if islands.elastic is not None:
        if tensor > 1 and islands.elastic.parameter_server is not None:
            what = f"{tensor} is not available with a parameter server, which knows one shape of each parameter"
            instead = '1, or "parameter_server": null'
            yield Diagnostic(at(*TENSOR.place(parallelism)), f"{what} (allowed with it: 1)", write(instead))
        return
    yield from _native_problems(ds_config)
    ranks = None if islands.size is None else islands.size * tensor
    if ranks is not None and world_size is not None and world_size % ranks:
        what = f"{islands.size} x {tensor} ranks that share each layer do not divide the {world_size} ranks of the job"
        yield problem(
            ("islands", "size"),
            f"{what} (allowed: divisors)",
            "another size, or start a multiple of that number of ranks",
        )


def _missing_master_weights(ds_config: Mapping[str, Any], stage: int) -> Iterator[Diagnostic]:
    """Check that there are fp32 master weights, as `find_master_weights` does once there is an engine."""
    for key in ("bf16", "bfloat16", "fp16"):
        if stage == 0 and value_at(ds_config, (key, "enabled")) is True:
            what = "true without ZeRO leaves no fp32 master weights for islands to exchange (allowed: with ZeRO 1 to 3)"
            yield Diagnostic(at(key, "enabled"), what, write('"zero_optimization": {"stage": 1}, or false'))
    place = ("zero_optimization", "offload_param", "device")
    if stage == 3 and value_at(ds_config, place) == "nvme":
        what = '"nvme" stores weights where islands cannot exchange them (allowed with islands: "cpu", "none")'
        yield Diagnostic(at(*place), what, write('"cpu"'))


_FALSE_IN_SINGLE_JOB = (
    (("checkpoint", "use_node_local_storage"), "gives hosts different files, but all islands must load the same ones"),
    (
        ("data_efficiency", "data_sampling", "curriculum_learning", "enabled"),
        "distributes data over the ranks of one island only",
    ),
    (
        ("data_efficiency", "data_sampling", "dynamic_batching", "enabled"),
        "distributes data over the ranks of one island only",
    ),
)
"""DeepSpeed's keys that must not be true with islands of one job, and why."""


def _native_problems(ds_config: Mapping[str, Any]) -> Iterator[Diagnostic]:
    for place, why in _FALSE_IN_SINGLE_JOB:
        if value_at(ds_config, place) is True:
            yield Diagnostic(at(*place), f"true {why} (allowed with islands: false)", write("false, or remove islands"))
