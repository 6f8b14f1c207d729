"""Starting the real DeepSpeed, or the program that reads its configuration first, and the outcome."""

import contextlib
import io
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tests.support.forks import RankError, run_forks


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of a start: tracebacks of the ranks that failed, and what rank 0 logged."""

    error: str
    log: str


def start(text: str, context: Mapping[str, Any]) -> Outcome:
    """Start a job of `context["world_size"]` ranks with the configuration `text`, unless the outcome is known."""
    return _outcome(text, json.dumps(context, sort_keys=True))


@cache
def _outcome(text: str, json_context: str) -> Outcome:
    context = json.loads(json_context)
    ranks = int(context.get("world_size", 1))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "ds_config.json")
        path.write_text(text, encoding="utf-8")
        (path.parent / "configs").symlink_to(Path(__file__).parents[3] / "configs")
        try:
            logs = run_forks(ranks, _start, str(path), context)
        except RankError as error:
            return Outcome(str(error), "")
    return Outcome("", logs[0])


def _start(rank: int, path: str, context: dict[str, Any]) -> str:
    """Run one rank, and return its log."""
    os.environ |= {"CROSS_SIZE": "1", "CROSS_RANK": "0"}  # the launcher of DeepSpeed sets these, too
    # An example may name a directory, in which an engine writes, and a configuration of this repository.
    os.chdir(Path(path).parent)
    log = io.StringIO()
    with _logging_to(log), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(log):
        starter = _STARTERS[context.get("framework")]
        starter(path, context)
    return log.getvalue()


@contextlib.contextmanager
def _logging_to(stream: io.StringIO) -> Iterator[None]:
    handler = logging.StreamHandler(stream)
    loggers = [logging.getLogger("DeepSpeed"), logging.getLogger("py.warnings")]
    logging.captureWarnings(True)
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _initialize(path: str, context: dict[str, Any]) -> None:
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    import deepspeed_compress

    # On CPUs DeepSpeed knows no fp16, though its start needs none: without this, no rule about it could be proved.
    get_accelerator().is_fp16_supported = lambda: True
    data = _read(path)
    module = _module(data, context)
    initialize = deepspeed_compress.initialize if "deepspeed_compress" in data else deepspeed.initialize
    initialize(model=module, model_parameters=list(module.parameters()), config=path)


def _read(path: str) -> dict[str, Any]:
    import hjson  # type: ignore[import-untyped]

    with contextlib.suppress(ValueError):
        data = hjson.loads(Path(path).read_text(encoding="utf-8"))
        return data if isinstance(data, dict) else {}
    return {}


def _module(data: dict[str, Any], context: dict[str, Any]) -> Any:
    import torch

    stages = _stages(data, context)
    if stages is not None:
        return _pipeline(stages)
    if "model" in context and "hidden_size" in context["model"] and "vocab_size" not in context["model"]:
        return _language_model(context["model"])
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))


def _stages(data: dict[str, Any], context: dict[str, Any]) -> int | None:
    """Return the number of pipeline stages of a configuration, or None. The default is one per rank."""
    ours = data.get("deepspeed_compress")
    parallelism = ours.get("parallelism") if isinstance(ours, dict) else None
    if isinstance(parallelism, dict) and "pipeline" in parallelism:
        return int(parallelism["pipeline"])
    pipeline = data.get("pipeline")
    return int(pipeline.get("stages", context["world_size"])) if isinstance(pipeline, dict) else None


def _pipeline(stages: int) -> Any:
    import deepspeed
    import torch

    deepspeed.init_distributed("gloo")
    module = [torch.nn.Linear(8, 8) for _ in range(4)]
    return deepspeed.PipelineModule(module, num_stages=stages, loss_fn=torch.nn.functional.mse_loss)


def _language_model(config: Mapping[str, Any]) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(**{"vocab_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, **config})
    )


def _transformers(path: str, context: dict[str, Any]) -> None:
    """Start as the Trainer of transformers does: process its arguments, then call Accelerate."""
    from transformers import TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(output_dir=directory, use_cpu=True, report_to=[])
    config = HfTrainerDeepSpeedConfig(path)
    config.trainer_config_process(arguments)
    module = _module({}, context)
    config.trainer_config_finalize(arguments, module, 100)
    _prepare(config, module)


def _accelerate(path: str, context: dict[str, Any]) -> None:
    if "deepspeed_config" in _read(path):
        _launch(path)
    else:
        _prepare(path, _module({}, context))


def _launch(path: str) -> None:
    """Start as `accelerate launch` does with its own configuration."""
    from accelerate.commands import launch  # type: ignore[import-untyped]
    from accelerate.utils import DeepSpeedPlugin
    from accelerate.utils.launch import prepare_deepspeed_cmd_env  # type: ignore[import-untyped]

    arguments = launch.launch_command_parser().parse_args(["--config_file", path, "program.py"])
    arguments, defaults, has_precision = launch._validate_launch_command(arguments)
    fields = [*defaults.deepspeed_config, *(["mixed_precision"] if has_precision else [])]
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    _, environment = prepare_deepspeed_cmd_env(arguments)
    os.environ |= {name: value for name, value in environment.items() if name.startswith("ACCELERATE_")}
    DeepSpeedPlugin()


def _prepare(config: Any, module: Any) -> None:
    """Fill in values as Accelerator.prepare does, and start DeepSpeed."""
    import deepspeed
    from accelerate.utils import DeepSpeedPlugin  # type: ignore[import-untyped]

    plugin = DeepSpeedPlugin(hf_ds_config=config)
    plugin.set_mixed_precision("no")
    batch = plugin.get_value("train_micro_batch_size_per_gpu")
    known = {"train_micro_batch_size_per_gpu": batch, "train_batch_size": batch, "gradient_clipping": 1.0}
    plugin.deepspeed_config_process(must_match=False, **known)
    deepspeed.initialize(model=module, model_parameters=list(module.parameters()), config=plugin.deepspeed_config)


_STARTERS: Mapping[str | None, Callable[[str, dict[str, Any]], None]] = {
    None: _initialize,
    "deepspeed": _initialize,
    "hf": _transformers,
    "accelerate": _accelerate,
}


def read_configuration(data: dict[str, Any]) -> str:
    """Return all settings that DeepSpeed reads from a configuration, as text."""
    return run_forks(1, _read_configuration, data)[0]


def _read_configuration(rank: int, data: dict[str, Any]) -> str:
    from deepspeed.runtime.config import DeepSpeedConfig

    made = vars(DeepSpeedConfig(data))
    return "\n".join(f"{name}: {_shown(value)}" for name, value in sorted(made.items()) if name != "_param_dict")


def _shown(value: object) -> str:
    """Return the text of a value, without memory addresses."""
    return str(value) if isinstance(value, BaseModel) or not hasattr(value, "__dict__") else str(vars(value))
