"""Imported once by the fork server: what every rank would do anew otherwise, for seconds, is done here.

No thread may be started here, for a fork takes none along.
"""

import atexit
import gc
import importlib
import logging
import os
import sys
import warnings

from tests.support.operations import load_operations

MODULES = (
    "deepspeed",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed_compress.backends.megatron",
    "deepspeed_compress.backends.deepspeed.initialize",
    "deepspeed_compress.integrations.hf",
    "deepspeed_compress.models",
    "deepspeed_compress.training.main",
    "pytest",
    "tests.support.jobs",
    "torch.utils.tensorboard",
    "transformers.integrations.deepspeed",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
)


def _prepare() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in MODULES:
            importlib.import_module(module)
    deepspeed = sys.modules["deepspeed"]
    deepspeed.utils.logger.setLevel(logging.ERROR)
    load_operations()
    # The first section builds the models that read it.
    config = sys.modules["deepspeed_compress.config"]
    config.parse_section({config.SECTION: {}})


_prepare()
# Nothing of this is garbage: a collection, and DeepSpeed makes many, takes no time then.
gc.collect()
gc.freeze()
# Triton's bindings print what they leaked when an interpreter ends, below the summary of the tests.
atexit.register(os._exit, 0)
