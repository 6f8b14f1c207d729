"""State that islands have in common: the parameters and second moments that they exchange, and what must be equal.

Islands exchange all parameters except those that each of them keeps to itself.
"""

import hashlib
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from torch import Tensor
from torch.nn import Parameter

from deepspeed_compress.backends.deepspeed.weights.copies import bytes_of, held_data, named_untrained
from deepspeed_compress.backends.deepspeed.weights.master_weights import (
    FlatMasterWeights,
    MasterSlice,
    find_master_weights,
)
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.replicated import SharedLayers, check_tied, divide_replicated
from deepspeed_compress.local_sgd.moments import SecondMoment, SecondMoments

_OWN = "/deepspeed_compress/islands/own"


@dataclass(frozen=True)
class ExchangedParameters:
    """Parameters that this rank exchanges with other islands.

    Attributes:
        master_weights: its share of the master weights. Ranks that share layers have different shares.
        parameters: the exchanged parameters, in fp32, with none excluded from compression.
        moments: second moments; None if they are not exchanged.
        untrained: parameters that islands neither train nor keep to themselves, so they are never exchanged.
    """

    master_weights: FlatMasterWeights
    parameters: Parameters
    moments: SecondMoments | None
    untrained: list[Parameter]


def find_exchanged(engine: Any, settings: Islands, parameters: Parameters, layers: SharedLayers) -> ExchangedParameters:
    """Return what this rank of `engine` exchanges. Collective in the island, whose ranks are those of `layers`.

    Raises:
        ConfigError: nothing is left to exchange.
        UnsupportedError: second moments or tied weights cannot be exchanged.
    """
    trained = find_master_weights(engine)
    master_weights, shared = _without_own(settings.own, trained, parameters)
    moments = find_second_moments(engine, settings, master_weights)
    if layers.hold_copies:
        if moments is not None:
            # Their blocks may differ between copies.
            raise UnsupportedError(
                f"{_MOMENTS}: cannot be exchanged with tensor parallelism or pipelines (allowed with them: null); "
                'write "second_moments": null'
            )
        check_tied(layers)
        master_weights = divide_replicated(master_weights, parameters, layers)
    names = {*chain(*gather_objects([one.parameter for one in trained.slices], layers.whole))}
    untrained = [one for name, one in named_untrained(engine, names) if not _matches(settings.own, name)]
    return ExchangedParameters(master_weights, shared, moments, untrained)


def _without_own(
    own: Sequence[str], master_weights: FlatMasterWeights, parameters: Parameters
) -> tuple[FlatMasterWeights, Parameters]:
    """Return `master_weights` and `parameters` without the parameters that each island keeps to itself.

    Warns (CompressWarning) of each pattern that matches no parameter.

    Args:
        own: regular expressions, searched for in the names of parameters. Matching parameters are not exchanged.
        master_weights: the master weights of this rank.
        parameters: the parameters of the engine.

    Returns:
        The remaining master weights, and the remaining parameters for exchanges, in fp32, with none excluded from
        compression.

    Raises:
        ConfigError: nothing is left to exchange.
    """
    _check(own, parameters.everywhere)
    left = {name: shape for name, shape in parameters.shapes.items() if not _matches(own, parameters.user_name(name))}
    everywhere = [name for name in parameters.everywhere if not _matches(own, name)]
    kept, stepped = (
        [one for one in some if one.parameter in left] for some in (master_weights.slices, master_weights.stepped)
    )
    return (
        replace(master_weights, slices=kept, stepped=stepped),
        replace(parameters, shapes=left, everywhere=everywhere, excluded=frozenset(), dtype=torch.float32),
    )


def _matches(patterns: Sequence[str], name: str) -> bool:
    """Return True if one of the `patterns` of `own` is found in `name`."""
    return any(re.search(pattern, name) for pattern in patterns)


def _check(own: Sequence[str], names: Sequence[str]) -> None:
    if names and all(_matches(own, name) for name in names):
        raise ConfigError(
            f"{_OWN}: {list(own)} names all {len(names)} parameters, so nothing is exchanged (allowed: some of "
            f"them, for example {names[0]!r}); name fewer, or remove islands"
        )
    for index, pattern in enumerate(own):
        if not any(re.search(pattern, name) for name in names):
            text = (
                f"{_OWN}/{index}: {pattern!r} matches none of the {len(names)} parameters (for example "
                f"{next(iter(names), '')!r}), so it has no effect; write one that is found in a name, or remove it"
            )
            warnings.warn(text, CompressWarning, stacklevel=2)


