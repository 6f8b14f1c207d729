"""Models trained without DeepSpeed: attaching to them, and saving their state in Hugging Face checkpoints.

A model does not know which optimizer steps it or which scaler scales its loss, so optimizers and scalers are recorded
when they are made. Compression attaches to a model at its first forward pass in training, when all of them exist.
"""

import gc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import leave_out_of_copies

if TYPE_CHECKING:
    from deepspeed_compress.backends.sessions import Attached, Config

_FOLDER = "deepspeed_compress"
"""Folder below a checkpoint of Trainer or Accelerate, with one folder for each model of that checkpoint."""


@dataclass(frozen=True)
class _Kind:
    """Data-parallel wrapper: the description of its models, and the backend that attaches to them."""

    name: str
    backend: str


_DDP = _Kind("a DistributedDataParallel model", "ddp")
_FSDP2 = _Kind("a fully_shard model", "fsdp2")


@dataclass(frozen=True, eq=False)
class _Followed:
    """Model, with the hook that will attach to it."""

    kind: _Kind
    model: "weakref.ref[nn.Module]"
    hook: RemovableHandle


@dataclass(frozen=True)
class FirstForward:
    """Forward pre-hook that attaches to its model."""

    models: "Models"
    kind: _Kind

    def __call__(self, model: nn.Module, inputs: object) -> None:
        self.models.before_forward(self.kind, model, inputs)


