"""Access to the sharded parameters of an FSDP2 model. All private names of torch are listed here.

FSDP2 (torch/distributed/fsdp/_fully_shard) communicates one group of parameters at a time (`FSDPParamGroup`): those of
a module that `fully_shard` was called for, except for those of submodules that it was called for too.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from packaging.version import Version
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule
from torch.nn import Parameter

from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.session.patches import Patches

KNOWN = (Version("2.13"), Version("2.16.dev0"))
"""Supported versions of torch: from the first one, up to and excluding the second."""

_REDUCES_IN_OWN_DTYPE = Version(torch.__version__) >= Version("2.15.dev0")
_GROUP = (
    "fsdp_params",
    "mesh_info",
    "post_forward_mesh_info",
    "device",
    "pre_forward",
    "post_backward",
    "reduce_grads",
    "all_reduce_grads",
    "reduce_scatter_unused_params",
    "gradient_divide_factor",
    "_reduce_scatter_comm",
    "_all_gather_comm",
)
_PARAMETER = (
    "sharded_param",
    "mp_policy",
    "_orig_size",
    "_sharded_local_tensor",
    "is_dtensor",
    "fsdp_placement",
    "unsharded_accumulated_grad",
    "_sharded_param_data",
)


@dataclass(frozen=True)
class Ranks:
    """Process groups of FSDP2: `shard` shards parameters; ranks of `replicate` (None without HSDP) hold copies."""

    shard: ProcessGroup
    replicate: ProcessGroup | None

    @property
    def size(self) -> int:
        return self.shard.size() * (1 if self.replicate is None else self.replicate.size())


@dataclass(frozen=True, eq=False)
class Unit:
    """Parameters that FSDP2 communicates together.

    Attributes:
        module: module whose public methods set the custom collectives.
        theirs: the `FSDPParamGroup`.
        names: names of its parameters in the model, in its order.
    """

    module: FSDPModule
    theirs: Any
    names: tuple[str, ...]

    @cached_property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of the parameters before sharding."""
        return {name: tuple(one._orig_size) for name, one in self.parameters()}

    @property
    def alone(self) -> bool:
        """Return True if the module has no other parameter group, which would use other ranks."""
        return len(self.module._get_fsdp_state()._fsdp_param_groups) == 1

    def parameters(self) -> Iterator[tuple[str, Any]]:
        """Return (name, `FSDPParam`) pairs."""
        return zip(self.names, self.theirs.fsdp_params, strict=True)

    def trained(self) -> dict[str, Parameter]:
        """Return the trained parameters as the optimizer has them: this rank's shard of each."""
        return {name: one.sharded_param for name, one in self.parameters() if one.sharded_param.requires_grad}

    def reduce_dtypes(self, names: Collection[str]) -> set[torch.dtype]:
        """Return the dtypes of the gradients of the parameters `names` in a reduction."""
        return {_reduce_dtype(one) for name, one in self.parameters() if name in names}

    def gather_dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of the weights in a gather. Several dtypes are sent as bytes."""
        return {gather_dtype(one) for _, one in self.parameters()}

    def with_gradients(self) -> tuple[str, ...]:
        """Return the parameters whose gradients `FSDPParamGroup.post_backward` would reduce now."""
        unused = self.theirs.reduce_scatter_unused_params
        return tuple(name for name, one in self.parameters() if _has_gradient(one, unused))

    def ranks(self) -> Ranks:
        """Return the process groups of the unit.

        Raises:
            UnsupportedError: the parameters are not sharded by FSDP2.
        """
        info = self.theirs.mesh_info
        if info.shard_mesh_dim is None:
            raise UnsupportedError("torch's replicate() shards nothing: use DistributedDataParallel and ddp.attach")
        return Ranks(info.shard_process_group, getattr(info, "replicate_process_group", None))


def _reduce_dtype(parameter: Any) -> torch.dtype:
    """Return the dtype of a gradient in a reduction. From 2.15 on, torch reduces in the dtype of the parameter."""
    policy, own = parameter.mp_policy, parameter.sharded_param.dtype
    found: torch.dtype = policy.reduce_dtype or (own if _REDUCES_IN_OWN_DTYPE else policy.param_dtype or own)
    return found


def gather_dtype(parameter: Any) -> torch.dtype:
    """Return the dtype of a parameter (`FSDPParam`) in a gather."""
    own: torch.dtype = parameter.sharded_param.dtype
    return (parameter.mp_policy.param_dtype or own) if own.is_floating_point else own


def _has_gradient(parameter: Any, unused: bool) -> bool:
    # The unsharded parameter exists from the first gather on.
    whole = vars(parameter).get("_unsharded_param")
    if whole is None:
        return False
    accumulated: Any = parameter.unsharded_accumulated_grad
    return accumulated is not None or whole.grad is not None or (unused and whole.requires_grad)


def check_torch_of_fsdp2() -> None:
    """Check that the FSDP2 of this torch is supported.

    Raises:
        SeamError: it is not.
    """
    if not KNOWN[0] <= Version(torch.__version__) < KNOWN[1]:
        raise SeamError(
            f"PyTorch {torch.__version__} is installed, but fsdp2.attach reads internals that it knows in torch "
            f">={KNOWN[0]},<{KNOWN[1].base_version} only; install one of these"
        )


def find_units(model: nn.Module) -> list[Unit]:
    """Return all units of `model`, in its order.

    Raises:
        SeamError: torch's internals differ from those that are known.
    """
    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for module in sharded:
        # Only the shards are registered under the names of parameters.
        module.reshard()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[int, Unit] = {}
    for module in sharded:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            _check(group)
            own = tuple(names[id(fsdp_parameter.sharded_param)] for fsdp_parameter in group.fsdp_params)
            found.setdefault(id(group), Unit(module, group, own))
    return list(found.values())


def _check(group: Any) -> None:
    owners = ((group, _GROUP), (group.fsdp_params[0], _PARAMETER))
    missing = [
        f"{type(owner).__name__}.{name}" for owner, needed in owners for name in needed if not hasattr(owner, name)
    ]
    if missing:
        raise SeamError(f"FSDP2 of PyTorch {torch.__version__} has no {', '.join(missing)}")


def reduce_by_shards_alone(unit: Unit, patches: Patches) -> None:
    """Disable FSDP2's all-reduce between copies of the model, which the custom reduce-scatter performs instead.

    There is no public way to replace torch's all-reduce: `set_all_reduce_hook` runs after it. The placement of shards
    and their gather do not change.
    """
    from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

    theirs, before = unit.theirs, unit.theirs.mesh_info
    patches.replace(theirs, "mesh_info", FSDPMeshInfo(mesh=before.mesh, shard_mesh_dim=before.shard_mesh_dim))
    # If both are the same object, a forward pass reshards parameters to the same mesh.
    if theirs.post_forward_mesh_info is before:
        patches.replace(theirs, "post_forward_mesh_info", theirs.mesh_info)
