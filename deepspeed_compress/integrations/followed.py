"""Models without DeepSpeed that are attached to when they are trained, and their state in Hugging Face checkpoints.

A model does not know which optimizer steps it and which scaler scales its loss, so optimizers and scalers are recorded
when they are made. A model is attached to at its first forward pass in training, when all of them exist.
"""

import gc
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.copies import leave_out_of_copies

if TYPE_CHECKING:
    from deepspeed_compress.backends.sessions import Attached, Config

__all__ = ["FirstForward", "Models"]

_FOLDER = "deepspeed_compress"
"""Folder below a checkpoint of Trainer or Accelerate, with one folder for each model of that checkpoint."""


@dataclass(frozen=True)
class _Kind:
    """Engine: the name of its models, and the function that attaches to them."""

    name: str
    attach: "Callable[[Any, Config, Optimizer, Any], Attached]"
    call: str


# Backends import much of torch, which must not happen before a program has set its environment.


def _attach_ddp(model: Any, config: "Config", optimizer: Optimizer, scaler: Any) -> "Attached":
    from deepspeed_compress.backends import ddp

    return ddp.attach(model, config, optimizer, scaler)


def _attach_fsdp2(model: Any, config: "Config", optimizer: Optimizer, scaler: Any) -> "Attached":
    from deepspeed_compress.backends import fsdp2

    return fsdp2.attach(model, config, optimizer, scaler)


_OF_DDP = _Kind("a DistributedDataParallel model", _attach_ddp, "deepspeed_compress.ddp.attach")
_OF_FSDP2 = _Kind("a model of fully_shard", _attach_fsdp2, "deepspeed_compress.fsdp2.attach")


@dataclass(frozen=True, eq=False)
class _Followed:
    """Model that its `hook` will attach to."""

    kind: _Kind
    model: "weakref.ref[nn.Module]"
    hook: RemovableHandle


@dataclass(frozen=True)
class FirstForward:
    """Forward pre-hook that attaches to its model.

    With `copied`, the model is a copy, such as one of averages. It need not be trained, and is left alone until an
    optimizer steps it.
    """

    models: "Models"
    kind: _Kind
    copied: bool

    def __call__(self, model: nn.Module, inputs: object) -> None:
        self.models.before_forward(self.kind, self.copied, model, inputs)


