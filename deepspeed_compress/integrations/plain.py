"""Programs without DeepSpeed: every model of `DistributedDataParallel` or `fully_shard` is attached to, as if the
program called `ddp.attach` or `fsdp2.attach`.

What is made is followed from here; what becomes of it is in `followed`.
"""

import weakref
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from typing import Any

from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deepspeed_compress.adapters.sessions import Config
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.followed import Models
from deepspeed_compress.integrations.replacing import is_replaced, replace_method

__all__ = ["attach_to_all"]


def attach_to_all(config: Config) -> Callable[[], None]:
    """From now on every model of `DistributedDataParallel` or `fully_shard` is compressed by the section in `config`.

    Checkpoints of Trainer and of `Accelerator.save_state` hold what is remembered; other programs call `save` and
    `load` of `model.compression`, which is there from the first forward pass in training on.

    Returns:
        A function that undoes it, for models to come.

    Raises:
        ConfigError: it is done already, with a section of its own.
    """
    if is_replaced(DistributedDataParallel, "__init__"):
        raise ConfigError("install has a section already (allowed: one); undo the first install, or pass none")
    models = Models(config)
    undo = [
        replace_method(Optimizer, "__init__", partial(_remembering, models.optimizers)),
        replace_method(GradScaler, "__init__", partial(_remembering, models.scalers)),
        replace_method(DistributedDataParallel, "__init__", partial(_following, models.follow)),
        # A program may have imported `fully_shard` by name, so that what it calls is replaced.
        replace_method(FSDPState, "init", partial(_dividing, models.follow_divided)),
    ]
    if find_spec("accelerate") is not None:
        undo += _follow_accelerate(models)
    if find_spec("transformers") is not None:
        undo += _follow_trainer(models)

    def uninstall() -> None:
        for action in undo:
            action()

    return uninstall


def _follow_accelerate(models: Models) -> list[Callable[[], None]]:
    from accelerate import Accelerator

    return [replace_method(Accelerator, "__init__", partial(_following, models.follow_accelerator))]


def _follow_trainer(models: Models) -> list[Callable[[], None]]:
    from transformers import Trainer

    return [
        replace_method(Trainer, "_save_optimizer_and_scheduler", partial(_before, models.save_for_trainer)),
        replace_method(Trainer, "_load_optimizer_and_scheduler", partial(_before, models.load_for_trainer)),
    ]


def _remembering(found: "weakref.WeakSet[Any]", original: Callable[..., None]) -> Callable[..., None]:
    return _following(found.add, original)


def _following(follow: Callable[[Any], object], original: Callable[..., None]) -> Callable[..., None]:
    """A constructor, after which `follow` gets the object."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807  (put into a class)
        original(self, *args, **options)
        follow(self)

    return __init__


def _dividing(follow: Callable[[Sequence[nn.Module]], object], original: Callable[..., None]) -> Callable[..., None]:
    """What `fully_shard` calls once for its modules, after which `follow` gets them."""

    def init(self: Any, modules: Sequence[nn.Module], *args: Any, **options: Any) -> None:
        original(self, modules, *args, **options)
        follow(modules)

    return init


def _before(action: Callable[[Any, Any], object], original: Callable[..., Any]) -> Callable[..., Any]:
    """A method with one argument, before which `action` gets the object and that."""

    def method(self: Any, argument: Any, *args: Any, **options: Any) -> Any:
        action(self, argument)
        return original(self, argument, *args, **options)

    return method
