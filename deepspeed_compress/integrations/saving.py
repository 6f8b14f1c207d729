"""Warning about inexact weights in the state dicts of Accelerate, if weights are compressed."""

import warnings
from collections.abc import Callable
from typing import Any

from accelerate.accelerator import Accelerator

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.replacing import replace_method


def warn_of_inexact_weights() -> Callable[[], None]:
    """Make `Accelerator.get_state_dict` warn if the compressed weights are behind the optimizer's weights.

    They are not made exact automatically: a single rank may call this method, and a program may have put other weights
    into the model, such as averages, in order to save those.

    Returns:
        A function that undoes this.
    """
    return replace_method(Accelerator, "get_state_dict", _warning)


def _warning(original: Callable[..., Any]) -> Callable[..., Any]:
    def get_state_dict(self: Any, model: Any, *args: Any, **options: Any) -> Any:
        # Not getattr: the engine forwards unknown attributes to the model.
        session = vars(model).get("compression")
        if session is not None and session.exact is not None and session.exact.behind:
            text = (
                f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
                "model.compression.synchronise() on all ranks before get_state_dict"
            )
            warnings.warn(text, CompressWarning, stacklevel=2)
        return original(self, model, *args, **options)

    return get_state_dict
