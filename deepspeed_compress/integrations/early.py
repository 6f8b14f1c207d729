"""Check of the section when Accelerate reads a DeepSpeed configuration, before a model is loaded.

`TrainingArguments`, `DeepSpeedPlugin` and `HfDeepSpeedConfig` all call
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: once after the file has been read, and again after
"auto" values have been filled in from the training arguments.
"""

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from accelerate.utils.deepspeed import HfDeepSpeedConfig

from deepspeed_compress.integrations.importing import Undo
from deepspeed_compress.integrations.replacing import replace_method
from deepspeed_compress.integrations.sections import checked, has_section


def check_early(on_section: Callable[[], Undo]) -> Undo:
    """Check and expand the section of every configuration that is read from now on.

    Args:
        on_section: called whenever a configuration has the section. It returns a function that undoes its effect.

    Returns:
        A function that undoes everything.
    """
    undo = ExitStack()

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def set_stage_and_offload(self: Any) -> None:
            if has_section(self.config):
                self.config, _ = checked(self.config, "Trainer or Accelerate")
                undo.callback(on_section())
            original(self)

        return set_stage_and_offload

    undo.callback(replace_method(HfDeepSpeedConfig, "set_stage_and_offload", wrap))
    return undo.close
