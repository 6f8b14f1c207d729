"""A word on inexact weights in what Accelerate saves, where they are compressed."""

import warnings
from collections.abc import Callable
from typing import Any

from accelerate.accelerator import Accelerator

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["warn_of_inexact"]


def warn_of_inexact() -> Callable[[], None]:
    """`get_state_dict`, which may be called by one rank, warns where weights are behind. Returns what undoes it.

    Nothing of Accelerate brings them up to date by itself: a program may have other weights in the model just then,
    such as averages, and mean these to be saved.
    """
    return replace_method(Accelerator, "get_state_dict", _warning)


def _warning(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        # The engine hands unknown names on to the model, so getattr would not tell.
        session = vars(model).get("compression")
        if session is not None and session.exact is not None and session.exact.behind:
            text = (
                f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
                "model.compression.synchronise() on all ranks before get_state_dict"
            )
            warnings.warn(text, CompressWarning, stacklevel=2)
        return original(self, model, *args, **options)

    return get_state_dict
