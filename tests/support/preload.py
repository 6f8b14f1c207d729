"""Module that the fork server imports once, to do what would otherwise take seconds in every rank.

It must not start threads, because forked processes do not inherit them.
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
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
    "deepspeed_compress.backends.megatron",
    "deepspeed_compress.backends.deepspeed.initialize",
    "deepspeed_compress.integrations.hf",
    "deepspeed_compress.models",
    "deepspeed_compress.training.main",
    "pytest",
    "tests.support.jobs",
    "torch._subclasses.schema_check_mode",
    "torch.profiler._cupti_monitor",
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
    # This loads the C++ kernels.
    kernels = sys.modules["deepspeed_compress.compression.kernels"]
    kernels.for_device(sys.modules["torch"].device("cpu"))
    # Parsing a first section builds the pydantic models.
    config = sys.modules["deepspeed_compress.config"]
    config.parse_section({config.SECTION: {}})


_prepare()
# These objects are not garbage. Without them, the many collections that DeepSpeed runs take no time.
gc.collect()
gc.freeze()
# At exit, Triton's bindings would print leaked objects below the summary of the tests.
atexit.register(os._exit, 0)
