"""Training runs with the section `activations`, for small models whose layers or stages ranks share."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
from torch import Tensor, tensor

from deepspeed_compress.config import SECTION


@dataclass(frozen=True)
class Job:
    """A training run.

    Attributes:
        activations: the key `activations`; None to train with DeepSpeed alone.
        stage: ZeRO stage.
        extra: other keys of the configuration.
        section: other keys of the section.
    """

    rows: ClassVar[int] = 3
    """Micro-batch size."""
    zero: ClassVar[Mapping[str, Any]] = {}
    """Keys of `zero_optimization`."""
    layout: ClassVar[Mapping[str, Any]] = {}
    """Keys of the configuration that every run of the model has."""
    activations: Mapping[str, Any] | None = None
    stage: int = 1
    extra: Mapping[str, Any] = field(default_factory=dict, kw_only=True)
    section: Mapping[str, Any] = field(default_factory=dict, kw_only=True)

    def config(self) -> dict[str, Any]:
        config = {
            "train_micro_batch_size_per_gpu": self.rows,
            "steps_per_print": 10**6,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
            "zero_optimization": {"stage": self.stage, **self.zero},
            **self.layout,
            **self.extra,
        }
        if self.activations is None:
            return config
        section = {"gradients": {"method": "none"}, "activations": dict(self.activations), **self.section}
        return {**config, SECTION: section}


def accumulate(engine: Any, loss_of: Callable[[int], Tensor]) -> None:
    """Run two forward passes before their backward passes, and add the losses of two more."""
    one, two = loss_of(0), loss_of(1)
    for loss in (one, two, loss_of(2) + loss_of(3)):
        engine.backward(loss)
        engine.step()


def interrupt(engine: Any, loss_of: Callable[[], Tensor]) -> None:
    """Let a layer raise in the middle of a forward pass, and drop the graph of another one."""

    def fail(*_: Any) -> None:
        raise ValueError

    handle = engine.module.model.layers[1].mlp.down_proj.register_forward_pre_hook(fail)
    with pytest.raises(ValueError, match=r"^$"):
        loss_of()
    handle.remove()
    loss_of()


def flattened(records: Sequence[Any]) -> Tensor:
    """Return all numbers of losses, lists and weights by name in one tensor."""
    parts: list[float] = []
    for record in records:
        values = list(record.values()) if isinstance(record, dict) else [record]
        parts += [x for value in values for x in (value if isinstance(value, list) else [value])]
    return tensor(parts)
