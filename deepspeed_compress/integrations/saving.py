"""Exact weights in what Accelerate saves, where they are compressed."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from accelerate import Accelerator

from deepspeed_compress.config import SECTION
from deepspeed_compress.engine.session import Session
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.exchange import exchange

__all__ = ["save_exactly"]


def save_exactly() -> Callable[[], None]:
    """`wait_for_everyone`, which all ranks call before they save, makes weights exact; `get_state_dict`, which may be
    called by one rank, warns where they are not. Returns what undoes it."""
    undo = [
        exchange(Accelerator, "wait_for_everyone", _synchronised),
        exchange(Accelerator, "get_state_dict", _warning),
    ]

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


def _sessions(models: Any) -> Iterator[Session]:
    # The engine hands unknown names on to the model, so getattr would not tell.
    yield from (vars(model)["compression"] for model in models if "compression" in vars(model))


def _synchronised(original: Callable[..., None]) -> Callable[..., None]:
    def wait_for_everyone(self: Any) -> None:
        original(self)
        for session in _sessions(self._models):
            session.synchronise()

    return wait_for_everyone


def _warning(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        if any(session.exact is not None and session.exact.behind for session in _sessions([model])):
            text = (
                f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
                "accelerator.wait_for_everyone() on all ranks before get_state_dict, or model.compression.synchronise()"
            )
            warnings.warn(text, CompressWarning, stacklevel=2)
        return original(self, model, *args, **options)

    return get_state_dict
