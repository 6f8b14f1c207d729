"""Rules on step time: waiting for messages, encoding and decoding, kernels that are not compiled, and a slow rank."""

import statistics
from collections.abc import Iterator
from typing import Any

from deepspeed_compress.choice_names import in_bits
from deepspeed_compress.config import GradientsConfig
from deepspeed_compress.config.methods import BlockwiseConfig, PercentileConfig
from deepspeed_compress.config.places import FeedbackGradients
from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.doctor.case import Case, Times
from deepspeed_compress.tools.doctor.patches import BLOCKS, accumulated, stronger, with_gradients, with_stage
from deepspeed_compress.tools.doctor.rule import rule

Remedy = tuple[str, dict[str, Any] | None]


@rule("warning", "how much of a step is spent waiting for messages", "times", "config")
def communication_bound(case: Case) -> Iterator[Diagnostic]:
    times = case.times
    share = times.wait / times.step
    if share > case.limits.wait and not _lost_share(case):
        figures = {"waiting, ms of a step": times.wait, "step, ms": times.step, "waiting, part of a step": share}
        yield case.finding(
            f"Communication slows the run down: {share:.0%} of a step is spent waiting for messages",
            *_less_communication(case),
            evidence={**figures, "bytes that a rank sends per step": sum(case.traffic.values())},
            weight=share,
        )


def _less_communication(case: Case) -> Remedy:
    """Return the first remedy that fits: reduce once per step, send less, or reduce less often."""
    change, small = stronger(case.section.gradients), case.waited_bytes < case.limits.small_message
    micro_batches = (case.run.config or {}).get("gradient_accumulation_steps")
    if case.stage == 2 and isinstance(micro_batches, int) and micro_batches > 1:
        text = "Use ZeRO 1, which reduces gradients once per step, while ZeRO 2 does so in every micro-batch."
        return text, case.patch(with_stage, 1)
    if change is not None and not small:
        better = in_bits(change.get("bits", 8))
        text = f'Choose "{better}". If several ranks share a node, gradients.hierarchy saves about as much again.'
        return text, case.patch(with_gradients, change)
    why = "The messages are so small that latency dominates." if small else ""
    other = "use gradients.hierarchy if several ranks share a node, or a method that sends less (docs/methods.md)"
    if case.stage < 2:
        text = "Accumulate twice as many micro-batches, so that steps wait half as often for the same tokens"
        return f"{why} {text}; or {other}.".strip(), case.patch(accumulated)
    return f"{why} Use larger micro-batches; or {other}.".strip(), None


@rule("warning", "how fast gradients are encoded", "times", "config")
def slow_kernels(case: Case) -> Iterator[Diagnostic]:
    rate, times = _slow_rate(case), case.times
    if rate is not None:
        yield case.finding(
            f"Compression runs without compiled kernels: it encodes {rate / 1e9:.2f} GB/s, C++ reaches several GB/s",
            "Install g++ (or set CXX) and ninja, and do not set DEEPSPEED_COMPRESS_KERNELS=torch. No configuration key "
            "changes this.",
            evidence={
                "encoding, ms of a step": times.compress,
                "bytes encoded per second": rate,
                **_cost_figures(times),
            },
            weight=times.cost / times.step,
        )


def _slow_rate(case: Case) -> float | None:
    """Return the bytes encoded per second, or None if the rate is normal or encoding takes too little time."""
    times, limits, section, size = case.times, case.limits, case.run.section, case.encoded_bytes
    if section is None or section.gradients.method not in BLOCKS or size < limits.kernel_bytes or not times.compress:
        return None
    rate = 1e3 * size / times.compress
    return rate if rate < limits.kernel_rate and times.cost / times.step > limits.gain else None


def _cost_figures(times: Times) -> dict[str, Any]:
    return {"encoding and decoding, ms": times.cost, "encoding and decoding, part of a step": times.cost / times.step}


@rule("warning", "how much of a step is spent encoding and decoding", "times")
def compression_bound(case: Case) -> Iterator[Diagnostic]:
    """Report that encoding takes long although, as far as is known, it saves more time than it takes."""
    times, section = case.times, case.run.section
    share = times.cost / times.step
    if share <= case.limits.cost or _slow_rate(case) is not None or _lost_share(case):
        return
    remedy, change = _cheaper(section.gradients if section is not None else None)
    yield case.finding(
        f"Compression itself slows the run down: {share:.0%} of a step is spent encoding and decoding",
        remedy,
        patch=case.gradients_patch(change),
        evidence={**_cost_figures(times), "step, ms": times.step},
        weight=share,
    )


