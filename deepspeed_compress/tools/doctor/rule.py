"""Definition of a doctor rule: its texts, its check, and the data and thresholds that the check needs."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepspeed_compress.diagnostics import Diagnostic, Severity
from deepspeed_compress.tools.outputs.report import Rule

if TYPE_CHECKING:
    from deepspeed_compress.tools.doctor.case import Case

Check = Callable[["Case"], Iterable[Diagnostic]]


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRule(Rule):
    """Rule of the doctor. Its code is its name, under which docs/doctor.md explains it."""

    needs: tuple[str, ...]
    """Data that must have been recorded, in the terms of `Case.lacks`."""
    check: Check = field(repr=False)


def rule(severity: Severity | None, summary: str, *needs: str) -> Callable[[Check], DoctorRule]:
    """Return a decorator that turns a check into a rule. The rule has the name of the function.

    Args:
        severity: "error" if the model does not learn, "warning" if time, memory or bytes are lost, otherwise "info".
            None if each diagnostic states its own. The output calls them critical, serious and notice.
        summary: Short description of what the rule checks.
        *needs: Data that must have been recorded, in the terms of `Case.lacks`.
    """

    def decorate(check: Check) -> DoctorRule:
        name = check.__name__.replace("_", "-")
        return DoctorRule(code=name, name=name, severity=severity, summary=summary, needs=needs, check=check)

    return decorate


@dataclass(frozen=True)
class Thresholds:
    """Thresholds of the rules. Fractions are of the step time or of a rank's bytes, unless stated otherwise."""

    lines: int = 16
    """Minimum number of measured steps for a rule.

    With fewer, two or three slow steps would shift the median. With 16, the same rank is the slowest in nine of ten
    steps by chance only once in a thousand runs.
    """

    wait: float = 0.25
    """Time spent waiting for messages. Below it, other causes matter more."""
    cost: float = 0.15
    """Time for encoding and decoding.

    The project's goal is 1.15 times the step time without communication, which this cost alone would use up.
    """
    gain: float = 0.05
    """Gain that justifies a change without cost. Two runs with the same settings differ by less."""
    own_gain: float = 0.1
    """Gain that justifies a change that may cost accuracy or needs work elsewhere: twice `gain`."""
    kernel_rate: float = 0.4e9
    """Input bytes that a core encodes per second with error feedback.

    Plain PyTorch reaches half of this, the C++ kernels 25 times as much. The margin allows for shared cores and memory.
    """
    kernel_bytes: int = 4_000_000
    """Minimum input size in bytes to judge kernels by, one round of an exchange. Below it, call overhead dominates."""
    small_message: int = 1_000_000
    """Bytes per step that 1 Gbit/s carries in 8 ms. A longer wait for fewer bytes is due to latency, not bandwidth."""

    raw: float = 0.9
    """Uncompressed fraction of the gradient bytes sent. Stronger compression of the rest saves at most a tenth."""
    most: float = 0.75
    """Fraction of all bytes that are gathered weights. Halving the gradients then saves an eighth at most."""
    weights: float = 0.5
    """Fraction of all bytes that are weights, so that weights outweigh everything else."""
    gathers: float = 8.0
    """Bytes of gathered weights for each byte of gradients, under ZeRO 3.

    If all weights are trained, there are three at most: forward, backward, and the second forward of checkpointing.
    """

    delay: float = 10.0
    """Residual norm divided by gradient norm, which is about the number of steps by which gradients arrive late.

    Adam's first moment (beta1 0.9) averages over 10 steps.
    """
    growth: float = 2.0
    """Residual norm of the last quarter divided by that of the second quarter.

    The quotient is 7/3 if the norm grows linearly with the steps, so that almost nothing is ever sent. It is 1.5 if the
    norm grows with the square root of the steps.
    """
    cosine: float = 0.2
    """Cosine similarity to the true gradient. Its square, 4 %, is the fraction of the gradient that a step follows."""
    loss_gap: float = 0.01
    """Relative loss above the baseline: twice the project's goal (0.5 %), five times the spread of seeds (0.2 %)."""
    sigmas: float = 6.0
    """Number of standard errors, large enough that the lowest of many windows is not mistaken for a turning point."""
    lost: float = 0.2
    """Fraction of the loss's descent that must be lost again: more than the next step of the learning rate restores."""
    rise: float = 0.05
    """Smallest relative rise above the lowest loss that is considered at all."""

    straggler: float = 0.1
    """Time by which the slowest rank is behind the median rank. All others wait for it, and no setting recovers it."""
    same_rank: float = 0.9
    """Fraction of the steps in which the same rank is the slowest."""
    noise: float = 0.25
    """Threshold for `Slowest.behind` if the slowest rank varies. Chance does not delay a rank by a quarter step."""

    alike: float = 0.05
    """Cosine between the movements of islands.

    Its square, a quarter of a percent, is the fraction that they share. Islands that train on data of one kind share
    many times that.
    """
    late: float = 0.5
    """Fraction of the exchanges that an island misses. If it misses most of them, most of its work is lost."""

    anomalies: int = 3
    """Minimum number of anomalies. Fewer may be due to bad data."""
    skipped: float = 0.02
    """Fraction of steps after `skipped_from` that are not finite.

    A dynamic loss scale tries a higher value every 1000 steps and may skip one step each time. Twenty times that is a
    problem.
    """
    skipped_from: int = 20
    """Optimizer steps within which a dynamic loss scale comes down from its initial value of 2 to the power of 16."""
