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
from collections.abc import Iterator
from typing import Any

from tests.support.operations import load_operations

MODULES = (
    "deepspeed",
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_config",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.module_inject.tp_plan_converter",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.utils.pin_memory",
    "deepspeed_compress.backends.ddp",
    "deepspeed_compress.backends.deepspeed.initialize",
    "deepspeed_compress.backends.fsdp2",
    "deepspeed_compress.backends.megatron",
    "deepspeed_compress.integrations.hf",
    "deepspeed_compress.models",
    "deepspeed_compress.planner.files",
    "deepspeed_compress.rollout",
    "deepspeed_compress.tools.bench.workload",
    "deepspeed_compress.training.main",
    "numpy.ctypeslib",
    "pytest",
    "tests.support.coordinators",
    "tests.support.island_jobs",
    "tests.support.jobs",
    "tests.support.resuming",
    "tests.support.tensor_islands",
    "torch._subclasses.schema_check_mode",
    "torch.distributed.algorithms.ddp_comm_hooks",
    "torch.profiler._cupti_monitor",
    "torch.utils.serialization.config",
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
    _build_settings()


def _build_settings() -> None:
    """Build the pydantic models of settings, which are otherwise built on first use."""
    config = sys.modules["deepspeed_compress.config"]
    config.parse_section({config.SECTION: {}})
    patches = sys.modules["deepspeed_compress.config.schedules"]
    patches.settings_of({"method": "none"})
    patches.weights_of({"method": "none"})
    for model in _subclasses(sys.modules["pydantic"].BaseModel):
        if model.__module__.startswith(("deepspeed.", "deepspeed_compress.")):
            model.model_rebuild(raise_errors=False)


def _subclasses(parent: type) -> Iterator[Any]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


_prepare()
# These objects are not garbage. Without them, the many collections that DeepSpeed runs take no time.
gc.collect()
gc.freeze()
# At exit, Triton's bindings would print leaked objects below the summary of the tests.
atexit.register(os._exit, 0)
