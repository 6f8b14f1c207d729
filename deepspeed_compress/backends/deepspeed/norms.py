"""Norm of the mean gradient, intercepted where DeepSpeed computes it before the step, so that a step can be skipped.

DeepSpeed skips a step whose norm is not finite. A step that the policy rejects therefore gets the norm infinity, and
DeepSpeed does the rest: it drops the gradients and counts a skipped step. Its loss scaler is not informed: no gradient
has overflowed, so the scale stays, and no overflow is logged. Plain torch optimizers have no such check; their `step`
is replaced.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

from deepspeed_compress.backends.deepspeed.engine_facts import engine_kind
from deepspeed_compress.backends.deepspeed.seams import Seam
from deepspeed_compress.backends.deepspeed.units import deciding_group
from deepspeed_compress.session.patches import replaced

SEAMS = (
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer.scaled_global_norm", "self norm_type"),
    Seam("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._get_norm_groups"),
    Seam("deepspeed.runtime.engine:clip_grad_norm_", "parameters max_norm norm_type mpu"),
    Seam("deepspeed.runtime.zero.stage_1_and_2:DeepSpeedZeroOptimizer._update_scale", "self has_overflow"),
    Seam("deepspeed.runtime.zero.stage3:DeepSpeedZeroOptimizer_Stage3._update_scale", "self has_overflow"),
)

Judge = Callable[[Any], bool]
"""Function that receives a norm with loss scale, a number or one-element tensor, and returns True to skip the step."""


class Norms:
    """Gradient norms of one engine, which decide whether steps are skipped.

    Attributes:
        newest: L2 norm of the mean gradient of the last step, without loss scale; inf if it is not finite. None if
            DeepSpeed does not compute it, or if it overflowed in fp16 because the loss scale was too large.

    Args:
        engine: the engine.
        skips: receives such a norm, and returns True if the step is to be skipped.
    """

    def __init__(self, engine: Any, skips: Callable[[float], bool]) -> None:
        self.newest: float | None = None
        self._engine = engine
        self._skips = skips
        self._watch = _WATCHES[_kind(engine)]
        self._overflows = bool(engine.fp16_enabled()) or engine.torch_autocast_z0_gradscaler is not None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Intercept the norm of one optimizer step, which runs within the block."""
        self.newest = None
        with self._watch(self._engine, self._judge):
            yield
        if self.newest is None:
            known = getattr(self._engine.optimizer, "_global_grad_norm", None)
            self.newest = None if known is None else self._known(_true(known, 1.0))

    def _judge(self, norm: Any) -> bool:
        """Store `norm` (with loss scale), and return True if the step is to be skipped."""
        self.newest = self._known(_true(norm, loss_scale(self._engine)))
        return self.newest is not None and self._skips(self.newest)

    def _known(self, norm: float) -> float | None:
        """Return `norm`, or None for an overflow in fp16: DeepSpeed skips that step and halves the loss scale."""
        return None if self._overflows and math.isinf(norm) else norm


def loss_scale(engine: Any) -> float:
    """Return the loss scale of the gradients; 1.0 without one."""
    # fp16 autocast uses a torch gradient scaler, which the engine has without ZeRO, and the optimizer under ZeRO.
    scaler = engine.torch_autocast_z0_gradscaler or getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    if scaler is not None:
        return float(scaler.get_scale())
    return float(getattr(engine.optimizer, "loss_scale", None) or 1.0)


def _true(norm: Any, scale: float) -> float:
    """Return `norm` without loss scale; inf for a norm that is not finite, for which DeepSpeed writes -1."""
    value = float(norm)
    return value / scale if math.isfinite(value) and value >= 0 else math.inf


def _kind(engine: Any) -> str:
    if engine_kind(engine) != "zero_0":
        return engine_kind(engine)
    if isinstance(engine.optimizer, BF16_Optimizer):
        return "bf16"
    return "scaled" if hasattr(engine.optimizer, "overflow") else "plain"


@contextmanager
def _zero_12(engine: Any, judge: Judge) -> Iterator[None]:
    optimizer = engine.optimizer
    original, checks = optimizer.scaled_global_norm, optimizer.check_grad_overflow
    scale = _Scale(optimizer)

    def scaled_global_norm(*args: Any, **options: Any) -> Any:
        norm = original(*args, **options)
        if not judge(norm):
            return norm
        # In bf16, DeepSpeed checks the norm only if configured to; its own pass over the gradients is over by now.
        optimizer.check_grad_overflow = True
        scale.stays = math.isfinite(_true(norm, 1.0))
        return math.inf

    with replaced(optimizer, scaled_global_norm=scaled_global_norm, check_grad_overflow=checks), scale.kept():
        yield


