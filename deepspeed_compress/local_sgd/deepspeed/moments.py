"""Access to Adam's second moments in DeepSpeed's optimizers, under each ZeRO stage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.ops.adam import FusedAdam
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights, MasterSlice
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.local_sgd.moments import SecondMoment, SecondMoments

_POINTER = "/deepspeed_compress/islands/second_moments"
_KEY = "exp_avg_sq"
"""Key in the state of torch.optim.Adam, DeepSpeed's FusedAdam and CPUAdam, and optimizers modeled on them."""


def find_second_moments(
    engine: Any, settings: Islands, master_weights: FlatMasterWeights, island: ProcessGroup | None
) -> SecondMoments | None:
    """Return the second moments of everything that this rank steps; None if islands do not exchange them.

    Collective in `island`, some of whose pipeline stages may step nothing with Adam.

    Raises:
        UnsupportedError: the optimizer is not of the Adam family, or keeps some of its moments elsewhere. If its
            parameter groups are the reason, all ranks of the island raise it.
    """
    if settings.second_moments is None:
        return None
    offload = engine.zero_offload_optimizer()
    if offload is not None and offload.ratio < 1:
        raise UnsupportedError(
            f'{_POINTER}: "offload_optimizer" with "ratio": {offload.ratio} keeps some of them elsewhere (allowed '
            'with it: 1.0); write that, or "second_moments": null'
        )
    optimizer = engine.basic_optimizer
    group = _group_of_adam(optimizer, island)
    found = _OptimizerStates(optimizer, group, _stepped_by_adam(engine, master_weights))
    return SecondMoments(found.moments, settings.second_moments.block_size, master_weights.device)


def _group_of_adam(optimizer: Any, island: ProcessGroup | None) -> Mapping[str, Any]:
    """Return one parameter group with second moments, which stands for all of them; an empty one if there is none.

    Collective in `island`.

    Raises:
        UnsupportedError: on all ranks, the groups of the island have unequal betas, or none, or use amsgrad.
    """
    groups = [group for group in optimizer.param_groups if not group.get("use_muon")]
    own = [(group.get("betas") and tuple(group["betas"]), bool(group.get("amsgrad"))) for group in groups]
    every = {one for rank in gather_objects(own, island) for one in rank}
    betas, amsgrad = {one for one, _ in every}, any(used for _, used in every)
    if None in betas or len(betas) != 1 or amsgrad:
        raise UnsupportedError(
            f"{_POINTER}: {type(optimizer).__name__} has betas {sorted(map(str, betas))} and amsgrad {amsgrad} "
            "(allowed: the family of Adam, with equal betas for all parameters and without amsgrad); write "
            '"second_moments": null, or such an optimizer'
        )
    return groups[0] if groups else {}


def _stepped_by_adam(engine: Any, master_weights: FlatMasterWeights) -> Sequence[MasterSlice]:
    """Return everything that this rank steps except what DeepSpeed's Muon steps, which has momentum only."""
    if not any(group.get("use_muon") for group in engine.basic_optimizer.param_groups):
        return master_weights.stepped
    muon = {name for parameter, name in engine.param_names.items() if getattr(parameter, "use_muon", False)}
    return [one for one in master_weights.stepped if one.parameter not in muon]


@dataclass(frozen=True)
class _OptimizerStates:
    """Second moments of the runs `stepped`, which `optimizer` steps with the hyperparameters of `group`."""

    optimizer: Any
    group: Mapping[str, Any]
    stepped: Sequence[MasterSlice]

    def moments(self) -> list[SecondMoment]:
        """Return the second moment of every run.

        Raises:
            UnsupportedError: the optimizer has none, or keeps them elsewhere.
        """
        states = [self.optimizer.state.get(one.home, {}) for one in self.stepped]
        steps = [float(state.get("step", 0)) for state in states]
        if _counts_once(self.optimizer):
            steps = [max(steps, default=0.0)] * len(steps)
        return [self._moment(*one) for one in zip(self.stepped, states, steps, strict=True)]

    def _moment(self, one: MasterSlice, state: Mapping[str, Any], steps: float) -> SecondMoment:
        if not state:
            # Not stepped yet.
            return SecondMoment(torch.zeros(one.numel, device=one.home.device), 0.0)
        moments = state.get(_KEY)
        if not isinstance(moments, Tensor) or moments.numel() != one.home.numel():
            raise UnsupportedError(
                f"{_POINTER}: the state of {type(self.optimizer).__name__} has {sorted(state)}, and no {_KEY} of every "
                'weight in memory (allowed: the family of Adam, not on NVMe); write "second_moments": null'
            )
        return SecondMoment(one.within(moments), self._correction(steps))

    def _correction(self, steps: float) -> float:
        """Return Adam's bias correction 1 - beta2^steps (arXiv:1412.6980, algorithm 1).

        It is 1.0 if the optimizer does not correct the bias, or counts no steps.
        """
        corrects = steps and self.group.get("bias_correction", True)
        return 1.0 - float(self.group["betas"][1]) ** steps if corrects else 1.0


def _counts_once(optimizer: Any) -> bool:
    """Return True for DeepSpeed's FusedAdam, which counts steps only in the state of the last parameter.

    See `step` in ops/adam/fused_adam.py.
    """
    return isinstance(getattr(optimizer, "aux_optimizer", None) or optimizer, FusedAdam)
