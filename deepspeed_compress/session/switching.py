"""What a change of settings in mid-run does to memories: residuals are in the units of gradients whatever made them."""

from collections.abc import Mapping

from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.compression.state import SHARED
from deepspeed_compress.config import CompressConfig, CompressedGradients

__all__ = ["hand_over_means", "make_expected"]

_OF_SOME = frozenset({"gradients", "means", "factors", "spread"})
"""Memories that some settings of a run may ask for, and others not."""


def make_expected(stores: ResidualStores, config: CompressConfig, storage: Mapping[str, str]) -> None:
    """Make the memories of a state that is about to be loaded which no settings have asked for yet: where settings
    change in mid-run, others will. `storage`: the form of each memory of the state, by name."""
    gradients = config.gradients
    if config.adaptive is None and not config.schedule.phases:
        return
    kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
    for name in sorted(_OF_SOME & storage.keys() - stores.by_name.keys()):
        on_host = kept is not None and kept.on_host and name not in SHARED
        stores.get(name, storage[name], on_host, scaled=name not in SHARED)


def hand_over_means(stores: ResidualStores, scale: float) -> None:
    """What owners have left out of means goes into their own gradients, for PowerSGD, which has no means of matrices.

    `scale`: of the sums that became means. An owner's own gradient counts in the sum once, so what was left out of a
    mean, divided by the scale, is in the next one.
    """
    means, gradients = stores.by_name.get("means"), stores.by_name.get("gradients")
    if means is None or gradients is None:
        return
    for piece, values in list(means.items()):
        gradients.add([(piece, values / scale)], values.device)
    means.clear()
