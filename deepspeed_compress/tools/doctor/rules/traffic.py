"""Rules on traffic other than compressed gradients."""

from collections.abc import Iterator
from typing import Any

from deepspeed_compress.diagnostics import Diagnostic, at_steps
from deepspeed_compress.tools.doctor.case import OTHER_KINDS, Case
from deepspeed_compress.tools.doctor.patches import with_section
from deepspeed_compress.tools.doctor.rule import rule

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


@rule("warning", "whether uncompressed weights dominate the traffic", "times", "config")
def weights_uncompressed(case: Case) -> Iterator[Diagnostic]:
    """Report uncompressed weights that outweigh other traffic and take significant time at the gradients' rate."""
    size, taken = case.traffic.get("bytes_weights", 0.0), _part_of_step(case, ("bytes_weights",))
    share = size / (sum(case.traffic.values()) or 1.0)
    if case.weights_compressed or share < case.limits.weights or taken < case.limits.own_gain:
        return
    bits = 8 if case.stage == 3 else 4
    yield Diagnostic(
        at_steps(*case.span),
        f"Uncompressed weights are {share:.0%} of the bytes that a rank sends; at the rate of the gradients, they take "
        f"about {taken:.0%} of a step",
        f"Compress weights as well: {bits} bits cost almost no accuracy.",
        patch=None if case.stage == 0 else case.patch(with_section, {"weights": {"bits": bits}}),
        evidence={**_sizes(case), "time for weights, part of a step": taken},
        weight=taken,
    )


@rule("info", "whether other traffic than gradients and weights dominates", "times")
def other_traffic(case: Case) -> Iterator[Diagnostic]:
    share = sum(case.traffic.get(kind, 0.0) for kind in OTHER_KINDS) / (sum(case.traffic.values()) or 1.0)
    taken = _part_of_step(case, OTHER_KINDS)
    if share >= case.limits.most and taken >= case.limits.wait:
        remedy, patch = _less_of_it(case)
        yield Diagnostic(
            at_steps(*case.span),
            f"{share:.0%} of the bytes that a rank sends are neither gradients nor weights, so compressing these more "
            "does not help",
            remedy,
            patch=patch,
            evidence={**_sizes(case), "time for these at the rate of the gradients, part of a step": taken},
            weight=taken,
        )


def _less_of_it(case: Case) -> tuple[str, dict[str, Any] | None]:
    """Return a remedy for the largest of the other kinds of traffic, and its patch."""
    islands = case.run.section.islands if case.run.section is not None else None
    sizes = {kind: case.traffic.get(kind, 0.0) for kind in OTHER_KINDS}
    if islands is None or max(sizes, key=sizes.__getitem__) != "bytes_islands":
        return (
            "Put ranks that share layers on one node, compress what they send (activations.tensor, "
            "activations.pipeline and activations.experts), or split the model between fewer ranks: lower "
            "parallelism.tensor and parallelism.pipeline, and use ZeRO instead.",
            None,
        )
    if islands.exchange.method == "none":
        what = "Let islands exchange 4 bits per element, which has no measurable cost in accuracy, or exchange rarely."
        return what, case.patch(with_section, {"islands": {"exchange": {"method": "blockwise", "bits": 4}}})
    rarely = None if islands.sync_steps is None else {"islands": {"sync_every": 2 * islands.sync_steps}}
    return "Exchange between islands half as often.", None if rarely is None else case.patch(with_section, rarely)


def _part_of_step(case: Case, kinds: tuple[str, ...]) -> float:
    """Return the fraction of a step, at most 1, that the bytes of `kinds` take at the rate of the gradients.

    Part of the waiting time may be another rank's encoding, so that much is not counted as network time. Returns 0 if
    the gradients are too small to estimate the rate.
    """
    times = case.times
    if times is None or times.wait <= times.cost or case.waited_bytes < case.limits.small_message:
        return 0.0
    size = sum(case.traffic.get(kind, 0.0) for kind in kinds)
    return min(1.0, size / case.waited_bytes * (times.wait - times.cost) / times.step)


def _sizes(case: Case) -> dict[str, float]:
    return {f"bytes of {_TITLES[kind]}": size for kind, size in case.traffic.items()}