class Models:
    """Models of one program, and the compression that is attached to them."""

    def __init__(self, config: "Config") -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._config = config
        self._models: list[_Followed] = []
        self._attached: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
        self._to_load: weakref.WeakKeyDictionary[nn.Module, Path] = weakref.WeakKeyDictionary()
        """Folders from which models load their state once they are attached to."""

    def follow(self, model: nn.Module, kind: _Kind = _OF_DDP, copied: bool = False) -> None:
        """Attach to `model` when it is trained."""
        # Before hooks of the engine, which may gather its weights.
        hook = model.register_forward_pre_hook(FirstForward(self, kind, copied), prepend=True)
        self._models.append(_Followed(kind, weakref.ref(model), hook))
        if kind is _OF_DDP:
            # Modules of fully_shard cannot be copied.
            leave_out_of_copies(model)

    def follow_copy(self, model: nn.Module) -> None:
        """Attach to `model`, a copy of another one, when it is trained."""
        self.follow(model, copied=True)

    def follow_divided(self, modules: Sequence[nn.Module]) -> None:
        """Attach to the outermost of the modules that `fully_shard` divides, which comes last: the model."""
        inside = {id(one) for module in modules for one in module.modules()}
        for followed in [one for one in self._models if one.kind is _OF_FSDP2 and id(one.model()) in inside]:
            followed.hook.remove()
            self._models.remove(followed)
        for module in modules:
            self.follow(module, _OF_FSDP2)

    def follow_accelerator(self, accelerator: Any) -> None:
        """Include residuals and momenta of its models in the checkpoints of `accelerator`."""
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
        """Write the residuals and momenta of `models`. Collective, between steps."""
        for number, model in enumerate(self._followed(models)):
            if model in self._attached:
                self._attached[model].save(_folder(directory, number))

    def load(self, models: Sequence[nn.Module], directory: Path) -> None:
        """Load the residuals and momenta of `models`.

        Models that have not been trained yet load them when they are, after their optimizers.
        """
        found = self._followed(models)
        for model, folder in zip(found, _saved(directory, len(found)), strict=True):
            if model in self._attached:
                self._attached[model].load(folder)
            else:
                self._to_load[model] = folder

    def _followed(self, models: Sequence[nn.Module]) -> list[nn.Module]:
        """Return the followed models that `models` are, or are wrapped in.

        Accelerate lists the models that a program has passed to it. If there are several around one module, the newest
        is returned.
        """
        living = [model for followed in reversed(self._models) if (model := followed.model()) is not None]
        found = (next((one for one in living if _inside(model) & _inside(one)), None) for model in models)
        return [one for one in found if one is not None]

    def before_forward(self, kind: _Kind, copied: bool, model: nn.Module, inputs: object) -> None:
        """Attach to `model` if this forward pass is its first one in training."""
        if model in self._attached or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        if copied and not self._stepping(model):
            return
        known = set(model._forward_pre_hooks)
        attached = self._attached[model] = self._attach(kind, model)
        object.__setattr__(model, "compression", attached)
        for number, hook in list(model._forward_pre_hooks.items()):
            if number not in known:
                # This pass has begun, and does not call new hooks.
                hook(model, inputs)
        if model in self._to_load:
            attached.load(self._to_load.pop(model))

    def _stepping(self, model: nn.Module) -> list[Optimizer]:
        """Return the optimizers that step parameters of `model`, without those that another of them calls."""
        parameters = _identities(model)
        found = [one for one in self.optimizers if parameters & _stepped(one)]
        called = {id(vars(one).get(name)) for one in found for name in ("optim", "optimizer")}
        return [one for one in found if id(one) not in called]

    def _attach(self, kind: _Kind, model: nn.Module) -> "Attached":
        if kind is _OF_FSDP2:
            _divide_again(model)
        if len(self._stepping(model)) > 1 or len(self._scaling()) > 1:
            # Optimizers of a finished training, such as the previous fold, may not have been collected yet.
            gc.collect()
        optimizer = _only(
            self._stepping(model), kind, "optimizers step its parameters", "one optimizer, with several groups"
        )
        scaling = self._scaling()
        scaler = _only(scaling, kind, "scalers of a loss are there", "one GradScaler") if scaling else None
        if kind is _OF_FSDP2:
            self._check_whole(model, optimizer)
        return kind.attach(model, self._config, optimizer, scaler)

    def _scaling(self) -> list[GradScaler]:
        return [one for one in self.scalers if one.is_enabled()]

    def _check_whole(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raise UnsupportedError if `model` is one of several parts that are trained together."""
        stepped = _stepped(optimizer)
        divided = [one.model() for one in self._models if one.kind is _OF_FSDP2]
        parts = [one for one in divided if one is not None and _identities(one) & stepped]
        if len(parts) > 1:
            raise UnsupportedError(
                f"one optimizer steps {len(parts)} modules of fully_shard, and no module that holds them is divided "
                f"(allowed: 1). Call fully_shard for the whole model last, or {_OF_FSDP2.call} with it"
            )


def _folder(directory: Path, number: int) -> Path:
    return directory / _FOLDER / f"model_{number}"


def _inside(model: nn.Module) -> set[int]:
    """Return the identities of `model`, and of the modules that it only wraps."""
    found = {id(model)}
    for name in ("_orig_mod", "module", "_orig_mod"):
        # Attributes of torch.compile, of DistributedDataParallel, and of torch.compile inside that.
        model = getattr(model, name, model)
        found.add(id(model))
    return found


def _saved(directory: Path, count: int) -> list[Path]:
    """Return the folders of `count` models.

    In the first version of this package, a program that had made other models before wrote a number above 0 for its
    only one.
    """
    found = list((directory / _FOLDER).glob("model_*"))
    return found if len(found) == count == 1 else [_folder(directory, number) for number in range(count)]


def _divide_again(model: nn.Module) -> None:
    """Reshard the weights of FSDP2, which may be whole after an evaluation: the optimizer steps the shards."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _identities(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters()}


def _stepped(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _only(found: Iterable[Any], kind: _Kind, what: str, instead: str) -> Any:
    """Return the only element of `found`. Raises UnsupportedError if there are several, or none."""
    every = list(found)
    if len(every) != 1:
        raise UnsupportedError(
            f"{kind.name} cannot be compressed without being told more: {len(every)} {what} (allowed: 1). Use "
            f"{instead}, or call {kind.call} for each model"
        )
    return every[0]
