"""Checks of `weights` and `ownership` against the rest of the file."""

from collections.abc import Iterator

from deepspeed_compress.config.places import BlockwiseWeights, CompressedWeights
from deepspeed_compress.config.problems import Configuration, problem, show
from deepspeed_compress.diagnostics import Diagnostic, Path, pointer


def within_file(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that compressed weights are gathered, and in a way that the method and its keys support.

    ZeRO 1 and 2, and the bf16 optimizer of pipelines, gather updated weights, whose differences are sent. ZeRO 3
    gathers weights of which no rank keeps a copy, so the weights themselves are rounded, which needs more bits.
    """
    weights, stage, place = configuration.section.weights, configuration.stage, configuration.stage_place
    pipeline = configuration.parallelism.pipeline
    if stage == 3 and any(phase.weights for phase in configuration.section.schedule.phases):
        what = (
            f"weights in phases cannot be combined with {place}: 3, where the rounding of weights is fixed for a whole "
            "run (allowed: no weights in phases)"
        )
        yield problem(("schedule", "phases"), what, "gradients only")
    if not isinstance(weights, CompressedWeights):
        return
    if stage == 0 and not (pipeline > 1 and _may_be_bf16(configuration)):
        what = (
            f'method "{weights.method}" cannot be combined with {place}: 0, because every rank then updates all '
            "weights by itself (allowed: stages 1, 2 and 3; pipelines in bf16)"
        )
        instead = f'"method": "none", or another stage at {place}'
        if _may_be_bf16(configuration):
            instead += ', or the stages of the pipeline as "parallelism": {"pipeline": 2}'
        yield problem(("weights",), what, instead)
    if stage == 3 and not (
        isinstance(weights, BlockwiseWeights) and weights.bits >= 4 and weights.rounding == "nearest"
    ):
        what = (
            f"{show(weights.model_dump(include={'method', 'bits', 'rounding'}))} cannot be combined with {place}: 3, "
            "where the weights themselves are rounded instead of their differences (allowed: blockwise, 8 or 4 bits, "
            "nearest)"
        )
        yield problem(("weights",), what, '"method": "blockwise", "bits": 8, "rounding": "nearest"')
    if weights.overlap and stage == 3:
        what = f"true has no effect with {place}: 3, which prefetches weights itself (allowed: false)"
        yield problem(("weights", "overlap"), what, f"false, or 1 or 2 at {place}")
    if weights.overlap and pipeline > 1:
        what = (
            f"true cannot be combined with /deepspeed_compress/parallelism/pipeline: {pipeline}, whose tied layers run "
            "without being called (allowed: false)"
        )
        yield problem(("weights", "overlap"), what, 'false, or "pipeline": 1')
    if weights.frozen and stage != 3:
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
