"""Module that Python imports at its start in the processes that a program under `ds-compress run` starts.

It runs the `sitecustomize` that it hides, if there is one, and installs compression if the environment asks for it.
"""

import os
import sys
from contextlib import suppress
from importlib.machinery import PathFinder
from importlib.util import module_from_spec


def _run_hidden() -> None:
    here = os.path.dirname(os.path.abspath(__file__))
    hidden = PathFinder.find_spec("sitecustomize", [path for path in sys.path if os.path.abspath(path) != here])
    if hidden is not None and hidden.loader is not None:
        sys.modules["sitecustomize"] = module_from_spec(hidden)
        hidden.loader.exec_module(sys.modules["sitecustomize"])


_run_hidden()
if "DS_COMPRESS_INHERIT" in os.environ:
    # Another environment's Python may not have this package.
    with suppress(ImportError):
        from deepspeed_compress.integrations.install import install_inherited

        install_inherited()
