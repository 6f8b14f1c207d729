"""Features of DeepSpeed that the file requests, and that compression does not support.

The engine would be refused when compression is attached (`backends.deepspeed.limits`); this reports it earlier.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.native import value_at
from deepspeed_compress.config.problems import Configuration, show
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write

_ZERO = "zero_optimization"
_OWN_GATHERS: Mapping[str, tuple[int, str]] = {
    "zero_quantized_weights": (False, "ZeRO++ quantizes weights already"),
    "zero_quantized_nontrainable_weights": (False, "ZeRO++ quantizes frozen weights already"),
    "stage3_use_all_reduce_for_fetch_params": (False, "weights that are fetched by an all-reduce cannot be compressed"),
    "zero_hpz_partition_size": (1, "ZeRO++ gathers weights from a second copy"),
}
"""Ways to gather weights in ZeRO 3, which other stages ignore: the value that turns each off, and why it is refused."""


def gathers_by_itself(ds_config: Mapping[str, Any]) -> bool:
    """Return True if weights cannot be compressed under ZeRO 3, because DeepSpeed gathers them in another way."""
    return any(_is_on(value_at(ds_config, (_ZERO, key)), off) for key, (off, _) in _OWN_GATHERS.items())


def _is_on(value: object, off: object) -> bool:
    return value not in (None, "auto", 0, off)


def _gathers_weights(configuration: Configuration) -> bool:
    return configuration.stage == 3 and configuration.section.weights.method != "none"


def _always(configuration: Configuration) -> bool:
    return True


_Feature = tuple[Path, object, Callable[[Configuration], bool], str, str]
_FEATURES: tuple[_Feature, ...] = (
    *(
        ((_ZERO, key), off, _gathers_weights, why, f'{show(off)}, or {SECTION}.weights.method "none"')
        for key, (off, why) in _OWN_GATHERS.items()
    ),
    (
        (_ZERO, "zero_hpz_partition_size"),
        1,
        lambda configuration: configuration.divides_job,
        "ZeRO++ would gather weights across islands, which differ",
        f"1, or no {SECTION}.islands",
    ),
    ((_ZERO, "zero_quantized_gradients"), False, _always, "ZeRO++ quantizes gradients already", "false"),
    (
        (_ZERO, "zenflow"),
        None,
        _always,
        "ZenFlow reduces gradients on a code path of its own",
        "nothing: remove the key",
    ),
    (
        (_ZERO, "offload_optimizer", "super_offload"),
        False,
        _always,
        "SuperOffload reduces gradients on a code path of its own",
        "false",
    ),
    (
        ("compile", "deepcompile"),
        False,
        _always,
        "DeepCompile reduces gradients inside the compiled graph",
        "false",
    ),
)
"""Place of each feature, value that turns it off, settings that it disturbs, reason, and what to write instead."""


def features(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find features that reduce gradients or gather weights in incompressible ways, if anything acts on them."""
    if not configuration.compresses and configuration.parallelism.shard_within is None:
        return
    for path, off, disturbs, why, instead in _FEATURES:
        value = value_at(configuration.ds_config, path)
        if _is_on(value, off) and disturbs(configuration):
            what = f"{show(value)} cannot be combined with {pointer((SECTION,))}: {why} (allowed: {show(off)})"
            yield Diagnostic(at(*path), what, write(instead))


AUTOCAST: Path = ("torch_autocast", "dtype")


def scaler_without_zero(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that torch's gradient scaler is not used without ZeRO by ranks that hold different parameters.

    Each of them would skip steps on its own.
    """
    if not configuration.compresses and configuration.parallelism.shard_within is None:
        return
    dtype = value_at(configuration.ds_config, AUTOCAST)
    scaled = (
        configuration.native("torch_autocast", "enabled") is True
        and configuration.native("fp16", "enabled") is not True
        and dtype in ("fp16", "float16", "half", "torch.float16")
    )
    if scaled and configuration.stage == 0 and (configuration.parallelism.pipeline > 1 or configuration.tensor > 1):
        what = (
            f"{show(dtype)} without ZeRO gives each pipeline stage and tensor-parallel rank a loss scale of its own, "
            "so some may skip a step that others take (allowed: bfloat16)"
        )
        yield Diagnostic(at(*AUTOCAST), what, write('"bfloat16", or ZeRO stage 1 to 3'))
