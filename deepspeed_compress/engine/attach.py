"""Entry points: `initialize` in place of DeepSpeed's, `attach` for an engine that exists, `install` for all to come."""

import copy
import functools
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import deepspeed
import torch.distributed as dist

from deepspeed_compress.build import build_reduction
from deepspeed_compress.config import SECTION, CompressConfig, check_world, expand, parse_section, read_ds_config
from deepspeed_compress.engine import seams
from deepspeed_compress.engine.checkpoint import attach_checkpoint
from deepspeed_compress.engine.limits import engine_kind, refuse_unsupported, tied_parameters
from deepspeed_compress.engine.session import Session
from deepspeed_compress.engine.step import follow_steps
from deepspeed_compress.engine.zero_0 import attach_zero_0
from deepspeed_compress.engine.zero_3 import attach_zero_3
from deepspeed_compress.engine.zero_12 import attach_zero_12
from deepspeed_compress.errors import CompressWarning, ConfigError
from deepspeed_compress.monitor import StatisticsWriter

__all__ = ["attach", "initialize", "install"]

WeightBytes = Callable[[], int]
"""Bytes that this rank sends for weights in one optimizer step."""

_ATTACH: Mapping[str, Callable[[Any, Session], WeightBytes]] = MappingProxyType(
    {"zero_0": attach_zero_0, "zero_12": attach_zero_12, "zero_3": attach_zero_3}
)
_SEAMS: Mapping[str, tuple[seams.Seam, ...]] = MappingProxyType(
    {"zero_0": seams.ZERO_0, "zero_12": seams.ZERO_12, "zero_3": seams.ZERO_3}
)


def attach(engine: Any) -> Any:
    """Compress the gradient reduction of `engine`, a DeepSpeedEngine or PipelineEngine; returns it.

    The section is read from `engine.config`, the ds_config that the engine was made with. Afterwards
    `engine.compression` is the `Session`. Raises ConfigError (section missing or wrong), UnsupportedError (this engine
    cannot be compressed rightly), SeamError (this DeepSpeed is not known).
    """
    if hasattr(engine, "compression"):
        raise ConfigError("attach was called twice for one engine: call it once, or use initialize or install alone")
    seams.check_version(deepspeed.__version__)
    config = parse_section(engine.config)
    check_world(config, dist.get_world_size(), engine.config)
    kind = engine_kind(engine)
    refuse_unsupported(engine, config)
    seams.check_seams(seams.STEP + _SEAMS[kind], deepspeed.__version__)
    session = _session(engine, config)
    weight_bytes = _ATTACH[kind](engine, session)
    follow_steps(engine, session, weight_bytes)
    attach_checkpoint(engine, session)
    session.begin(engine.global_steps)
    engine.compression = session
    return engine


def _session(engine: Any, config: CompressConfig) -> Session:
    writer = StatisticsWriter(config.monitor.path, engine.monitor) if engine.global_rank == 0 else None
    if config.gradients.method == "none":
        return Session(config, None, writer)
    reduction = build_reduction(
        config,
        group=engine.seq_data_parallel_group,
        parameters=list(engine.param_names.values()),
        exempt=tied_parameters(engine),
        raw_dtype=engine.communication_data_type,
        transactional=hasattr(engine.optimizer, "overflow"),
    )
    return Session(config, reduction, writer)


def initialize(
    args: Any = None, *positional: Any, config: Any = None, config_params: Any = None, **options: Any
) -> Any:
    """`deepspeed.initialize` with the `deepspeed_compress` section of the configuration in force.

    The same arguments and the same returned tuple (engine, optimizer, dataloader, lr_scheduler). The configuration may
    be a path, a dict, or `args.deepspeed_config`. Errors as of `attach`.
    """
    return _initialize_with(
        deepspeed.initialize, args, *positional, config=config, config_params=config_params, **options
    )


def _initialize_with(
    original: Callable[..., Any],
    args: Any = None,
    *positional: Any,
    config: Any = None,
    config_params: Any = None,
    **options: Any,
) -> Any:
    source = next((given for given in (config, config_params, getattr(args, "deepspeed_config", None)) if given), None)
    if source is None:
        raise ConfigError("no configuration given: pass config=PATH_OR_DICT, or args with --deepspeed_config FILE")
    ds_config = read_ds_config(source)
    expanded = expand(ds_config, parse_section(ds_config))
    if getattr(args, "deepspeed_config", None) is not None:
        args = copy.copy(args)
        args.deepspeed_config = None
    result = original(args, *positional, config=expanded, **options)
    attach(result[0])
    return result


def install() -> Callable[[], None]:
    """From now on `deepspeed.initialize` attaches to every engine whose configuration has the section.

    For code that calls DeepSpeed by itself: HF Trainer, Accelerate, scripts that cannot be edited. Configurations
    without the section go to DeepSpeed untouched. Returns a function that undoes it; a second call changes nothing.
    """
    original = deepspeed.initialize
    if hasattr(original, "_compress_original"):
        return lambda: None

    @functools.wraps(original)
    def wrapper(
        args: Any = None, *positional: Any, config: Any = None, config_params: Any = None, **options: Any
    ) -> Any:
        source = config or config_params or getattr(args, "deepspeed_config", None)
        present = source is not None and SECTION in read_ds_config(source)
        call = functools.partial(_initialize_with, original) if present else original
        return call(args, *positional, config=config, config_params=config_params, **options)

    wrapper._compress_original = original  # type: ignore[attr-defined]
    deepspeed.initialize = wrapper

    def uninstall() -> None:
        if deepspeed.initialize is wrapper:
            deepspeed.initialize = original
        else:
            warnings.warn(
                "deepspeed.initialize was replaced after install(); left as it is", CompressWarning, stacklevel=2
            )

    return uninstall
