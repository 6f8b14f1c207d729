"""The model with two branches under FSDP2."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import deepspeed_compress
from tests.support.two_branches import Branches, section, start

WEIGHTS = {"gradients": {"method": "none"}, "weights": {"bits": 4, "block_size": 32}}


def as_given(model: Branches) -> None:
    """Leave the model as it is."""


@dataclass(frozen=True)
class Setting:
    """A model under FSDP2.

    Attributes:
        section: the section; None to leave the model uncompressed.
        mesh: sizes of the mesh's dimensions; empty for one dimension of all ranks.
        prepare: changes the model before it is sharded.
        units: names of modules that are sharded separately; those in one string are sharded together.
        options: arguments of `fully_shard`.
        lr: learning rate of SGD.
        momentum: momentum of SGD.
    """

    section: Mapping[str, Any] | None = None
    mesh: tuple[int, ...] = ()
    prepare: Callable[[Branches], None] = as_given
    units: tuple[str, ...] = ("left", "right")
    options: Mapping[str, Any] = field(default_factory=dict)
    lr: float = 0.05
    momentum: float = 0.0

    def build(self, scaler: Any = None, mesh: DeviceMesh | None = None) -> tuple[Any, Any, Any]:
        start()
        sizes = self.mesh or (dist.get_world_size(),)
        mesh = mesh or init_device_mesh("cpu", sizes, mesh_dim_names=("copies", "parts")[-len(sizes) :])
        model = Branches()
        self.prepare(model)
        for unit in self.units:
            modules = [getattr(model, name) for name in unit.split()]
            fully_shard(modules if len(modules) > 1 else modules[0], mesh=mesh, **self.options)
        fully_shard(model, mesh=mesh, **self.options)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.lr, momentum=self.momentum)
        attached = None
        if self.section is not None:
            attached = deepspeed_compress.fsdp2.attach(model, section(self.section), optimizer, scaler)
        return model, optimizer, attached
