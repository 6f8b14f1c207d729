"""Programs import libraries after `install`, so its hooks run while these libraries are only partly imported.

Ranks that are forked for other tests have imported everything before, so only a new interpreter shows this.
"""

from pathlib import Path

import pytest

from tests.support.processes import run_python

FIRST = "import deepspeed_compress; deepspeed_compress.install()"
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "imported",
    [
        "from transformers import Trainer",
        pytest.param("from accelerate import Accelerator", marks=SLOW),
        pytest.param("import accelerate.utils.deepspeed; from accelerate import Accelerator", marks=SLOW),
        pytest.param("from transformers.integrations import HfDeepSpeedConfig", marks=SLOW),
        pytest.param("import deepspeed; from transformers import Trainer", marks=SLOW),
    ],
)
def test_a_library_that_is_imported_after_install_is_whole(imported: str) -> None:
    hooked = "from accelerate import Accelerator; print(hasattr(Accelerator.get_state_dict, '_compress_original'))"
    done = run_python("-c", f"{FIRST}; {imported}; {hooked}", cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split()[-1] == "True"
