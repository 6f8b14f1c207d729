"""Checks of `weights` and `ownership` against the rest of the file, and of features of DeepSpeed that it requests.

The engine would be refused when compression is attached (`backends.deepspeed.limits`); this reports it earlier.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.models import SECTION
from deepspeed_compress.config.places import BlockwiseWeights, CompressedWeights
from deepspeed_compress.config.problems import Configuration, problem, show, value_at
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write


def weights(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that compressed weights are gathered, and in a way that the method and its keys support.

    ZeRO 1 and 2, and the bf16 optimizer of pipelines, gather updated weights, whose differences are sent. ZeRO 3
    gathers weights of which no rank keeps a copy, so the weights themselves are rounded, which needs more bits.
    """
    chosen, stage, place = configuration.section.weights, configuration.stage, configuration.stage_place
    pipeline = configuration.parallelism.pipeline
    if stage == 3 and any(phase.weights for phase in configuration.section.schedule.phases):
        what = (
            f"weights in phases cannot be combined with {place}: 3, where the rounding of weights is fixed for a whole "
            "run (allowed: no weights in phases)"
        )
        yield problem(("schedule", "phases"), what, "gradients only")
    if not isinstance(chosen, CompressedWeights):
        return
    if stage == 0 and not (pipeline > 1 and _may_be_bf16(configuration)):
        what = (
            f'method "{chosen.method}" cannot be combined with {place}: 0, because every rank then updates all '
            "weights by itself (allowed: stages 1, 2 and 3; pipelines in bf16)"
        )
        instead = f'"method": "none", or another stage at {place}'
        if _may_be_bf16(configuration):
            instead += ', or the stages of the pipeline as "parallelism": {"pipeline": 2}'
        yield problem(("weights",), what, instead)
    if stage == 3 and not (isinstance(chosen, BlockwiseWeights) and chosen.bits >= 4 and chosen.rounding == "nearest"):
        what = (
            f"{show(chosen.model_dump(include={'method', 'bits', 'rounding'}))} cannot be combined with {place}: 3, "
            "where the weights themselves are rounded instead of their differences (allowed: blockwise, 8 or 4 bits, "
            "nearest)"
        )
        yield problem(("weights",), what, '"method": "blockwise", "bits": 8, "rounding": "nearest"')
    if chosen.overlap and stage == 3:
        what = f"true has no effect with {place}: 3, which prefetches weights itself (allowed: false)"
        yield problem(("weights", "overlap"), what, f"false, or 1 or 2 at {place}")
    if chosen.overlap and pipeline > 1:
        what = (
            f"true cannot be combined with /deepspeed_compress/parallelism/pipeline: {pipeline}, whose tied layers run "
            "without being called (allowed: false)"
        )
        yield problem(("weights", "overlap"), what, 'false, or "pipeline": 1')
    if chosen.frozen and stage != 3:
        what = f"true has no effect with {place}: {stage}, which never sends frozen weights (allowed: false)"
        yield problem(("weights", "frozen"), what, f"false, or 3 at {place}")


def _may_be_bf16(configuration: Configuration) -> bool:
    """Return True if the model may be in bf16, so that a pipeline's optimizer gathers weights under ZeRO 0 too."""
    settings = configuration.ds_config.get("bf16", configuration.ds_config.get("bfloat16"))
    return isinstance(settings, dict) and bool(settings.get("enabled", False))


_CONFLICTS_WITH_OWNERSHIP = ("round_robin_gradients", "elastic_checkpoint", "parameter_alignment")
"""Keys of `zero_optimization` with which DeepSpeed orders, pads or saves its flat buffers differently."""
_OPTIMIZER: Path = ("optimizer", "type")


def ownership(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that `ownership` applies: only to the flat buffers of ZeRO 1 and 2, in DeepSpeed's default layout."""
    chosen, stage, place = configuration.section.ownership, configuration.stage, configuration.stage_place
    if chosen == "contiguous":
        return
    what = f'"{chosen}" cannot be combined with '
    if stage not in (1, 2):
        why = f"{place}: {stage}, where no rank owns a slice of the model (allowed: stages 1 and 2)"
        yield problem(("ownership",), what + why, f'"contiguous", or 1 or 2 at {place}')
    if not configuration.compresses:
        why = 'method "none", which leaves everything to DeepSpeed (allowed: "contiguous")'
        yield problem(("ownership",), what + why, '"contiguous", or another method')
    for key in _CONFLICTS_WITH_OWNERSHIP:
        value, other = configuration.native("zero_optimization", key), pointer(("zero_optimization", key))
        if value:
            why = f"{other}: {show(value)}, which changes the layout of the flat buffers (allowed: false)"
            yield problem(("ownership",), what + why, f'"contiguous", or false at {other}')
    if str(configuration.native(*map(str, _OPTIMIZER))).lower() == "muon":
        why = f'{pointer(_OPTIMIZER)}: "Muon", whose momentum has whole matrices on several ranks (allowed: others)'
        yield problem(("ownership",), what + why, f'"contiguous", or "AdamW" at {pointer(_OPTIMIZER)}')


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


_FEATURES: Mapping[Path, tuple[object, str]] = {
    (_ZERO, "zero_quantized_gradients"): (False, "ZeRO++ quantizes gradients already"),
    (_ZERO, "zenflow"): (None, "ZenFlow reduces gradients on a code path of its own"),
    (_ZERO, "offload_optimizer", "super_offload"): (False, "SuperOffload reduces gradients on a code path of its own"),
    ("compile", "deepcompile"): (False, "DeepCompile reduces gradients inside the compiled graph"),
}
"""Places of features that reduce gradients in incompressible ways, with the value that turns each off, and why."""


def features(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find features that reduce gradients or gather weights in incompressible ways, if anything acts on them."""
    if not configuration.compresses and configuration.parallelism.shard_within is None:
        return
    for path, (off, why) in _FEATURES.items():
        yield from _in_use(configuration, path, off, why, show(off))
    if configuration.stage == 3 and configuration.section.weights.method != "none":
        for key, (off, why) in _OWN_GATHERS.items():
            yield from _in_use(
                configuration, (_ZERO, key), off, why, f'{show(off)}, or {SECTION}.weights.method "none"'
            )
    elif configuration.divides_job:
        why = "ZeRO++ would gather weights across islands, which differ"
        yield from _in_use(configuration, (_ZERO, "zero_hpz_partition_size"), 1, why, f"1, or no {SECTION}.islands")


def _in_use(configuration: Configuration, path: Path, off: object, why: str, instead: str) -> Iterator[Diagnostic]:
    value = value_at(configuration.ds_config, path)
    if _is_on(value, off):
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
