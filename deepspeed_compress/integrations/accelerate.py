"""Accelerate: an early check of the section, and a warning about inexact weights in state dicts.

`TrainingArguments`, `DeepSpeedPlugin` and `HfDeepSpeedConfig` all call
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: once after the file has been read, and again after
"auto" values have been filled in from the training arguments.
"""

import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.integrations.patching import Undo, replace_methods
from deepspeed_compress.integrations.sections import checked, has_section


def check_early(on_section: Callable[[], Undo]) -> Undo:
    """Check and expand the section of every configuration that is read from now on.

    Args:
        on_section: called whenever a configuration has the section. It returns a function that undoes its effect.

    Returns:
        A function that undoes everything.
    """
    undo = ExitStack()
    undo.callback(replace_methods((HfDeepSpeedConfig, "set_stage_and_offload", partial(_expanding, undo, on_section))))
    return undo.close


def _expanding(undo: ExitStack, on_section: Callable[[], Undo], original: Callable[..., None], self: Any) -> None:
    """Call `HfDeepSpeedConfig.set_stage_and_offload` with a configuration that is checked and expanded."""
    if has_section(self.config):
        self.config, _ = checked(self.config, "Trainer or Accelerate")
        undo.callback(on_section())
    original(self)


def warn_of_inexact_weights() -> Undo:
    """Make `Accelerator.get_state_dict` warn if the compressed weights are behind the optimizer's weights.

    They are not made exact automatically: a single rank may call this method, and a program may have put other weights
    into the model, such as averages, in order to save those.

    Returns:
        A function that undoes this.
    """
    # Accelerate loads that module while this one is imported for `check_early`.
    from accelerate.accelerator import Accelerator

    return replace_methods((Accelerator, "get_state_dict", _warning))


def _warning(original: Callable[..., Any], self: Any, model: Any, *args: Any, **options: Any) -> Any:
    """Call `Accelerator.get_state_dict`, after a warning if the weights are inexact."""
    # Not getattr: the engine forwards unknown attributes to the model.
    session = vars(model).get("compression")
    if session is not None and session.exact is not None and session.exact.behind:
        text = (
            f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
            "model.compression.synchronise() on all ranks before get_state_dict"
        )
        warnings.warn(text, CompressWarning, stacklevel=3)
    return original(self, model, *args, **options)
