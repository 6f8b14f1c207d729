"""Replacement for `deepspeed.initialize`, for one engine or for all. It prepares engines for `attach`."""

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import deepspeed
from deepspeed.runtime.dataloader import RepeatingLoader
from deepspeed.runtime.pipe.engine import PipelineEngine

from deepspeed_compress.backends.deepspeed import seams
from deepspeed_compress.backends.deepspeed.announce import warn_of_uncompressed
from deepspeed_compress.backends.deepspeed.attach import attach_section
from deepspeed_compress.backends.deepspeed.division import (
    check_division,
    divide_call,
    groups_restored_on_failure,
    make_divided,
    make_unit,
)
from deepspeed_compress.backends.deepspeed.engine_facts import has_optimizer
from deepspeed_compress.backends.deepspeed.ownership import dealing
from deepspeed_compress.backends.deepspeed.restarts import resume_newest
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.backends.deepspeed.weights.copies import copy_weights
from deepspeed_compress.checkpointing.deepspeed.ownership_files import keep_file_order
from deepspeed_compress.config import SECTION, expand, parse_section, read_ds_config
from deepspeed_compress.errors import CompressError, ConfigError
from deepspeed_compress.local_sgd.deepspeed.elastic import prepare_call

__all__ = ["initialize", "initialize_if_asked", "zero_init_arguments"]


def initialize(*args: Any, **options: Any) -> Any:
    """Call `deepspeed.initialize`, and apply the `deepspeed_compress` section of the configuration to the engine.

    Args:
        *args: positional arguments of `deepspeed.initialize`.
        **options: keyword arguments of `deepspeed.initialize`. The configuration, a path or a dict, is `config` or
            `args.deepspeed_config`.

    Returns:
        The result of `deepspeed.initialize` (engine, optimizer, dataloader, lr_scheduler), with the engine attached.

    Raises:
        ConfigError: there is no configuration, or its section is missing or invalid.
        UnsupportedError: see `attach`.
        SeamError: see `attach`.

    Examples:
        >>> engine, optimizer, loader, scheduler = deepspeed_compress.initialize(
        ...     model=model, model_parameters=model.parameters(), config="ds_config.json"
        ... )
    """
    original = getattr(deepspeed.initialize, "_compress_original", deepspeed.initialize)
    call = _bind(original, args, options)
    source = _configuration(call)
    if source is None:
        raise ConfigError("no configuration given: pass config=PATH_OR_DICT, or args with --deepspeed_config FILE")
    return _initialize(original, call, read_ds_config(source))


