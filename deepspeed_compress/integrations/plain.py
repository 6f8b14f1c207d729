"""Compression of programs without DeepSpeed, as if they called `ddp.attach` or `fsdp2.attach` for every model.

`DistributedDataParallel` and `fully_shard` models are recorded here when they are made; `followed` attaches to them.
Each library is changed after the program has imported it.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.patching import Undo, after_import, is_replaced, is_waiting, replace_method

if TYPE_CHECKING:
    from torch import nn

    from deepspeed_compress.backends.sessions import Config
    from deepspeed_compress.integrations.followed import Models


def attach_to_all(config: "Config") -> Undo:
    """Compress every `DistributedDataParallel` or `fully_shard` model made from now on, with the section in `config`.

    Checkpoints of Trainer and of `Accelerator.save_state` include residuals and momenta. Other programs call `save` and
    `load` of `model.compression`, which exists after the first forward pass in training.

    Returns:
        A function that undoes this. Models that exist by then stay compressed.

    Raises:
        ConfigError: if an earlier call is still in effect.
    """
    if is_waiting(_FollowTorch):
        raise ConfigError(_TWICE)
    return after_import("torch", _FollowTorch(config))


_TWICE = "section: install() has a section already (allowed: one); undo the first install(), or pass no section"


@dataclass(frozen=True)
class _FollowTorch:
    """Action after the import of torch that records the optimizers, scalers and models that the program makes."""

    config: "Config"

    def __call__(self) -> Undo:
        from torch.amp import GradScaler
        from torch.nn.parallel import DistributedDataParallel
        from torch.optim import Optimizer

        from deepspeed_compress.integrations.followed import Models

        if is_replaced(DistributedDataParallel, "__init__"):
            raise ConfigError(_TWICE)
        models = Models(self.config)
        with ExitStack() as undo:
            for owner, name, follow in (
                (Optimizer, "__init__", models.optimizers.add),
                (GradScaler, "__init__", models.scalers.add),
                (DistributedDataParallel, "__init__", models.follow),
                (DistributedDataParallel, "__setstate__", models.follow_copy),
            ):
                undo.callback(replace_method(owner, name, partial(_following, follow)))
            for module, action in _AFTER_TORCH:
                undo.callback(after_import(module, partial(action, models)))
            return undo.pop_all().close


def _follow_fsdp2(models: "Models") -> Undo:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    # The program may have imported `fully_shard` by name, so a method that `fully_shard` calls is replaced instead.
    return replace_method(FSDPState, "init", partial(_sharding, models.follow_sharded))


def _follow_accelerate(models: "Models") -> Undo:
    from accelerate.accelerator import Accelerator

    return replace_method(Accelerator, "__init__", partial(_following, models.follow_accelerator))


def _follow_trainer(models: "Models") -> Undo:
    from transformers.trainer import Trainer

    with ExitStack() as undo:
        undo.callback(
            replace_method(Trainer, "_save_optimizer_and_scheduler", partial(_before, models.save_for_trainer))
        )
        undo.callback(
            replace_method(Trainer, "_load_optimizer_and_scheduler", partial(_before, models.load_for_trainer))
        )
        return undo.pop_all().close


def _exclude_from_compile(models: "Models") -> Undo:
    import torch._dynamo

    from deepspeed_compress.integrations.followed import FirstForward

    # torch.compile also compiles a model's hooks, but attaching to a model must not be compiled.
    return replace_method(FirstForward, "__call__", torch._dynamo.disable)


_AFTER_TORCH: tuple[tuple[str, Callable[["Models"], Undo]], ...] = (
    ("torch.distributed.fsdp._fully_shard._fsdp_state", _follow_fsdp2),
    ("torch._dynamo", _exclude_from_compile),
    ("accelerate.accelerator", _follow_accelerate),
    ("transformers.trainer", _follow_trainer),
)
"""Modules that are imported after torch, each with the action after its import."""


def _following(follow: Callable[[Any], object], original: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor (or `__setstate__`, for copies) that passes the new object to `follow`."""

    def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807  (put into a class)
        original(self, *args, **options)
        follow(self)

    return __init__


def _sharding(follow: Callable[[Sequence["nn.Module"]], object], original: Callable[..., None]) -> Callable[..., None]:
    """Return an `FSDPState.init`, which `fully_shard` calls once, that passes its modules to `follow`."""

    def init(self: Any, modules: Sequence["nn.Module"], *args: Any, **options: Any) -> None:
        original(self, modules, *args, **options)
        follow(modules)

    return init


def _before(action: Callable[[Any, Any], object], original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that first passes the object and the method's first argument to `action`."""

    def method(self: Any, argument: Any, *args: Any, **options: Any) -> Any:
        action(self, argument)
        return original(self, argument, *args, **options)

    return method
