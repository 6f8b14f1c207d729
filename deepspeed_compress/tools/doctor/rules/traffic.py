"""Rules on traffic: excluded gradients, weights, islands, and weights for rollout workers."""

import statistics
from collections.abc import Iterator
from typing import Any

from deepspeed_compress.choice_names import INSIDE_NODES, LOSS, in_bits
from deepspeed_compress.config import SECTION, CompressedGradients
from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.doctor.case import SAMPLES, Case
from deepspeed_compress.tools.doctor.patches import with_gradients, with_section
from deepspeed_compress.tools.doctor.rule import rule
from deepspeed_compress.tools.doctor.rules.learning import after_exchanges, rise_at_exchanges, risen

_TITLES = {
    "bytes_sent": "gradients",
    "bytes_weights": "weights",
    "bytes_pipeline": "activations between stages",
    "bytes_tied": "gradients of tied weights",
    "bytes_tensor": "collectives of split layers",
    "bytes_experts": "tokens between experts",
    "bytes_sequence": "all-to-alls of sequence parallelism",
    "bytes_islands": "exchanges between islands",
}
_MISSED = frozenset({"islands_left_out", "islands_renewed"})


@rule("warning", "how much of the gradients is excluded from compression", "bytes_raw")
def nothing_compressed(case: Case) -> Iterator[Diagnostic]:
    parts = [raw / sent for raw, sent in zip(case.values("bytes_raw"), case.values("bytes_sent"), strict=False) if sent]
    share = sorted(parts)[len(parts) // 2] if parts else 0.0
    if share < case.limits.raw:
        return
    yield case.finding(
        f"Almost nothing is compressed: {share:.0%} of the gradient bytes sent belong to excluded parameters",
        *_include_more(case),
        evidence={"bytes sent": case.median("bytes_sent"), "of these, uncompressed": case.median("bytes_raw")},
        weight=share,
    )


def _include_more(case: Case) -> tuple[str, dict[str, Any] | None]:
    """Return a remedy for parameters excluded from compression, and its patch, for the first cause that applies."""
    section, config = case.run.section, case.run.config
    if config is None or section is None:
        return "Check gradients.min_numel and gradients.overrides.", None
    gradients = section.gradients
    if isinstance(gradients, CompressedGradients) and gradients.min_numel:
        what = f"Remove gradients.min_numel: {gradients.min_numel} excludes every smaller parameter."
        return what, case.patch(with_gradients, {"min_numel": None})
    if isinstance(gradients, CompressedGradients) and any(one.method == "none" for one in gradients.overrides):
        pairs = zip(config[SECTION]["gradients"]["overrides"], gradients.overrides, strict=True)
        kept = [written for written, override in pairs if override.method != "none"]
        what = "Remove the overrides with method none, or make their patterns narrower."
        return what, case.patch(with_gradients, {"overrides": kept or None})
    return "Stages or tensor-parallel ranks share these parameters, and no setting compresses them.", None


@rule("warning", "whether uncompressed weights dominate the traffic", "times", "config")
def weights_uncompressed(case: Case) -> Iterator[Diagnostic]:
    """Report uncompressed weights that outweigh other traffic and take significant time at the gradients' rate."""
    size, taken = case.traffic.get("bytes_weights", 0.0), _time_for_weights(case)
    share = size / (sum(case.traffic.values()) or 1.0)
    if case.weights_compressed or share < case.limits.weights or taken < case.limits.own_gain or case.mostly_frozen:
        return
    bits = 8 if case.stage == 3 else 4
    yield case.finding(
        f"Uncompressed weights are {share:.0%} of the bytes that a rank sends; at the rate of the gradients, they take "
        f"about {taken:.0%} of a step",
        f'Choose "{in_bits(bits)}" for weights as well, which costs almost no {LOSS}.',
        patch=None if case.stage == 0 else case.patch(with_section, {"weights": {"bits": bits}}),
        evidence={**_sizes(case), "time for weights, part of a step": taken},
        weight=taken,
    )


@rule("warning", "whether ranks gather weights that are not trained", "config")
def frozen_weights_gathered(case: Case) -> Iterator[Diagnostic]:
    """Report gathers of frozen weights, as with LoRA, if they are most of the traffic and may cross nodes."""
    size, parallelism = case.traffic.get("bytes_weights", 0.0), case.section.parallelism
    share = size / (sum(case.traffic.values()) or 1.0)
    within = parallelism is not None and parallelism.shard_within is not None
    if within or share < case.limits.most or not case.mostly_frozen:
        return
    yield case.finding(
        f"Weights are {share:.0%} of the bytes that a rank sends, and most are not trained: ZeRO 3 gathers them in "
        "every pass, between nodes too",
        f'If the GPUs of one node hold the model, choose "{INSIDE_NODES}": "parallelism": {{"shard_within": "node"}}. '
        "If one GPU holds it, use ZeRO 2.",
        evidence=_sizes(case),
        weight=share,
    )


def _time_for_weights(case: Case) -> float:
    """Return the fraction of a step, at most 1, that uncompressed weights take at the rate of the gradients.

    Part of the waiting time may be another rank's encoding, so that much is not counted as network time. Returns 0 if
    the gradients are too small to estimate the rate.
    """
    times = case.times
    if times.wait <= times.cost or case.waited_bytes < case.limits.small_message:
        return 0.0
    size = case.traffic.get("bytes_weights", 0.0)
    return min(1.0, size / case.waited_bytes * (times.wait - times.cost) / times.step)


def _sizes(case: Case) -> dict[str, float]:
    return {f"bytes of {_TITLES[kind]}": size for kind, size in case.traffic.items()}


@rule("warning", "whether islands move in similar directions", "islands")
def islands_drift_apart(case: Case) -> Iterator[Diagnostic]:
    """Report a low cosine between islands in the later half of the exchanges.

    At the start, all islands move in similar directions.
    """
    cosines = case.values("islands_cosine", case.run.steps)
    late = cosines[len(cosines) // 2 :]
    if len(cosines) < SAMPLES or statistics.median(late) >= case.limits.alike:
        return
    yield case.finding(
        f"Islands drift apart: the cosine between the movement of this island and those of the others is "
        f"{statistics.median(late):.2f}, so their mean keeps almost nothing of what each has learned",
        "Give all islands the same kind of data, shuffled together, and exchange more often.",
        patch=_more_often(case),
        evidence={"cosine with the others, later half": statistics.median(late), "exchanges": len(cosines)},
    )


@rule(None, "whether the loss rises at exchanges between islands", "islands", "losses")
def sync_every_too_long(case: Case) -> Iterator[Diagnostic]:
    """Report a loss that rises at exchanges: the mean of weights that have drifted too far is worse than each of them.

    An outer step beyond the mean has the same effect.
    """
    rise = rise_at_exchanges(case)
    if rise is None:
        return
    yield case.finding(
        f"The loss rises by {rise.mean:.3g} at exchanges between islands: they have drifted too far apart to average",
        "Exchange more often, or halve the learning rate: islands drift by about the product of the two. If outer has "
        "momentum or an lr above 1, and so steps beyond the mean, halve its lr first.",
        patch=_smaller_steps(case) or _more_often(case),
        evidence={
            "rise of the loss at an exchange": rise.mean,
            "loss before the exchange": rise.before,
            "exchanges": rise.exchanges,
        },
        severity="warning" if risen(case) is None else "error",
        weight=min(1.0, rise.mean / rise.before) if rise.before else 1.0,
    )


@rule("warning", "whether this island is late for exchanges", "events")
def late_island(case: Case) -> Iterator[Diagnostic]:
    late = [event for event in case.run.events or () if event["kind"] in _MISSED]
    # The number is an estimate if not all steps are measured.
    taken = case.section.monitor.every * len(after_exchanges(case))
    if len(late) < case.limits.anomalies or len(late) < case.limits.late * (len(late) + taken):
        return
    yield case.finding(
        f"This island is late: it missed {len(late)} exchanges and took part in {taken}",
        "Check its machines and its link. If it is only slower, wait longer for it (timeout above its longest step), "
        "exchange by time (sync_every), or make islands asynchronous.",
        steps=(late[0]["step"], late[-1]["step"]),
        patch=case.patch(with_section, {"islands": {"elastic": change}}) if (change := _longer_timeout(case)) else None,
        evidence={"exchanges missed": len(late), "exchanges with this island": taken},
    )


def _more_often(case: Case) -> dict[str, Any] | None:
    islands = case.section.islands
    every = islands.sync_steps if islands is not None else None
    if islands is None or every is None or every // 2 <= islands.delay or every // 2 < islands.fragments:
        return None
    return case.patch(with_section, {"islands": {"sync_every": every // 2}})


def _smaller_steps(case: Case) -> dict[str, Any] | None:
    """Return a patch that halves the outer learning rate, if `outer` steps beyond the mean of the islands."""
    islands = case.section.islands
    if islands is None or (islands.outer.optimizer == "average" and islands.outer.lr <= 1):
        return None
    return case.patch(with_section, {"islands": {"outer": {"lr": islands.outer.lr / 2}}})


def _longer_timeout(case: Case) -> dict[str, Any] | None:
    """Return twice the timeout of elastic islands, or None if the section has none or the result is not allowed."""
    elastic = case.section.islands.elastic if case.section.islands is not None else None
    if elastic is None:
        return None
    if elastic.parameter_server is not None:
        return {"parameter_server": {"max_staleness": 2 * elastic.parameter_server.max_staleness}}
    longer = 2 * elastic.timeout_seconds
    return {"timeout": f"{longer:g} s"} if longer <= elastic.give_up_seconds else None


@rule("warning", "whether rollouts come from weights that are too old", "config", "lag")
def old_rollouts(case: Case) -> Iterator[Diagnostic]:
    settings = case.section.rollout
    lags = case.values("rollout_lag", case.run.versions)
    if settings is None or not lags or statistics.fmean(lags) <= settings.max_lag:
        return
    yield case.finding(
        f"Rollouts are {statistics.fmean(lags):.1f} versions behind the weights that learn from them (max_lag: "
        f"{settings.max_lag})",
        "Add rollout workers, let them update between requests, or wait for their samples before the next step. A "
        "version for several steps (every) makes the same samples fewer versions old, but not younger.",
        # The first version of a run belongs to no step.
        steps=(case.run.versions[1]["step"], case.run.versions[-1]["step"]),
        evidence={
            "versions behind, mean": statistics.fmean(lags),
            "versions behind, at most": max(lags),
            "age of a version when it is replaced, ms": case.median("rollout_age_ms", case.run.versions),
        },
    )
