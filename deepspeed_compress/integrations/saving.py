"""Warning about inexact weights in what Accelerate saves, if weights are compressed."""

import warnings
from collections.abc import Callable
from typing import Any

from accelerate.accelerator import Accelerator

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.replacing import replace_method

__all__ = ["warn_of_inexact"]


def warn_of_inexact() -> Callable[[], None]:
    """Make `get_state_dict`, which a single rank may call, warn if weights lag behind.

    Returns a function that undoes it.
    Nothing in Accelerate makes them exact automatically: a program may have placed other weights in the model, such as
    averages, and intend to save those.
    """
    return replace_method(Accelerator, "get_state_dict", _warning)


def _warning(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        # The engine forwards unknown attributes to the model, so getattr would be ambiguous.
        session = vars(model).get("compression")
        if session is not None and session.exact is not None and session.exact.behind:
            text = (
                f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
                "model.compression.synchronise() on all ranks before get_state_dict"
            )
            warnings.warn(text, CompressWarning, stacklevel=2)
        return original(self, model, *args, **options)

    return get_state_dict