_MOMENTS = "/deepspeed_compress/islands/second_moments"
_KEY = "exp_avg_sq"
"""Key in the state of torch.optim.Adam, DeepSpeed's FusedAdam and CPUAdam, and optimizers modeled on them."""


def find_second_moments(engine: Any, settings: Islands, master_weights: FlatMasterWeights) -> SecondMoments | None:
    """Return the second moments of everything that this rank steps; None if islands do not exchange them.

    Raises:
        UnsupportedError: the optimizer is not of the Adam family, or keeps some of its moments elsewhere.
    """
    if settings.second_moments is None:
        return None
    offload = engine.zero_offload_optimizer()
    if offload is not None and offload.ratio < 1:
        raise UnsupportedError(
            f'{_MOMENTS}: "offload_optimizer" with "ratio": {offload.ratio} keeps some of them elsewhere (allowed '
            'with it: 1.0); write that, or "second_moments": null'
        )
    optimizer, stepped = engine.basic_optimizer, master_weights.stepped
    group = _group_of_adam(optimizer)
    if any(group.get("use_muon") for group in optimizer.param_groups):
        # What DeepSpeed's Muon steps has momentum only.
        muon = {name for parameter, name in engine.param_names.items() if getattr(parameter, "use_muon", False)}
        stepped = [one for one in stepped if one.parameter not in muon]
    find = partial(_second_moments, optimizer, group, stepped)
    return SecondMoments(find, settings.second_moments.block_size, master_weights.device)


def _group_of_adam(optimizer: Any) -> Mapping[str, Any]:
    """Return one parameter group with second moments, which stands for all of them.

    Raises:
        UnsupportedError: the groups have unequal betas, or none, or use amsgrad.
    """
    groups: list[Mapping[str, Any]] = [group for group in optimizer.param_groups if not group.get("use_muon")]
    betas = {group.get("betas") and tuple(group["betas"]) for group in groups}
    amsgrad = any(group.get("amsgrad") for group in groups)
    if None in betas or len(betas) != 1 or amsgrad:
        raise UnsupportedError(
            f"{_MOMENTS}: {type(optimizer).__name__} has betas {sorted(map(str, betas))} and amsgrad {amsgrad} "
            "(allowed: the family of Adam, with equal betas for all parameters and without amsgrad); write "
            '"second_moments": null, or such an optimizer'
        )
    return groups[0]


def _second_moments(optimizer: Any, group: Mapping[str, Any], stepped: Sequence[MasterSlice]) -> list[SecondMoment]:
    """Return the second moment of every run in `stepped`, which `optimizer` steps with the hyperparameters of `group`.

    Raises:
        UnsupportedError: the optimizer has none, or keeps them elsewhere.
    """
    states = [optimizer.state.get(one.home, {}) for one in stepped]
    steps = [float(state.get("step", 0)) for state in states]
    # DeepSpeed's FusedAdam counts steps only in the state of the last parameter: `step` in ops/adam/fused_adam.py.
    if isinstance(getattr(optimizer, "aux_optimizer", None) or optimizer, FusedAdam):
        steps = [max(steps, default=0.0)] * len(steps)
    return [_second_moment(optimizer, group, *one) for one in zip(stepped, states, steps, strict=True)]


def _second_moment(
    optimizer: Any, group: Mapping[str, Any], one: MasterSlice, state: Mapping[str, Any], steps: float
) -> SecondMoment:
    if not state:
        # Not stepped yet.
        return SecondMoment(torch.zeros(one.numel, device=one.home.device), 0.0)
    moments = state.get(_KEY)
    if not isinstance(moments, Tensor) or moments.numel() != one.home.numel():
        raise UnsupportedError(
            f"{_MOMENTS}: the state of {type(optimizer).__name__} has {sorted(state)}, and no {_KEY} of every weight "
            'in memory (allowed: the family of Adam, not on NVMe); write "second_moments": null'
        )
    # Adam's bias correction is 1 - beta2^steps (arXiv:1412.6980, algorithm 1); there may be none, or no count.
    corrects = steps and group.get("bias_correction", True)
    correction = 1.0 - float(group["betas"][1]) ** steps if corrects else 1.0
    return SecondMoment(one.within(moments), correction)


def digest_parameters(fixed: Sequence[Parameter]) -> str:
    """Return a digest of this rank's part of the parameters `fixed`: exact to the bit, and the same on every device."""
    digest = hashlib.sha256()
    for parameter in fixed:
        held = held_data(parameter)
        digest.update(f"{held.dtype} {held.numel()} ".encode())
        digest.update(bytes_of(held.cpu().contiguous()).numpy().tobytes())
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
