"""Compression of programs without DeepSpeed, as if they called `ddp.attach` or `fsdp2.attach` for every model.

`DistributedDataParallel` and `fully_shard` models are recorded here when they are made; `followed` attaches to them.
Each library is changed after the program has imported it.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.integrations.patching import Undo, after_import, is_replaced, is_waiting, replace_methods
from deepspeed_compress.session.patches import Patches

if TYPE_CHECKING:
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
            undo.callback(
                replace_methods(
                    (Optimizer, "__init__", partial(_following, models.optimizers.add)),
                    (GradScaler, "__init__", partial(_following, models.scalers.add)),
                    (DistributedDataParallel, "__init__", partial(_following, models.follow)),
                )
            )
            for module, action in _AFTER_TORCH:
                undo.callback(after_import(module, partial(action, models)))
            return undo.pop_all().close


def _follow_fsdp2(models: "Models") -> Undo:
    from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

    # The program may have imported `fully_shard` by name, so a method that `fully_shard` calls is replaced instead.
    follow = partial(_following, lambda state: models.follow_sharded(state._modules))
    return replace_methods((FSDPState, "init", follow))


def _follow_accelerate(models: "Models") -> Undo:
    from accelerate.accelerator import Accelerator

    return replace_methods((Accelerator, "__init__", partial(_following, models.follow_accelerator)))


def _follow_trainer(models: "Models") -> Undo:
    from transformers.trainer import Trainer

    return replace_methods(
        (Trainer, "_save_optimizer_and_scheduler", partial(_before, models.save_for_trainer)),
        (Trainer, "_load_optimizer_and_scheduler", partial(_before, models.load_for_trainer)),
    )


def _exclude_from_compile(models: "Models") -> Undo:
    import torch._dynamo

    from deepspeed_compress.integrations.followed import FirstForward

    # torch.compile also compiles a model's hooks, but attaching to a model must not be compiled.
    patches = Patches()
    patches.replace(FirstForward, "__call__", torch._dynamo.disable(FirstForward.__call__))  # type: ignore[no-untyped-call]
    return patches.undo


_AFTER_TORCH: tuple[tuple[str, Callable[["Models"], Undo]], ...] = (
    ("torch.distributed.fsdp._fully_shard._fsdp_state", _follow_fsdp2),
    ("torch._dynamo", _exclude_from_compile),
    ("accelerate.accelerator", _follow_accelerate),
    ("transformers.trainer", _follow_trainer),
)
"""Modules that are imported after torch, each with the action after its import."""


Method = Callable[..., Any]


def _following(follow: Callable[[Any], object], original: Method, self: Any, *args: Any, **options: Any) -> None:
    """Run a constructor, and pass the new object to `follow`."""
    original(self, *args, **options)
    follow(self)


def _before(
    action: Callable[[Any, Any], object], original: Method, self: Any, argument: Any, *args: Any, **options: Any
) -> Any:
    """Pass the object and the method's first argument to `action`, and run the method."""
    action(self, argument)
    return original(self, argument, *args, **options)
