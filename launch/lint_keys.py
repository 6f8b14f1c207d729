"""Write the linter's table of keys: every key that the installed DeepSpeed knows, by section.

Run `python -m launch.lint_keys [FILE]`. The linter reads the file and never imports DeepSpeed. Sections that are
pydantic models list their fields. For all others, DeepSpeed receives a configuration that records which keys are read,
and with which defaults.
"""

import enum
import inspect
import json
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

Key = dict[str, Any]
Section = dict[str, Any]

FILE = Path(__file__).parents[1] / "deepspeed_compress" / "tools" / "lint" / "keys.json"

_KINDS: Mapping[object, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    str: "string",
    Path: "string",
    list: "array",
    tuple: "array",
    dict: "object",
    type(None): "null",
}
_LIMITS = {"gt": "above", "ge": "least", "lt": "below", "le": "most"}

_READ_ELSEWHERE: Mapping[str, Mapping[str, Key]] = {
    "": {
        "data_parallel_size": {"kinds": ["integer", "null"]},  # deepspeed/__init__.py
        "sequence_parallel_size": {"kinds": ["integer"]},  # deepspeed/__init__.py
        "deepspeed_moe_layer_cls_names": {},  # accelerate/utils/dataclasses.py
        "inference": {"kinds": ["object"]},  # transformers/integrations/deepspeed.py
        "msamp": {"kinds": ["object"]},  # accelerate/utils/dataclasses.py
    },
    "optimizer": {"params": {"kinds": ["object"]}},
    "scheduler": {"params": {"kinds": ["object"]}},
    "pipeline": {"use_reentrant": {"kinds": ["boolean"]}},  # runtime/pipe/engine.py
}
"""Keys that are read after the configuration has been parsed."""

_BATCH: Key = {"kinds": ["integer", "null"]}
_UNTYPED: Mapping[str, Mapping[str, Key]] = {
    "": {
        "train_batch_size": _BATCH,
        "train_micro_batch_size_per_gpu": _BATCH,
        "gradient_accumulation_steps": _BATCH,
        "steps_per_print": {"kinds": ["integer", "null"]},
        "communication_data_type": {"kinds": ["string", "null"]},
        "vocabulary_size": {"kinds": ["integer", "null"]},
        "log_level": {"kinds": ["string", "null"]},
        "datastates_ckpt": {},
    },
    "checkpoint": {"tag_validation": {"kinds": ["string"]}},
    "checkpoint/writer": {"type": {"kinds": ["string"]}},
    "data_types": {"keep_in_fp32_modules": {"kinds": ["string", "array"]}},
    "expert_parallel": {
        "top_k": {"kinds": ["integer", "string"]},
        "routed_scaling_factor": {"kinds": ["integer", "number", "string"]},
    },
}
"""Types of keys whose defaults do not determine them."""

_SEEDS: Mapping[str, Mapping[str, Any]] = {
    "optimizer": {"type": "AdamW"},
    "scheduler": {"type": "WarmupLR"},
    "activation_checkpointing": {},
    "flops_profiler": {},
    "aio": {},
    "checkpoint": {},
    "checkpoint/writer": {},
    "checkpoint/parallel_write": {},
    "data_types": {},
    "torch_autocast": {"dtype": "bf16", "lower_precision_safe_modules": []},
    "autotuning": {},
    "autotuning/model_info": {},
    "data_efficiency": {},
    "data_efficiency/data_sampling": {},
    "data_efficiency/data_routing": {},
    "expert_parallel": {"enabled": False},
    "timers": {},
}
"""Sections without a model, with values that make DeepSpeed read all of their keys."""


class RecordingConfig(dict[str, Any]):
    """Configuration that records the keys that are read, with the default if there is one."""

    def __init__(self, content: Mapping[str, Any], asked: dict[str, Key]) -> None:
        super().__init__(content)
        self.asked = asked

    def __copy__(self) -> "RecordingConfig":
        return self

    def __contains__(self, key: object) -> bool:
        self.asked.setdefault(str(key), {})
        return super().__contains__(key)

    def __getitem__(self, key: str) -> Any:
        self.asked.setdefault(key, {})
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        kind = _KINDS.get(type(default))
        if kind is not None and kind != "null":
            self.asked[key] = {"kinds": ["integer", "number"] if kind == "number" else [kind]}
        self.asked.setdefault(key, {})
        return super().get(key, default)

    def keys(self) -> Any:
        return self