def _bind(original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name, however they were passed."""
    return dict(inspect.signature(original).bind(*args, **options).arguments)


def _configuration(call: Mapping[str, Any]) -> Any:
    """Return the configuration passed to a call of `deepspeed.initialize`, in whichever argument; None without one."""
    places = (call.get("config"), call.get("config_params"), getattr(call.get("args"), "deepspeed_config", None))
    return next((given for given in places if given is not None), None)


@groups_restored_on_failure()
def _initialize(
    original: Callable[..., Any],
    call: dict[str, Any],
    ds_config: dict[str, Any],
    wanted: Callable[[Any], bool] = lambda engine: True,
) -> Any:
    """Make the engine with the expanded configuration, and attach to it if `wanted` returns True for it.

    If this raises, later engines of this process are made as if it had not been tried.
    """
    config = parse_section(ds_config)
    call = {**call, "config": expand(ds_config, config)}
    call.pop("config_params", None)
    if getattr(call.get("args"), "deepspeed_config", None) is not None:
        call["args"] = copy.copy(call["args"])
        call["args"].deepspeed_config = None
    training_data = call.get("training_data")
    unit = make_unit(config, call["config"])
    if unit is not None:
        call = divide_call(unit, call, call["config"])
    elif config.islands is not None:
        call = prepare_call(call)
    balanced = config.ownership == "balanced"
    if balanced:
        seams.check_seams(seams.OWNERSHIP, deepspeed.__version__)
    with dealing(balanced) as given:
        result = original(**call) if unit is None else make_divided(original, call, unit)
    with _destroyed_on_failure(result[0]):
        check_division(result[0])
        keep_file_order(result[0], given)
        if wanted(result[0]):
            attach_section(result[0], config, unit if isinstance(unit, IslandUnit) else None)
            resume_newest(result[0], result[0].compression)
        elif unit is not None:
            # Libraries load weights on the first rank, so `deepspeed.zero.Init` shares them in the first part only.
            copy_weights(list(result[0].module.parameters()), result[0].device, unit.peers)
        return result if unit is None and config.islands is None else _with_data(result, training_data)


@contextmanager
def _destroyed_on_failure(engine: Any) -> Iterator[None]:
    """Detach from `engine` and destroy it if the block raises, because the caller never receives it.

    This removes its hooks from the user's model, and its division of the job from DeepSpeed.
    """
    try:
        yield
    except BaseException:
        with suppress(CompressError):
            if "compression" in vars(engine):
                engine.compression.patches.undo()
        engine.destroy()
        raise


def _with_data(result: Any, training_data: Any) -> Any:
    """Return `result` of `deepspeed.initialize` with a data loader that divides the data over all ranks of the job."""
    engine, optimizer, loader, scheduler = result
    if training_data is not None:
        loader = engine.training_dataloader = engine.deepspeed_io(training_data)
        if isinstance(engine, PipelineEngine):
            # As DeepSpeed does, which leaves the loader itself to a stage in the middle.
            engine.set_dataloader(RepeatingLoader(loader))
            loader = engine.training_dataloader
    return engine, optimizer, loader, scheduler


def initialize_if_asked(original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Call `original`, DeepSpeed's own `initialize`, and attach to the engine if its configuration has the section.

    Configurations without the section are passed to DeepSpeed unchanged, with a warning if the engine has gradients to
    reduce. Engines without an optimizer (evaluation, reference models) are left unchanged, because they have no
    gradients. Under ZeRO 3 they are sharded within islands or nodes, too.
    """
    call = _bind(original, args, options)
    source = _configuration(call)
    ds_config = {} if source is None else read_ds_config(source)
    # As `DeepSpeedEngine.optimizer_name` tells.
    makes_optimizer = bool(call.get("optimizer")) or "type" in (ds_config.get("optimizer") or {})
    if SECTION in ds_config and makes_optimizer:
        return _initialize(original, call, ds_config, wanted=has_optimizer)
    division = _division_of_shards(ds_config)
    if division is not None:
        return _initialize(original, call, {**ds_config, SECTION: division}, wanted=has_optimizer)
    result = original(*args, **options)
    with _destroyed_on_failure(result[0]):
        check_division(result[0])
    warn_of_uncompressed(result[0], ds_config)
    return result


def _division_of_shards(ds_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the part of the section that divides the shards of ZeRO 3; None if there are none, or no section.

    Other keys may contradict the rest of a file that has been changed for an engine without an optimizer: TRL sets
    stage 0 in that of a reference model.
    """
    section = ds_config.get(SECTION) or {}
    parallelism, islands = section.get("parallelism") or {}, section.get("islands") or {}
    if (ds_config.get("zero_optimization") or {}).get("stage", parallelism.get("zero_stage")) != 3 or not section:
        return None
    division = {"gradients": {"method": "none"}, "parallelism": parallelism}
    if islands and islands.get("elastic") is None:
        division["islands"] = {key: islands[key] for key in ("size", "by_host") if key in islands}
    return division


def zero_init_arguments(original: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.zero.Init` by name, with the group to shard over if the job is divided.

    ZeRO 3 then shards parameters over the ranks of this island or node, as the engine does later. A group that the
    program passes stays. The weights of the first island or node are copied to the others when the engine is made.

    Args:
        original: `deepspeed.zero.Init.__init__`.
        args: the positional arguments of a call, the first one being the instance.
        options: the keyword arguments.

    Raises:
        ConfigError: the section is invalid, or the ranks of the job cannot be divided in this way.
    """
    call = _bind(original, args, options)
    source = next((given for given in (call.get("config_dict_or_path"), call.get("config")) if given is not None), None)
    grouped = any(call.get(name) is not None for name in ("data_parallel_group", "sequence_data_parallel_group"))
    ds_config = {} if source is None or grouped or not call.get("enabled", True) else read_ds_config(source)
    if SECTION not in ds_config:
        return call
    config = parse_section(ds_config)
    unit = make_unit(config, expand(ds_config, config))
    return call if unit is None else {**call, "data_parallel_group": unit.data}
