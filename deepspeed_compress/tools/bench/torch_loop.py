"""Plain PyTorch training loop, and the settings that all peers share."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from deepspeed.runtime import lr_schedules
from torch import Tensor

from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.workload import Workload
from deepspeed_compress.training.stepper import Stepper

DTYPES: Mapping[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Optimizer:
    """Optimizer of the peers.

    Attributes:
        adamw: Keyword arguments of torch.optim.AdamW.
        schedule: Learning rate schedule of DeepSpeed (`type` and `params`), or None.
    """

    adamw: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({"lr": 1e-3}))
    schedule: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, ds_config: Mapping[str, Any]) -> "Optimizer":
        """Return the settings that DeepSpeed uses for `ds_config`, whose optimizer is AdamW with `torch_adam`."""
        params = {name: value for name, value in ds_config["optimizer"]["params"].items() if name != "torch_adam"}
        return cls(params, ds_config.get("scheduler"))

    def scheduled(self, optimizer: torch.optim.Optimizer) -> Any:
        """Return DeepSpeed's own schedule for `optimizer`, so that learning rates are bit-identical, or None."""
        found = self.schedule
        return getattr(lr_schedules, found["type"])(optimizer, **found["params"]) if found else None


class PeerStepper(Stepper, Protocol):
    """Stepper of a peer. `session` is the package's session if the peer uses it, else None."""

    session: Any

    def close(self) -> None:
        """Release everything that the stepper holds in this process, so that the next one can start."""


class TorchStepper:
    """Plain PyTorch training loop: gradient clipping and AdamW. The loss is this rank's own.

    Subclasses say how gradients are averaged during the backward pass.
    """

    session: Any = None

    def __init__(self, model: Any, workload: Workload, optimizer: Optimizer) -> None:
        self.model, self.clipping = model, workload.clipping
        # FSDP2 replaces the parameters when it wraps the model, so they are collected afterwards.
        self.parameters = list(model.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, **optimizer.adamw)
        self.schedule = optimizer.scheduled(self.optimizer)

    def train(self, batch: Tensor) -> Tensor:
        """Run one optimizer step and return the mean loss, of shape ().

        `batch` holds token windows of shape (micro_batches, micro_size, length).
        """
        self.model.train()
        loss = torch.stack([self._accumulate(tokens, number, len(batch)) for number, tokens in enumerate(batch, 1)])
        if self.clipping:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clipping)
        self.optimizer.step()
        self.stepped()
        self.optimizer.zero_grad()
        if self.schedule is not None:
            self.schedule.step()
        return loss.mean()

    def evaluate(self, batch: Tensor) -> Tensor:
        """Return the mean loss on `batch` without computing gradients."""
        self.model.eval()
        with torch.no_grad(), self.evaluating():
            return torch.stack([self._loss(tokens) for tokens in batch]).mean()

    def synchronised(self, last: bool) -> AbstractContextManager[object]:
        """Return the context of a micro-batch. `last` is True for the last one of a step."""
        return nullcontext()

    def stepped(self) -> None:
        """Do what follows each optimizer step."""

    def evaluating(self) -> AbstractContextManager[object]:
        """Return a context in which all ranks have the weights that the method trains."""
        return nullcontext()

    def close(self) -> None: ...

    def _accumulate(self, tokens: Tensor, number: int, count: int) -> Tensor:
        with self.synchronised(number == count):
            loss = self._loss(tokens)
            (loss / count).backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def _loss(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss


def bare_model(workload: Workload) -> Any:
    """Return the model on this rank's device, in the precision of the workload."""
    path = Path(workload.model)
    model: Any = build_model(path, read_model_config(path), workload.seed)
    if workload.recompute:
        model.gradient_checkpointing_enable()
    return model.to(device(), DTYPES[workload.precision]).train()
