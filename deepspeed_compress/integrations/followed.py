"""Models without DeepSpeed that are attached to when they are trained, and what checkpoints of Hugging Face hold of it.

Who steps a model, and who scales its loss, is not told by the model: optimizers and scalers are remembered as they are
made. A model is attached to at its first forward pass in training, when all of them are there.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from deepspeed_compress.adapters import ddp
from deepspeed_compress.adapters.sessions import Attached, Config
from deepspeed_compress.errors import UnsupportedError

__all__ = ["Models"]

_FOLDER = "deepspeed_compress"
"""Below a checkpoint of Trainer or Accelerate: a folder for each model, in the order in which they were made."""


@dataclass(frozen=True)
class _Kind:
    """An engine: what its models are called, and who attaches to them."""

    name: str
    attach: Callable[[Any, Config, Optimizer, Any], Attached]
    call: str


def _attach_fsdp2(model: nn.Module, config: Config, optimizer: Optimizer, scaler: Any) -> Attached:
    # Loads internals of torch, which other programs need not have.
    from deepspeed_compress.adapters import fsdp2

    return fsdp2.attach(model, config, optimizer, scaler)


_OF_DDP = _Kind("a DistributedDataParallel model", ddp.attach, "deepspeed_compress.ddp.attach")
_OF_FSDP2 = _Kind("a model of fully_shard", _attach_fsdp2, "deepspeed_compress.fsdp2.attach")


@dataclass(frozen=True, eq=False)
class _Followed:
    """A model that will be attached to by its `hook`."""

    kind: _Kind
    model: "weakref.ref[nn.Module]"
    hook: RemovableHandle


class Models:
    """The models of one program, in the order in which they were made, and what is attached to them."""

    def __init__(self, config: Config) -> None:
        self.optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self.scalers: weakref.WeakSet[GradScaler] = weakref.WeakSet()
        self._config = config
        self._models: list[_Followed] = []
        self._attached: weakref.WeakKeyDictionary[nn.Module, Attached] = weakref.WeakKeyDictionary()
        self._to_load: Path | None = None

    def follow(self, model: nn.Module, kind: _Kind = _OF_DDP) -> None:
        """Attach to it when it is trained."""
        # Before hooks of the engine, which may gather its weights.
        hook = model.register_forward_pre_hook(partial(self._before_forward, kind), prepend=True)
        self._models.append(_Followed(kind, weakref.ref(model), hook))

    def follow_divided(self, modules: Sequence[nn.Module]) -> None:
        """The same for the outermost of the modules that are divided, which comes last: the model."""
        inside = {id(one) for module in modules for one in module.modules()}
        for followed in [one for one in self._models if one.kind is _OF_FSDP2 and id(one.model()) in inside]:
            followed.hook.remove()
            self._models.remove(followed)
        for module in modules:
            self.follow(module, _OF_FSDP2)

    def follow_accelerator(self, accelerator: Any) -> None:
        """Its checkpoints hold what is remembered."""
        accelerator.register_save_state_pre_hook(lambda models, weights, directory: self.save(Path(directory)))
        accelerator.register_load_state_pre_hook(lambda models, directory: self.load(Path(directory)))

    def save_for_trainer(self, trainer: Any, directory: Any) -> None:
        self.save(Path(directory))

    def load_for_trainer(self, trainer: Any, directory: Any) -> None:
        if directory is not None:
            self.load(Path(directory))

    def save(self, directory: Path) -> None:
        """What is remembered of all models. Collective, between steps."""
        for number, model in self._living():
            if model in self._attached:
                self._attached[model].save(_folder(directory, number))

    def load(self, directory: Path) -> None:
        """The same. Models that have not been trained yet load when they are, after their optimizers."""
        self._to_load = directory
        for number, model in self._living():
            if model in self._attached:
                self._attached[model].load(_folder(directory, number))

    def _living(self) -> list[tuple[int, nn.Module]]:
        found = [(number, followed.model()) for number, followed in enumerate(self._models)]
        return [(number, model) for number, model in found if model is not None]

    def _before_forward(self, kind: _Kind, model: nn.Module, inputs: object) -> None:
        if model in self._attached or not torch.is_grad_enabled():
            return
        if not any(parameter.requires_grad for parameter in model.parameters()):
            return
        known = set(model._forward_pre_hooks)
        attached = self._attached[model] = self._attach(kind, model)
        object.__setattr__(model, "compression", attached)
        for number, hook in list(model._forward_pre_hooks.items()):
            if number not in known:
                # This pass has begun, and does not call what is new.
                hook(model, inputs)
        if self._to_load is not None:
            number = next(number for number, other in self._living() if other is model)
            attached.load(_folder(self._to_load, number))

    def _attach(self, kind: _Kind, model: nn.Module) -> Attached:
        _divide_again(model)
        parameters = _identities(model)
        stepping = [one for one in self.optimizers if parameters & _stepped(one)]
        optimizer = _only(stepping, kind, "optimizers step its parameters", "one optimizer, with several groups")
        scaling = [one for one in self.scalers if one.is_enabled()]
        scaler = _only(scaling, kind, "scalers of a loss are there", "one GradScaler") if scaling else None
        if kind is _OF_FSDP2:
            self._check_whole(model, optimizer)
        return kind.attach(model, self._config, optimizer, scaler)

    def _check_whole(self, model: nn.Module, optimizer: Optimizer) -> None:
        """UnsupportedError where `model` is one part of several that are trained together."""
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


def _divide_again(model: nn.Module) -> None:
    """After an evaluation FSDP2 may have whole weights still, which are not those that the optimizer steps."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _identities(model: nn.Module) -> set[int]:
    return {id(parameter) for parameter in model.parameters()}


def _stepped(optimizer: Optimizer) -> set[int]:
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def _only(found: Iterable[Any], kind: _Kind, what: str, instead: str) -> Any:
    """The only one of `found`. Raises UnsupportedError where there are more, or none."""
    every = list(found)
    if len(every) != 1:
        raise UnsupportedError(
            f"{kind.name} cannot be compressed without being told more: {len(every)} {what} (allowed: 1). Use "
            f"{instead}, or call {kind.call} for each model"
        )
    return every[0]
