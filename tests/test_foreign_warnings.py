"""Deprecation warnings of other packages, under programs of this one."""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_python

PROGRAM = """
import warnings
from deepspeed_compress.program_warnings import hide_foreign_warnings
hide_foreign_warnings()
warnings.warn_explicit("theirs", FutureWarning, "x.py", 1, "torch.nn.modules.linear")
warnings.warn_explicit("x is deprecated. Please use `torch.distributed.y`", FutureWarning, "x.py", 1, "__main__")
warnings.warn_explicit("the user's own", FutureWarning, "x.py", 1, "__main__")
warnings.warn_explicit("of torch, but not of its future", UserWarning, "x.py", 1, "torch.nn.modules.linear")
"""


@pytest.mark.parametrize("asked", [False, True])
def test_they_are_hidden_unless_the_user_asks_for_them(asked: bool) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONWARNINGS"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[1]), **({"PYTHONWARNINGS": "default"} if asked else {})}
    done = run_python("-c", PROGRAM, env=environment, check=True).stderr
    assert ("theirs" in done, "Please use" in done) == (asked, asked)
    assert "the user's own" in done
    assert "not of its future" in done