class Models:
    """Models of one program, and the compression that is attached to them."""

    def __init__(self, config: "Config") -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._config = config
        self._models: list[_Followed] = []
        self._attached: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
        self._to_load: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()
        """Folder from which each model will load its state once compression attaches to it."""

    def follow(self, model: nn.Module, kind: _Kind = _DDP) -> None:
        """Attach to `model` when it is trained."""
        # Before the wrapper's own hooks, which may gather the weights.
        hook = model.register_forward_pre_hook(FirstForward(self, kind), prepend=True)
        self._models.append(_Followed(kind, weakref.ref(model), hook))
        if kind is _DDP:
            # Copies, such as averages of weights, are left alone. FSDP2 modules cannot be copied.
            leave_out_of_copies(model)

    def follow_sharded(self, modules: Sequence[nn.Module]) -> None:
        """Attach to `modules`, which `fully_shard` has just sharded, in place of the modules inside them.

        `fully_shard` is called for the whole model last, so in the end only the model itself is followed.
        """
        inside = {id(one) for module in modules for one in module.modules()}
        for followed in [one for one in self._models if one.kind is _FSDP2 and id(one.model()) in inside]:
            followed.hook.remove()
            self._models.remove(followed)
        for module in modules:
            self.follow(module, _FSDP2)

    def follow_accelerator(self, accelerator: Any) -> None:
        """Include the residuals and momenta of the models of `accelerator` in its checkpoints."""
        accelerator.register_save_state_pre_hook(
            lambda models, weights, directory: self.save(accelerator._models, Path(directory))
        )
        accelerator.register_load_state_pre_hook(
            lambda models, directory: self.load(accelerator._models, Path(directory))
        )

    def save_for_trainer(self, trainer: Any, directory: Any) -> None:
        self.save([trainer.model_wrapped], Path(directory))

    def load_for_trainer(self, trainer: Any, directory: Any) -> None:
        if directory is not None:
            self.load([trainer.model_wrapped], Path(directory))

    def save(self, models: Sequence[nn.Module], directory: Path) -> None:
        """Save the residuals and momenta of `models`. Collective; call it between steps."""
        for number, model in enumerate(self._followed(models)):
            if model in self._attached:
                self._attached[model].save(_folder(directory, number))

    def load(self, models: Sequence[nn.Module], directory: Path) -> None:
        """Load the residuals and momenta of `models`.

        Models that have not been trained yet load them at their first training pass, after their optimizers.
        """
        for number, model in enumerate(self._followed(models)):
            if model in self._attached:
                self._attached[model].load(_folder(directory, number))
            else:
                self._to_load[model] = _folder(directory, number)

    def _followed(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the followed model for each of `models`, which may be the model itself or the module inside it.

        Accelerate lists the models that a program has passed to it. If several wrap the same module, the newest counts.
        """
        living = [model for followed in reversed(self._models) if (model := followed.model()) is not None]
        found = (next((one for one in living if _module_ids(model) & _module_ids(one)), None) for model in models)
        return [one for one in found if one is not None]

    def before_forward(self, kind: _Kind, model: nn.Module, inputs: object) -> None:
        """Attach to `model` if this forward pass is its first one in training."""
        if model in self._attached or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        known = set(model._forward_pre_hooks)
        attached = self._attached[model] = self._attach(kind, model)
        object.__setattr__(model, "compression", attached)
        for number, hook in list(model._forward_pre_hooks.items()):
            if number not in known:
                # This forward pass has already begun, so it does not call new hooks.
                hook(model, inputs)
        if model in self._to_load:
            attached.load(self._to_load.pop(model))

    def _optimizers_of(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers that step parameters of `model`, except those inside a wrapping optimizer."""
        parameters = _parameter_ids(model)
        found = [optimizer for optimizer in self.optimizers if parameters & _stepped_ids(optimizer)]
        wrapped = {id(vars(one).get(name)) for one in found for name in ("optim", "optimizer")}
        return [one for one in found if id(one) not in wrapped]

    def _attach(self, kind: _Kind, model: nn.Module) -> "Attached":
        if kind is _FSDP2:
            _reshard(model)
        if len(self._optimizers_of(model)) > 1 or len(self._enabled_scalers()) > 1:
            # Optimizers of an earlier training, such as the previous fold, may not have been garbage-collected yet.
            gc.collect()
        optimizer = _single(
            self._optimizers_of(model), kind, "optimizers step its parameters", "one optimizer with parameter groups"
        )
        scalers = self._enabled_scalers()
        scaler = _single(scalers, kind, "gradient scalers exist", "one GradScaler") if scalers else None
        if kind is _FSDP2:
            self._check_single_root(model, optimizer)
        # Backends are imported late: they import much of torch, and a program may have to set its environment first.
        backend = import_module(f"deepspeed_compress.backends.{kind.backend}")
        attached: Attached = backend.attach(model, self._config, optimizer, scaler)
        return attached

    def _enabled_scalers(self) -> list[GradScaler]:
        return [scaler for scaler in self.scalers if scaler.is_enabled()]

    def _check_single_root(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise UnsupportedError if `optimizer` steps other sharded modules besides `model`."""
        stepped = _stepped_ids(optimizer)
        sharded = [one.model() for one in self._models if one.kind is _FSDP2]
        roots = [one for one in sharded if one is not None and _parameter_ids(one) & stepped]
        if len(roots) > 1:
            raise UnsupportedError(
                f"one optimizer steps {len(roots)} separate fully_shard modules, and no sharded module contains them "
                "all (allowed: 1). Call fully_shard for the whole model last, or deepspeed_compress.fsdp2.attach"
            )


def _folder(directory: Path, number: int) -> Path:
    return directory / _FOLDER / f"model_{number}"


def _module_ids(model: nn.Module) -> set[int]:
    """Return the ids of `model` and of the modules that it wraps."""
    found = {id(model)}
    for name in ("_orig_mod", "module", "_orig_mod"):
        # Attributes of torch.compile, of DistributedDataParallel, and of torch.compile inside DistributedDataParallel.
        model = getattr(model, name, model)
        found.add(id(model))
    return found


def _reshard(model: nn.Module) -> None:
    """Reshard the weights, which FSDP2 may have left gathered after an evaluation: the optimizer steps the shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _parameter_ids(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters()}


def _stepped_ids(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _single(found: Sequence[Any], kind: _Kind, what: str, instead: str) -> Any:
    """Return the only element of `found`. Raises UnsupportedError if there are several, or none."""
    if len(found) != 1:
        raise UnsupportedError(
            f"{kind.name} cannot be compressed automatically: {len(found)} {what} (allowed: 1). Use {instead}, or call "
            f"deepspeed_compress.{kind.backend}.attach for each model"
        )
    return found[0]