def generate() -> dict[str, Any]:
    """Return the content of keys.json."""
    import deepspeed
    from deepspeed.runtime import config

    sections = {name: _section("ignored", keys) for name, keys in _recorded_sections().items()}
    sections["pipeline"] = _section("ignored", {key: {} for key in config.get_pipeline_config({})})
    for name, model in _models():
        sections |= dict(_of_model(name, model))
    for name, keys in (*_READ_ELSEWHERE.items(), *_UNTYPED.items()):
        sections[name]["keys"] = dict(sorted({**sections[name]["keys"], **keys}.items()))
    removed = {"": config._REMOVED_TOP_LEVEL_CONFIG_KEYS, "zero_optimization": config._REMOVED_ZERO_CONFIG_KEYS}
    for name, keys in removed.items():
        for key in keys:
            sections[name]["keys"].pop(key, None)
    for name in sections:
        _add_to_parent(sections, name)
    return {
        "deepspeed": deepspeed.__version__,
        "sections": dict(sorted(sections.items())),
        "removed": {name: sorted(keys) for name, keys in removed.items()},
        "optimizers": _optimizers(),
        "untested_optimizers": _untested(),
        "schedulers": _schedulers(),
    }


def _section(unknown: str, keys: Mapping[str, Key]) -> Section:
    return {"unknown": unknown, "keys": dict(sorted(keys.items()))}


def _add_to_parent(sections: dict[str, Section], name: str) -> None:
    parent, _, key = name.rpartition("/")
    if name and parent in sections:
        keys = sections[parent]["keys"]
        known = keys.get(key, {})
        keys[key] = {**known, "kinds": known.get("kinds") or ["object"]}
        sections[parent]["keys"] = dict(sorted(keys.items()))


def _recorded_sections() -> dict[str, dict[str, Key]]:
    from deepspeed.runtime.config import DeepSpeedConfig

    asked: dict[str, dict[str, Key]] = {name: {} for name in ("", *_SEEDS)}
    root = RecordingConfig({"train_batch_size": 1}, asked[""])
    places = {"": root}
    for name, content in _SEEDS.items():
        parent, _, key = name.rpartition("/")
        places[name] = RecordingConfig(content, asked[name])
        dict.__setitem__(places[parent], key, places[name])
    DeepSpeedConfig(root)
    return asked


def _models() -> Iterator[tuple[str, type]]:
    """Yield the sections that are pydantic models."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.compile.config import CompileConfig
    from deepspeed.inference.config import WeightQuantConfig
    from deepspeed.monitor import config as monitor
    from deepspeed.runtime.config import HybridEngineConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
    from deepspeed.utils.config import DeepSpeedThroughputTimerConfig

    yield "zero_optimization", DeepSpeedZeroConfig
    yield "fp16", DeepSpeedFP16Config
    yield "bf16", DeepSpeedBF16Config
    yield "bfloat16", DeepSpeedBF16Config
    yield "tensor_parallel", TPTrainingConfig
    yield "comms_logger", CommsLoggerConfig
    yield "compile", CompileConfig
    yield "weight_quantization", WeightQuantConfig
    yield "hybrid_engine", HybridEngineConfig
    yield "timers/throughput", DeepSpeedThroughputTimerConfig
    for name, field in monitor.DeepSpeedMonitorConfig.model_fields.items():
        yield name, field.annotation


def _of_model(name: str, model: Any) -> Iterator[tuple[str, Section]]:
    """Yield the section of a model and those of the models in it."""
    keys: dict[str, Key] = {}
    for field_name, field in model.model_fields.items():
        key = _annotated(field.annotation) | _limits(field.metadata)
        extra = field.json_schema_extra or {}
        if extra.get("deprecated"):
            key["deprecated"] = extra.get("new_param", "")
        keys[field.alias or field_name] = key
        if field.alias:
            keys[field_name] = {**key, "alias": field.alias}
        for inner in _inner_models(field.annotation):
            yield from _of_model(f"{name}/{field.alias or field_name}", inner)
    yield name, _section("refused", keys)


def _alternatives(annotation: Any) -> tuple[Any, ...]:
    union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return typing.get_args(annotation) if union else (annotation,)


def _inner_models(annotation: Any) -> list[Any]:
    return [part for part in _alternatives(annotation) if hasattr(part, "model_fields")]


def _annotated(annotation: Any) -> Key:
    """Return the kinds and choices of a type. Types that JSON cannot represent are left out."""
    key: Key = {"kinds": []}
    for part in _alternatives(annotation):
        origin = typing.get_origin(part) or part
        if origin is typing.Literal:
            choices, kind = list(typing.get_args(part)), "string"
        elif inspect.isclass(origin) and issubclass(origin, enum.Enum):
            choices = list(dict.fromkeys(member.value for member in origin))
            kind = "integer" if issubclass(origin, int) else "string"
        else:
            choices, kind = [], "object" if hasattr(part, "model_fields") else _KINDS.get(origin, "any")
        key["kinds"] += [kind] if kind != "number" else ["integer", "number"]
        if choices:
            key["choices"] = choices
    return key


def _limits(metadata: list[Any]) -> Key:
    limits = {
        ours: getattr(limit, theirs) for limit in metadata for theirs, ours in _LIMITS.items() if hasattr(limit, theirs)
    }
    return {"limits": limits} if limits else {}


def _parameters(function: Any, *, without: tuple[str, ...] = ()) -> dict[str, bool]:
    """Return the names of a constructor's parameters, and whether each is required."""
    given = {"self", "params", "model_params", "optimizer", *without}
    return {
        name: parameter.default is inspect.Parameter.empty
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in given and parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }


