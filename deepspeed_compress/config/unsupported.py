"""Features of DeepSpeed that the file requests, and that compression does not support.

The engine would be refused when compression is attached (`backends.deepspeed.limits`); this reports it earlier.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE, TENSOR, value_at
from deepspeed_compress.config.problems import show
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write


def find_unsupported(ds_config: Mapping[str, Any], section: CompressConfig | None) -> list[Diagnostic]:
    """Return the requested DeepSpeed features that reduce gradients or gather weights in incompressible ways.

    Empty if `section` neither compresses nor shards within nodes. None stands for an invalid section, and is treated as
    the defaults.
    """
    section = CompressConfig() if section is None else section
    sharded = section.parallelism is not None and section.parallelism.shard_within is not None
    if section.gradients.method == section.weights.method == "none" and not sharded:
        return []
    stage = STAGE.effective(ds_config, section.parallelism or Parallelism())
    problems = [
        Diagnostic(at(*path), f"{show(value)} cannot be combined with {pointer((SECTION,))}: {why}", write(instead))
        for path, applies, why, instead in (*(_GATHERS_OF_STAGE_3 if stage == 3 else ()), *_UNSUPPORTED)
        if applies(value := value_at(ds_config, path), section)
    ]
    return [*problems, *_scaler_without_zero(ds_config, section)]


def _divided(section: CompressConfig) -> bool:
    """Return True if one job is divided into islands."""
    return section.islands is not None and section.islands.elastic is None


_ZERO = "zero_optimization"
_Unsupported = tuple[Path, Callable[[Any, CompressConfig], bool], str, str]
_GATHERS_OF_STAGE_3: tuple[_Unsupported, ...] = (
    (
        (_ZERO, "zero_quantized_weights"),
        lambda value, section: value is True and section.weights.method != "none",
        "ZeRO++ quantizes weights already (allowed: false)",
        f'false, or {SECTION}.weights.method "none"',
    ),
    (
        (_ZERO, "zero_quantized_nontrainable_weights"),
        lambda value, section: value is True and section.weights.method != "none",
        "ZeRO++ quantizes frozen weights already (allowed: false)",
        f'false, or {SECTION}.weights.method "none"',
    ),
    (
        (_ZERO, "stage3_use_all_reduce_for_fetch_params"),
        lambda value, section: value is True and section.weights.method != "none",
        "weights that are fetched by an all-reduce cannot be compressed (allowed: false)",
        f'false, or {SECTION}.weights.method "none"',
    ),
    (
        (_ZERO, "zero_hpz_partition_size"),
        lambda value, section: isinstance(value, int) and value > 1 and section.weights.method != "none",
        "ZeRO++ gathers weights from a second copy (allowed: 1)",
        f'1, or {SECTION}.weights.method "none"',
    ),
)
"""Ways to gather weights in ZeRO 3, which other stages ignore."""
_UNSUPPORTED: tuple[_Unsupported, ...] = (
    (
        (_ZERO, "zero_quantized_gradients"),
        lambda value, _: value is True,
        "ZeRO++ quantizes gradients already (allowed: false)",
        "false",
    ),
    (
        (_ZERO, "zero_hpz_partition_size"),
        lambda value, section: isinstance(value, int) and value > 1 and _divided(section),
        "ZeRO++ would gather weights across islands, which differ (allowed: 1)",
        f"1, or no {SECTION}.islands",
    ),
    (
        (_ZERO, "zenflow"),
        lambda value, _: isinstance(value, dict),
        "ZenFlow reduces gradients on a code path of its own (allowed: null)",
        "nothing: remove the key",
    ),
    (
        (_ZERO, "offload_optimizer", "super_offload"),
        lambda value, _: value is True,
        "SuperOffload reduces gradients on a code path of its own (allowed: false)",
        "false",
    ),
    (
        ("compile", "deepcompile"),
        lambda value, _: value is True,
        "DeepCompile reduces gradients inside the compiled graph (allowed: false)",
        "false",
    ),
)
"""Place of each feature, predicate on its value, reason, and what to write instead."""


_AUTOCAST: Path = ("torch_autocast", "dtype")


def _scaler_without_zero(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that torch's gradient scaler is not used without ZeRO by ranks that hold different parameters.

    Each of them would skip steps on its own.
    """
    parallelism = section.parallelism or Parallelism()
    dtype, stage = value_at(ds_config, _AUTOCAST), STAGE.effective(ds_config, parallelism)
    split = parallelism.pipeline > 1 or TENSOR.effective(ds_config, parallelism) > 1
    on = split and (
        value_at(ds_config, ("torch_autocast", "enabled")) is True
        and value_at(ds_config, ("fp16", "enabled")) is not True
    )
    if on and stage == 0 and dtype in ("fp16", "float16", "half", "torch.float16"):
        what = (
            f"{show(dtype)} without ZeRO gives each pipeline stage and tensor-parallel rank a loss scale of its own, "
            "so some may skip a step that others take (allowed: bfloat16)"
        )
        yield Diagnostic(at(*_AUTOCAST), what, write('"bfloat16", or ZeRO stage 1 to 3'))
