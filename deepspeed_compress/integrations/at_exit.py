"""A last look when a program ends: engines with the section that nobody has attached to.

`import deepspeed_compress` alone compresses nothing, and DeepSpeed ignores sections that it does not know. To hear of
an engine when it is made, DeepSpeed would have to be loaded and changed; at the end it can be looked for, at no cost.
"""

import atexit
import gc
import sys
import warnings

from deepspeed_compress.errors import CompressWarning

__all__ = ["warn_at_exit"]

SECTION = "deepspeed_compress"
"""As in `config`, which need not be loaded for this."""


def warn_at_exit() -> None:
    """Warn (CompressWarning) at the end of a program that has made engines, and never used an entry point of ours."""
    atexit.register(_look)


def _look() -> None:
    made = vars(sys.modules.get("deepspeed.runtime.engine", object)).get("DeepSpeedEngine")
    # Whoever has loaded this has used an entry point, and is told by it.
    if made is None or "deepspeed_compress.engine" in sys.modules:
        return
    # Not isinstance, which asks an object for its class: some load modules when they are asked.
    engines = [one for one in gc.get_objects() if issubclass(type(one), made)]
    if any(SECTION in getattr(vars(engine).get("_config"), "_param_dict", ()) for engine in engines):
        text = (
            f'nothing was compressed: an engine was made with "{SECTION}" in its configuration, but without this '
            "package. Call deepspeed_compress.install() before, or deepspeed_compress.initialize in place of "
            "deepspeed.initialize, or start the program by ds-compress run"
        )
        warnings.warn(text, CompressWarning, stacklevel=1)
