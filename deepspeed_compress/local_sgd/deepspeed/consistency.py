"""Checks and repairs for state that must be equal in all islands but is not exchanged, and recovery from divergence."""

import hashlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.backends.deepspeed.weights.copies import fingerprint, held_data
from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights
from deepspeed_compress.errors import CompressWarning


def digest_parameters(fixed: Sequence[Parameter]) -> str:
    """Return a digest of this rank's part of the parameters `fixed`: exact to the bit, and the same on every device."""
    digest = hashlib.sha256()
    for parameter in fixed:
        held = held_data(parameter)
        digest.update(f"{held.dtype} {held.numel()} {fingerprint(held).tolist()} ".encode())
    return digest.hexdigest()


def clear_non_finite(values: Tensor) -> None:
    """Set elements of `values` that are not finite to 0, in place."""
    # One-byte dtypes do not support arithmetic.
    wide = values.float() if values.element_size() == 1 else values
    if not torch.isfinite(wide).all():
        values.copy_(wide.nan_to_num(0.0, 0.0, 0.0))


def recover_from_divergence(
    engine: Any, master_weights: FlatMasterWeights, clear_residuals: Callable[[], None]
) -> None:
    """Recover from a divergence of this island, which gets the weights of the others (CompressWarning).

    Without ZeRO, its optimizer has stepped nevertheless, and its state and the residuals inside the island would spoil
    the new weights. All residuals are cleared, and elements of the optimizer's state that are not finite are set to 0.
    The same on all ranks of the island.
    """
    clear_residuals()
    for home in {id(one.home): one.home for one in master_weights.stepped}.values():
        for kept in engine.basic_optimizer.state.get(home, {}).values():
            if isinstance(kept, Tensor) and kept.is_floating_point():
                clear_non_finite(kept)
    text = "this island has diverged: it continues with the weights of the others; non-finite optimizer states are 0"
    warnings.warn(text, CompressWarning, stacklevel=2)