def _cheaper(gradients: GradientsConfig | None) -> tuple[str, dict[str, Any] | None]:
    """Return the remedy that removes the most expensive part of encoding, and its change of the gradient settings."""
    if gradients is None or gradients.method not in BLOCKS:
        text = "Use a method that needs a single pass over memory: blockwise with 4 bits."
        return text, {"method": "blockwise", "bits": 4}
    if isinstance(gradients, FeedbackGradients) and gradients.rotation is not None:
        return "Leave the rotation out.", {"rotation": None}
    if isinstance(gradients, BlockwiseConfig | PercentileConfig) and gradients.rounding == "stochastic":
        return "Round to nearest: error feedback corrects the rounding errors.", {"rounding": "nearest"}
    return "Give each rank more cores, or use larger micro-batches, so that a step has more computation.", None


def _loss_of_time(case: Case) -> float | None:
    """Return a lower bound for the milliseconds per step that compression costs beyond what it saves.

    Negative if compression pays off. The network carries at least the bytes sent in the time spent waiting for them,
    since a wait may have other reasons.

    Returns:
        The milliseconds, or None if messages overlap with backward, because the time for larger ones is then unknown.
    """
    if case.overlaps or not case.waited_bytes:
        return None
    fewer = max(0.0, case.median("bytes_uncompressed") - case.median("bytes_sent"))
    fewer += sum(case.median(f"{kind}_saved") for kind in case.compressed_activations)
    return case.times.cost - fewer / case.waited_bytes * case.times.wait


def _lost_share(case: Case) -> float:
    """Return the fraction of a step that is lost by compressing, from this run's figures or compared with the baseline.

    Returns 0 if the loss is too small to matter or unknown. Slow kernels are not attributed to the method.
    """
    times, limits = case.times, case.limits
    if _slow_rate(case) is not None:
        return 0.0
    estimated = (_loss_of_time(case) or 0.0) / times.step
    # Compression does not cause more extra time than encoding and waiting take.
    measured = min(_slower_than_baseline(case), (times.cost + times.wait) / times.step)
    return max(estimated, measured) if estimated > limits.gain or measured > limits.own_gain else 0.0


@rule("warning", "whether fewer bytes save more time than encoding takes", "times")
def compression_does_not_pay(case: Case) -> Iterator[Diagnostic]:
    times, section, lost = case.times, case.run.section, _lost_share(case)
    if not lost:
        return
    heavy = section is not None and section.gradients.method not in BLOCKS
    change = {"method": "blockwise", "bits": 8} if heavy else {"method": "none"}
    slower = _slower_than_baseline(case)
    yield case.finding(
        "Compression does not pay off: encoding and decoding take longer than fewer bytes save on this network",
        "Use blockwise with 8 bits, which is the fastest." if heavy else "Do not compress gradients on this network.",
        patch=case.gradients_patch(change),
        evidence={
            **_cost_figures(times),
            "step, ms": times.step,
            **({"step time relative to the baseline": 1 + slower} if slower else {}),
        },
        weight=min(1.0, lost),
    )


def _slower_than_baseline(case: Case) -> float:
    """Return by which fraction of the baseline's step time this run's is longer, or 0 if that is unknown."""
    theirs = Case(case.baseline).step_ms if case.baseline is not None else None
    return case.times.step / theirs - 1 if theirs else 0.0


@rule("warning", "whether one rank keeps the others waiting", "ranks")
def straggler(case: Case) -> Iterator[Diagnostic]:
    slowest = case.slowest
    if slowest is None or not slowest.always or slowest.behind < case.limits.straggler:
        return
    figures = {
        "slowest rank": slowest.rank,
        "part of the steps in which it is the slowest": slowest.share,
        "busy, ms, median rank": statistics.median(line["busy_ms_median"] for line in slowest.lines),
        "busy, ms, slowest rank": statistics.median(line["busy_ms_max"] for line in slowest.lines),
    }
    yield case.finding(
        f"Rank {slowest.rank} is a straggler: it is {slowest.behind:.0%} of a step behind, and the others wait for it",
        f"Check what else rank {slowest.rank} does (logging, loading data), whether its input is longer, and its "
        "machine (clock, temperature, other jobs). No setting helps.",
        steps=(slowest.lines[0]["step"], slowest.lines[-1]["step"]),
        evidence=figures,
        weight=min(1.0, slowest.behind),
    )