@contextmanager
def _zero_3(engine: Any, judge: Judge) -> Iterator[None]:
    original, scale = engine.optimizer._get_norm_groups, _Scale(engine.optimizer)

    def _get_norm_groups(*args: Any, **options: Any) -> Any:
        groups = original(*args, **options)
        norms = torch.stack([torch.as_tensor(norm, dtype=torch.float32) for norm in groups])
        # DeepSpeed marks an invalid norm with -1.
        invalid = (~torch.isfinite(norms) | (norms < 0)).any()
        norm = torch.linalg.vector_norm(norms).masked_fill(invalid, math.inf)
        if not judge(norm):
            return groups
        scale.stays = math.isfinite(_true(norm, 1.0))
        return [torch.full_like(torch.as_tensor(groups[0]), math.inf)]

    with replaced(engine.optimizer, _get_norm_groups=_get_norm_groups), scale.kept():
        yield


class _Scale:
    """Control of an optimizer's loss scale. While `stays` is True, the scaler is not informed of the step."""

    def __init__(self, optimizer: Any) -> None:
        self.stays = False
        self._optimizer = optimizer
        self._update = optimizer._update_scale

    def kept(self) -> AbstractContextManager[None]:
        return replaced(self._optimizer, _update_scale=self._update_scale)

    def _update_scale(self, *args: Any, **options: Any) -> None:
        if not self.stays:
            self._update(*args, **options)


def _bf16(engine: Any, judge: Judge) -> AbstractContextManager[None]:
    # With experts, the norm of the other parameters is only a part of it.
    name = "get_norm_with_moe_layers" if engine.has_moe_layers else "get_global_norm_of_tensors"
    original = getattr(bf16_optimizer, name)

    def judged_norm(*args: Any, **options: Any) -> Any:
        norm = original(*args, **options)
        return math.inf if judge(norm) else norm

    return replaced(bf16_optimizer, **{name: judged_norm})


@contextmanager
def _plain(engine: Any, judge: Judge) -> Iterator[None]:
    """Watch a plain torch optimizer: the norm is the one that clipping returns, or else is computed here."""
    optimizer, step, clip = engine.optimizer, engine.optimizer.step, deepspeed_engine.clip_grad_norm_
    norms: list[Any] = []

    def clip_grad_norm_(*args: Any, **options: Any) -> Any:
        norms.append(clip(*args, **options))
        return norms[-1]

    def step_if_wanted(*args: Any, **options: Any) -> Any:
        norm = _everywhere(norms[-1] if norms else _norm(engine), engine)
        # torch's gradient scaler has divided the gradients by the loss scale, unless a fused optimizer is to do so.
        remaining = vars(optimizer).get("grad_scale")
        # The engine reads `overflow` after the step, and counts a skipped step.
        optimizer.overflow = judge(norm * loss_scale(engine) / (1.0 if remaining is None else float(remaining)))
        return None if optimizer.overflow else step(*args, **options)

    counting = replaced(deepspeed_engine, clip_grad_norm_=clip_grad_norm_)
    with counting, replaced(optimizer, step=step_if_wanted, overflow=False):
        yield


def _norm(engine: Any) -> torch.Tensor:
    grads = [parameter.grad for parameter in engine.module.parameters() if parameter.grad is not None]
    return torch.nn.utils.get_total_norm([grad.coalesce().values() if grad.is_sparse else grad for grad in grads])


def _everywhere(norm: Any, engine: Any) -> float:
    """Return the largest norm of all ranks, so that pipeline stages, which have different parameters, decide alike."""
    value = torch.as_tensor(norm, dtype=torch.float32, device=engine.device).nan_to_num(math.inf, math.inf).reshape(1)
    dist.all_reduce(value, op=dist.ReduceOp.MAX, group=deciding_group(engine))
    return float(value)


_WATCHES: Mapping[str, Callable[[Any, Judge], AbstractContextManager[None]]] = {
    "zero_12": _zero_12,
    "zero_3": _zero_3,
    "bf16": _bf16,
    "plain": _plain,
    # Optimizers that scale the loss check for overflows themselves, and hide the norm until the step is over.
    "scaled": lambda engine, judge: nullcontext(),
}
