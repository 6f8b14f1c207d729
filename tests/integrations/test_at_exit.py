"""Programs that import the package but do not compress their engines."""

import os
from pathlib import Path

import pytest

from tests.support.processes import run_python

ROOT = Path(__file__).parents[2]
PROGRAM = """
import warnings
import torch, deepspeed, deepspeed_compress
def main(compress, section):
    model = torch.nn.Linear(4, 4)
    optimizer = {"type": "AdamW", "params": {"torch_adam": True}}
    config = {"train_batch_size": 1, "optimizer": optimizer, **({"deepspeed_compress": {}} if section else {})}
    initialize = deepspeed_compress.initialize if compress else deepspeed.initialize
    initialize(model=model, model_parameters=list(model.parameters()), config=config)
    # A gloo thread that still holds a tensor aborts the process when its interpreter has ended (pytorch #190489).
    torch.distributed.destroy_process_group()
warnings.simplefilter("ignore")
main(COMPRESS, SECTION)
warnings.simplefilter("always")
"""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("compress", "section", "warns"), [(False, True, True), (False, False, False), (True, True, False)]
)
def test_an_uncompressed_engine_with_a_section_warns_at_exit(compress: bool, section: bool, warns: bool) -> None:
    program = PROGRAM.replace("COMPRESS", str(compress)).replace("SECTION", str(section))
    environment = {**os.environ, **ALONE, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    done = run_python("-c", program, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
    assert ("CompressWarning: nothing was compressed: an engine was made" in done.stderr) is warns


def test_importing_the_package_prints_nothing() -> None:
    done = run_python("-c", "import deepspeed_compress", cwd=ROOT, check=True)
    assert done.stderr == ""