def _optimizers() -> dict[str, list[str]]:
    """Return the names that `optimizer.type` may have, with the keys of `params`.

    "NAME+offload" is the optimizer on the CPU, "NAME+torch" the one with `torch_adam`. DeepSpeed compares its own names
    in lower case and takes all others from torch.optim.
    """
    import torch
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS
    from deepspeed.runtime.engine import DeepSpeedEngine

    own = set(DEEPSPEED_OPTIMIZERS)
    popped = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    gpu = {*_parameters(FusedAdam), *popped}
    cpu = {*_parameters(DeepSpeedCPUAdam, without=("adamw_mode",)), *popped}
    muon = {*DeepSpeedEngine._MUON_HALF_KEYS, *DeepSpeedEngine._ADAM_HALF_KEYS, *popped, "muon_lr", "adam_lr"}
    torch_adam = {*_parameters(torch.optim.AdamW), *popped}
    found = {name: set(_parameters(found)) for name, found in _classes(torch.optim) if name.lower() not in own}
    for adam in ("adam", "adamw"):
        found |= {adam: gpu, f"{adam}+offload": cpu, f"{adam}+torch": torch_adam}
    found["muon"] = muon
    found |= {
        "adagrad": set(_parameters(torch.optim.Adagrad)),
        "adagrad+offload": set(_parameters(DeepSpeedCPUAdagrad)),
    }
    found |= {"lion": set(_parameters(FusedLion)), "lion+offload": set(_parameters(DeepSpeedCPULion))}
    found |= {
        "lamb": set(_parameters(FusedLamb)) - {"max_grad_norm"},
        "muadam": set(),
        "muadamw": set(),
        "musgd": set(),
    }
    return {name: sorted(keys) for name, keys in sorted(found.items())}


def _untested() -> list[str]:
    """Return the optimizers that ZeRO refuses unless `zero_allow_untested_optimizer` is true."""
    import torch
    from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS

    # DeepSpeed's Lamb and the optimizers of mup are missing from ZeRO's list.
    theirs = {name for name, found in _classes(torch.optim) if found not in ZERO_SUPPORTED_OPTIMIZERS}
    return sorted(theirs - {"Muon"} | {"lamb", "muadam", "muadamw", "musgd"})


def _schedulers() -> dict[str, dict[str, bool]]:
    """Return the names that `scheduler.type` may have, with the keys of `params` and whether each is required."""
    import torch
    from deepspeed.runtime import lr_schedules

    scheduler = torch.optim.lr_scheduler.LRScheduler
    theirs = dict(_classes(torch.optim.lr_scheduler, scheduler))
    ours = {name: getattr(lr_schedules, name) for name in lr_schedules.VALID_LR_SCHEDULES}
    return {name: _parameters(found) for name, found in sorted({**theirs, **ours}.items())}


def _classes(module: Any, base: type | None = None) -> Iterator[tuple[str, Any]]:
    import torch

    for name, found in vars(module).items():
        wanted = base or torch.optim.Optimizer
        if inspect.isclass(found) and issubclass(found, wanted) and found is not wanted and not name.startswith("_"):
            yield name, found


def text() -> str:
    """Return the text of the file, with one line per key."""
    return _lines(generate(), 4) + "\n"


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """Return `value` as JSON that is broken into lines down to `depth`."""
    if not isinstance(value, dict) or depth == 0:
        return json.dumps(value)
    inner = indent + " "
    rows = [f"{inner}{json.dumps(key)}: {_lines(child, depth - 1, inner)}" for key, child in value.items()]
    return "{\n" + ",\n".join(rows) + f"\n{indent}}}" if rows else "{}"


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else FILE).write_text(text(), encoding="utf-8")
