"""Check at the end of a program for engines with the section that nothing has attached to.

`import deepspeed_compress` alone compresses nothing, and DeepSpeed ignores sections that it does not know. To notice an
engine when it is made, DeepSpeed would have to be imported and changed; at the end, engines can be found at no cost.
"""

import atexit
import gc
import sys
import warnings

from deepspeed_compress.errors import CompressWarning

__all__ = ["warn_at_exit"]

SECTION = "deepspeed_compress"
"""Same as `config.SECTION`, which need not be imported for this."""


def warn_at_exit() -> None:
    """Issue a CompressWarning at exit if engines have the section, but no entry point of ours was ever used."""
    atexit.register(_look)


def _look() -> None:
    made = vars(sys.modules.get("deepspeed.runtime.engine", object)).get("DeepSpeedEngine")
    # If this module is loaded, the program has used an entry point, which reports its own problems.
    if made is None or "deepspeed_compress.backends.deepspeed" in sys.modules:
        return
    # Not isinstance, which asks an object for its class: some objects import modules then.
    engines = [one for one in gc.get_objects() if issubclass(type(one), made)]
    if any(SECTION in getattr(vars(engine).get("_config"), "_param_dict", ()) for engine in engines):
        text = (
            f'nothing was compressed: an engine was made with "{SECTION}" in its configuration, but without this '
            "package. Call deepspeed_compress.install() before, or deepspeed_compress.initialize in place of "
            "deepspeed.initialize, or start the program by ds-compress run"
        )
        warnings.warn(text, CompressWarning, stacklevel=1)
