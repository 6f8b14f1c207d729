"""Settings that weights for rollout workers cannot be combined with, or that gain nothing with them."""

from collections.abc import Callable, Iterator

from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.places import CompressedWeights
from deepspeed_compress.config.problems import notice, problem
from deepspeed_compress.diagnostics import Diagnostic

_CONFLICTS: tuple[tuple[str, Callable[[CompressConfig], bool]], ...] = (
    (
        "weights with overlap, which arrive during the next step",
        lambda section: isinstance(section.weights, CompressedWeights) and section.weights.overlap,
    ),
    (
        "hybrid sharding",
        lambda section: section.parallelism is not None and section.parallelism.shard_within is not None,
    ),
    (
        "islands of one job, which have several models",
        lambda section: section.islands is not None and section.islands.elastic is None,
    ),
)
"""Settings that weights are not published with, and functions that find them."""


def find_rollout_contradictions(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield what the section combines with `rollout`, although no rank publishes it correctly."""
    if section.rollout is None:
        return
    if section.rollout.method == "exact" and section.rollout.bits is not None:
        yield problem(
            ("rollout", "bits"), "has no effect with the method exact (allowed: null)", '"method": "blockwise"'
        )
    for what, applies in _CONFLICTS:
        if applies(section):
            yield problem(("rollout",), f"cannot be combined with {what} (allowed: null)", "one of the two")


def find_rollout_notices(section: CompressConfig) -> Iterator[Diagnostic]:
    """Yield the settings of `rollout` that cost more than they gain."""
    rollout = section.rollout
    if rollout is None:
        return
    if rollout.lossy_bits == 8 and rollout.dtype != "fp32":
        what = f"8 has no effect with dtype {rollout.dtype}, whose exact changes are shorter (useful: 4, or fp32)"
        yield notice(("rollout", "bits"), what, '4, or "method": "exact"')
    if rollout.full_every == 1:
        what = "1 writes all values in every version, next to the changes (useful: 10 or more)"
        yield notice(("rollout", "full_every"), what, "100")
