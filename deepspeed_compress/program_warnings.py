"""Warning of a whole program at exit if nothing was compressed.

`import deepspeed_compress` alone compresses nothing, and DeepSpeed ignores sections that it does not know. Noticing an
engine when it is made would require importing and patching DeepSpeed. At exit, engines can be found at no cost.
"""

import atexit
import gc
import sys
import warnings

from deepspeed_compress.errors import CompressWarning

SECTION = "deepspeed_compress"
"""Same as `config.SECTION`, repeated here so that `config` need not be imported."""


def warn_at_exit() -> None:
    """Issue a CompressWarning at exit if engines have the section but the program never used an entry point."""
    atexit.register(_check_engines)


def _check_engines() -> None:
    made = vars(sys.modules.get("deepspeed.runtime.engine", object)).get("DeepSpeedEngine")
    # If this module is loaded, the program has used an entry point, which reports its own problems.
    if made is None or "deepspeed_compress.backends.deepspeed" in sys.modules:
        return
    # Not isinstance, which reads `__class__`: some objects import modules when it is read.
    engines = [one for one in gc.get_objects() if issubclass(type(one), made)]
    if any(SECTION in getattr(vars(engine).get("_config"), "_param_dict", ()) for engine in engines):
        text = (
            f'nothing was compressed: an engine was made with "{SECTION}" in its configuration, but not by this '
            "package. Call deepspeed_compress.install() first, call deepspeed_compress.initialize in place of "
            "deepspeed.initialize, or start the program with ds-compress run"
        )
        warnings.warn(text, CompressWarning, stacklevel=1)
