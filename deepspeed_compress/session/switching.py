"""Effects of a change of settings during a run on residuals, which are in units of gradients for every method."""

from collections.abc import Mapping

from deepspeed_compress.compression.residual_stores import ResidualStores, full_name, kind_of, owner_of
from deepspeed_compress.compression.state import SHARED
from deepspeed_compress.config import CompressConfig, CompressedGradients

_OF_SOME = frozenset({"gradients", "means", "factors", "spread"})
"""Kinds of stores that some settings of a run need and others do not."""


def make_expected(stores: ResidualStores, config: CompressConfig, storage: Mapping[str, str]) -> None:
    """Make the stores of a state that is about to be loaded that no settings have requested yet.

    If settings change during the run, later ones will request them. `storage` is the form of each store of the state,
    by name.
    """
    gradients = config.gradients
    if config.adaptive is None and not config.schedule.phases:
        return
    kept = gradients.residuals if isinstance(gradients, CompressedGradients) else None
    for name in sorted(storage.keys() - stores.by_name.keys()):
        if kind_of(name) in _OF_SOME:
            shared = kind_of(name) in SHARED
            on_host = kept is not None and kept.on_host and not shared
            stores.get(name, storage[name], on_host, scaled=not shared)


def hand_over_means(stores: ResidualStores, scale: float) -> None:
    """Add the residuals of means to the residuals of owners' gradients, for PowerSGD, which has no means of matrices.

    `scale` is that of the sums that became means. An owner's gradient is in the sum once, so the residual of a mean
    divided by the scale is added to the next sum.
    """
    for name in [name for name in stores.by_name if kind_of(name) == "means"]:
        means, gradients = stores.by_name[name], stores.by_name.get(full_name("gradients", owner_of(name)))
        if gradients is not None:
            for piece, values in list(means.items()):
                gradients.add([(piece, values / scale)], values.device)
            means.clear()
