"""Where figures of a run begin to mean something. Every value has its reason, and none is fitted to a run."""

from dataclasses import dataclass

__all__ = ["Thresholds"]


@dataclass(frozen=True)
class Thresholds:
    """Shares are of the time of a step or of the bytes of a rank, where nothing else is said."""

    lines: int = 16
    """Measured steps that a rule needs: a median of fewer is moved by two or three slow ones, and the same rank is
    the slowest in nine of ten of them by chance once in a thousand runs."""

    wait: float = 0.25
    """Waiting for messages: without it the step would be a third faster at most. Below, other things matter more."""
    cost: float = 0.15
    """Encoding and decoding: the project's aim is 1.15 of the step without communication, which this alone uses up."""
    gain: float = 0.05
    """What is worth a change that costs nothing; two runs of the same settings differ by less."""
    own_gain: float = 0.1
    """What is worth a change that may cost accuracy or needs work elsewhere: twice `gain`."""
    kernel_rate: float = 0.4e9
    """Bytes of input that a core encodes in a second, with error feedback: plain PyTorch reaches half of it, the C++
    kernels 25 times it, which leaves room for cores and memory that are shared."""
    kernel_bytes: int = 4_000_000
    """Smaller inputs say nothing of kernels: a call costs as much as its elements. It is one round of an exchange."""
    small_message: int = 1_000_000
    """Bytes of a step that travel in 8 ms at 1 Gbit/s: who waits longer for less waits for latency, not for bytes."""

    raw: float = 0.9
    """Uncompressed part of the gradients sent: compressing the rest to nothing would save less than a tenth."""
    no_ratio: float = 1.25
    """Compression ratio, beyond what the stage gives by itself, below which less than a fifth of the bytes is saved."""
    most: float = 0.75
    """Part of all bytes that is not gradients: halving the gradients then saves an eighth at most."""
    weights: float = 0.5
    """Part of all bytes that is weights, when they outweigh everything else."""

    delay: float = 10.0
    """Residual norm over gradient norm: about the steps by which gradients arrive late. Adam's first moment (beta1 0.9)
    averages over 10."""
    growth: float = 2.0
    """Residual norm of the last quarter over that of the second: it is 7/3 where it grows with the steps, so that
    nearly nothing is ever sent, and 1.5 where it grows with their root."""
    cosine: float = 0.2
    """Similarity to the true gradient: its square, 4 %, is the part of the gradient that the step follows."""
    loss_gap: float = 0.01
    """Loss above the baseline's: twice the project's aim (0.5 %), five times what seeds differ by (0.2 %)."""
    sigmas: float = 6.0
    """Standard errors, so that the lowest of many windows is not taken for a turn."""
    lost: float = 0.2
    """Part of the descent of the loss that must be lost again: more than a learning rate's next step brings back."""
    rise: float = 0.05
    """The least rise of the loss, of its lowest value, that counts at all."""

    memory: float = 0.2
    """Residuals over peak memory: the next smaller type gives back half of that, which is `own_gain`."""
    memory_growth: float = 0.05
    """Growth of the peak from the first quarter to the end; allocators are settled by then."""
    memory_steady: float = 0.01
    """The least growth in each of the last three quarters: a leak does not pause, a cache does."""

    straggler: float = 0.1
    """Time by which the slowest rank is behind the median one: all others wait for it, and no setting gets it back."""
    same_rank: float = 0.9
    """Part of the steps in which it is the same rank."""
    noise: float = 0.25
    """The same excess where the rank changes: chance makes some rank the slowest, but not by a quarter of a step."""

    alike: float = 0.05
    """Cosine between what islands move: its square, a quarter of a percent, is the part that they have in common, and
    islands that see data of one kind have many times that."""
    late: float = 0.5
    """Part of the exchanges that an island misses: with most of them missed its work is mostly lost."""

    anomalies: int = 3
    """Fewer may be bad data."""
    skipped: float = 0.02
    """Steps that are not finite, after `skipped_from`: a dynamic loss scale tries a higher one every 1000 steps, and
    may skip one each time; twenty times that is trouble."""
    skipped_from: int = 20
    """Optimizer steps in which a dynamic loss scale comes down from its start, 2 to the power of 16."""
