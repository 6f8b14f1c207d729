"""Settings that are valid one by one, but contradict each other or the rest of the file."""

from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.activation_problems import find_activation_mismatches, find_idle_activations
from deepspeed_compress.config.auto_problems import find_auto_contradictions
from deepspeed_compress.config.candidates import find_adaptive_problems, find_empty_choice
from deepspeed_compress.config.island_problems import find_island_contradictions, find_island_mismatches
from deepspeed_compress.config.methods import Model
from deepspeed_compress.config.models import SECTION, CompressConfig, Parallelism
from deepspeed_compress.config.native import STAGE, value_at
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import (
    BlockwiseWeights,
    CompressedGradients,
    CompressedWeights,
    ErrorFeedbackConfig,
    FeedbackGradients,
    GradientsConfig,
    LayeredGradients,
    PowerSGDGradients,
)
from deepspeed_compress.config.problems import problem, show
from deepspeed_compress.config.rollout_problems import find_rollout_contradictions
from deepspeed_compress.config.schedules import OWN_MOMENTUM, find_schedule_problems, find_unknown_length
from deepspeed_compress.config.sharding_problems import find_sharding_contradictions, find_sharding_mismatches
from deepspeed_compress.config.sparse_methods import BlockTopKConfig, SparseConfig
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write


def find_contradictions(section: CompressConfig) -> list[Diagnostic]:
    """Return the contradictions within `section`."""
    return [found for check in _CHECKS for found in check(section)]


def find_mismatches(
    ds_config: Mapping[str, Any], section: CompressConfig, world_size: int | None = None
) -> list[Diagnostic]:
    """Return the settings of `section` that contradict the rest of the file, or `world_size` ranks in total."""
    problems = [
        *_weights_not_gathered(ds_config, section),
        *_optimizer_momentum(ds_config, section),
        *find_unknown_length(ds_config, section),
        *find_empty_choice(ds_config, section),
        *_overlap_unavailable(ds_config, section),
        *_frozen_unavailable(ds_config, section),
        *_guard_needs_norms(ds_config, section),
        *_ownership_unavailable(ds_config, section),
        *find_island_mismatches(ds_config, section, world_size),
        *find_sharding_mismatches(ds_config, section, world_size),
        *find_activation_mismatches(ds_config, section),
    ]
    return problems + ([] if world_size is None else list(_uneven_nodes(section, world_size)))


def sparse_places(section: CompressConfig) -> Iterator[tuple[Path, SparseConfig]]:
    """Yield every method of `section` that has a density, with its place."""
    places: list[tuple[Path, Model]] = [(("gradients",), section.gradients), (("weights",), section.weights)]
    for path, method in [*places, *override_places(section)]:
        if isinstance(method, SparseConfig):
            yield path, method


def override_places(section: CompressConfig) -> Iterator[tuple[Path, Override]]:
    """Yield every override of `section`, with its place."""
    gradients = section.gradients
    for index, override in enumerate(gradients.overrides if isinstance(gradients, CompressedGradients) else ()):
        yield ("gradients", "overrides", index), override


def _delayed_without_feedback(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that error feedback keeps delayed gradients until they are sent; they wait in its residuals."""
    for path, override in override_places(section):
        forgets = _lossy_setting(section.gradients, override.every) if override.every > 1 else None
        if forgets:
            setting, instead = forgets
            what = f"{override.every} sums gradients over steps, but {setting} loses them (allowed: 1)"
            yield problem((*path, "every"), what, f"1, or {instead}")


def _lossy_setting(gradients: GradientsConfig, every: int) -> tuple[str, str] | None:
    """Return the setting that loses gradients within `every` steps, and what to write instead; None if none does."""
    if not isinstance(gradients, FeedbackGradients | PowerSGDGradients):
        # Other methods have a momentum, which always keeps them.
        return None
    feedback = gradients.error_feedback
    if feedback is None:
        return "error_feedback: null", '"error_feedback": {}'
    if not isinstance(feedback, ErrorFeedbackConfig):
        return None
    if feedback.decay < 1:
        return f"error_feedback/decay: {feedback.decay}", '"decay": 1.0'
    reset = feedback.reset_interval
    if reset is not None and reset % every:
        return f"error_feedback/reset_interval: {reset}", f'"reset_interval": {every * -(-reset // every)}'
    return None


def _group_beyond_block(section: CompressConfig) -> Iterator[Diagnostic]:
    for path, method in sparse_places(section):
        if isinstance(method, BlockTopKConfig) and method.group > method.block_size:
            what = f"{method.group} is more than block_size {method.block_size} (allowed: up to block_size)"
            yield problem((*path, "group"), what, f'{method.block_size}, or "block_size": {method.group}')


def _checkpoint_directory(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that automatic checkpoints have a directory, and that no key about them is without effect."""
    settings = section.checkpointing
    if settings is None:
        return
    if section.islands is not None and section.islands.elastic is None:
        what = (
            "cannot be combined with islands of one job, which write their files to several directories (allowed: "
            "one of the two)"
        )
        yield problem(("checkpointing",), what, 'no checkpointing, or islands with "elastic"')
    placed = [key for key in ("every", "resume", "save_on_sigterm") if getattr(settings, key)]
    if placed and settings.directory is None:
        what = f"the key is missing, but {placed[0]} needs it"
        yield problem(("checkpointing", "directory"), what, '"directory": "checkpoints"')
    if settings.memory is not None and settings.directory is None:
        what = "the key is missing, but checkpoints in memory need it to identify their job"
        yield problem(("checkpointing", "directory"), what, '"directory": "checkpoints"')
    for key, needed in (("directory", placed or settings.memory), ("keep", settings.every)):
        if getattr(settings, key) is not None and not needed:
            what = f"{show(getattr(settings, key))} has no effect without every (allowed: null)"
            yield problem(("checkpointing", key), what, f'"every": "10 min", or remove {key}')


def _rate_limit(section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that a rate cap applies to something, and that no adaptation measures the link as if uncapped."""
    rate = section.communication.max_rate
    if rate is None:
        return
    if section.gradients.method == "none" and section.weights.method == "none" and section.islands is None:
        what = (
            f"{show(rate)} has no effect if nothing is compressed, because DeepSpeed sends all messages itself "
            "(allowed: null)"
        )
        yield problem(("communication", "max_rate"), what, "a method for gradients or weights, or no max_rate")
    if section.adaptive is not None:
        what = f"{show(rate)} cannot be combined with adaptive, which measures the link without a limit"
        yield problem(("communication", "max_rate"), f"{what} (allowed: null)", "no max_rate, or no adaptive")


_CHECKS = (
    _rate_limit,
    _delayed_without_feedback,
    _group_beyond_block,
    find_island_contradictions,
    find_sharding_contradictions,
    find_rollout_contradictions,
    find_idle_activations,
    find_auto_contradictions,
    _checkpoint_directory,
    find_schedule_problems,
    find_adaptive_problems,
)


def _weights_not_gathered(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that compressed weights are gathered, and in a way that the method supports.

    ZeRO 1 and 2, and the bf16 optimizer of pipelines, gather updated weights, whose differences are sent. ZeRO 3
    gathers weights of which no rank keeps a copy, so the weights themselves are rounded, which needs more bits.
    """
    parallelism, weights = section.parallelism or Parallelism(), section.weights
    stage = STAGE.effective(ds_config, parallelism)
    place, what = pointer(STAGE.place(parallelism)), f'method "{weights.method}" cannot be combined with '
    if stage == 3 and any(phase.weights for phase in section.schedule.phases):
        why = "where the rounding of weights is fixed for a whole run (allowed: no weights in phases)"
        yield problem(
            ("schedule", "phases"), f"weights in phases cannot be combined with {place}: 3, {why}", "gradients only"
        )
    if weights.method == "none" or (stage == 0 and _bf16(ds_config) and parallelism.pipeline > 1):
        return
    if stage == 0:
        why = "because every rank then updates all weights by itself (allowed: stages 1, 2 and 3; pipelines in bf16)"
        instead = f'"method": "none", or another stage at {place}'
        instead += ', or the stages of the pipeline as "parallelism": {"pipeline": 2}' if _bf16(ds_config) else ""
        yield problem(("weights",), f"{what}{place}: 0, {why}", instead)
    elif stage == 3 and (
        not isinstance(weights, BlockwiseWeights) or weights.bits < 4 or weights.rounding != "nearest"
    ):
        settings = show(weights.model_dump(include={"method", "bits", "rounding"}))
        why = (
            "where the weights themselves are rounded instead of their differences (allowed: blockwise, 8 or 4 "
            "bits, nearest)"
        )
        instead = '"method": "blockwise", "bits": 8, "rounding": "nearest"'
        yield problem(("weights",), f"{settings} cannot be combined with {place}: 3, {why}", instead)


def _overlap_unavailable(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that `overlap` applies.

    It does not to ZeRO 3, which prefetches weights itself, or to pipelines, whose tied layers run without being called.
    """
    weights, parallelism = section.weights, section.parallelism or Parallelism()
    stage, place = STAGE.effective(ds_config, parallelism), pointer(STAGE.place(parallelism))
    if not isinstance(weights, CompressedWeights) or not weights.overlap:
        return
    if stage == 3:
        what = f"true has no effect with {place}: 3, which prefetches weights itself (allowed: false)"
        yield problem(("weights", "overlap"), what, f"false, or 1 or 2 at {place}")
    if parallelism.pipeline > 1:
        pipeline = f"{pointer((SECTION, 'parallelism', 'pipeline'))}: {parallelism.pipeline}"
        what = f"true cannot be combined with {pipeline}, whose tied layers run without being called"
        yield problem(("weights", "overlap"), f"{what} (allowed: false)", 'false, or "pipeline": 1')


def _frozen_unavailable(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that frozen weights are sent, which only ZeRO 3 does."""
    weights, parallelism = section.weights, section.parallelism or Parallelism()
    stage, place = STAGE.effective(ds_config, parallelism), pointer(STAGE.place(parallelism))
    if isinstance(weights, CompressedWeights) and weights.frozen and stage != 3:
        what = f"true has no effect with {place}: {stage}, which never sends frozen weights (allowed: false)"
        yield problem(("weights", "frozen"), what, f"false, or 3 at {place}")


def _guard_needs_norms(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    zero = ds_config.get("zero_optimization")
    if section.guard is not None and isinstance(zero, dict) and zero.get("compute_grad_norm") is False:
        place = pointer(("zero_optimization", "compute_grad_norm"))
        what = f"cannot be combined with {place}: false, because the guard needs gradient norms (allowed: null)"
        yield problem(("guard",), what, f"null, or true at {place}")


_CONFLICTS_WITH_OWNERSHIP = ("round_robin_gradients", "elastic_checkpoint", "parameter_alignment")
"""Keys of `zero_optimization` with which DeepSpeed orders, pads or saves its flat buffers differently."""
_OPTIMIZER: Path = ("optimizer", "type")


def _ownership_unavailable(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that `ownership` applies: only to the flat buffers of ZeRO 1 and 2, in DeepSpeed's default layout."""
    if section.ownership == "contiguous":
        return
    what, parallelism = f'"{section.ownership}" cannot be combined with ', section.parallelism or Parallelism()
    stage, place = STAGE.effective(ds_config, parallelism), pointer(STAGE.place(parallelism))
    if stage not in (1, 2):
        why = f"{place}: {stage}, where no rank owns a slice of the model (allowed: stages 1 and 2)"
        yield problem(("ownership",), what + why, f'"contiguous", or 1 or 2 at {place}')
    if section.gradients.method == section.weights.method == "none":
        why = 'method "none", which leaves everything to DeepSpeed (allowed: "contiguous")'
        yield problem(("ownership",), what + why, '"contiguous", or another method')
    zero = ds_config.get("zero_optimization")
    zero = zero if isinstance(zero, dict) else {}
    for key in _CONFLICTS_WITH_OWNERSHIP:
        if zero.get(key):
            other = pointer(("zero_optimization", key))
            why = f"{other}: {show(zero[key])}, which changes the layout of the flat buffers (allowed: false)"
            yield problem(("ownership",), what + why, f'"contiguous", or false at {other}')
    if str(value_at(ds_config, _OPTIMIZER)).lower() == "muon":
        why = f'{pointer(_OPTIMIZER)}: "Muon", whose momentum has whole matrices on several ranks (allowed: others)'
        yield problem(("ownership",), what + why, f'"contiguous", or "AdamW" at {pointer(_OPTIMIZER)}')


def _bf16(ds_config: Mapping[str, Any]) -> bool:
    """Return True if the model may be in bf16, so that a pipeline's optimizer gathers weights under ZeRO 0 too."""
    found = ds_config.get("bf16", ds_config.get("bfloat16"))
    return isinstance(found, dict) and bool(found.get("enabled", False))


WITH_TRAINER = '; with Hugging Face Trainer "betas": "auto", and pass --adam_beta1 0 to the script'
"""Trainer fills in its own betas, and stops if those of the file differ."""

_BETAS = frozenset({"adam", "adamw", "lamb", "lion", "muadam", "muadamw", "adamax", "nadam", "radam", "sparseadam"})
"""Optimizers that have a first moment, with factor 0.9 unless `params.betas` sets another."""


def _optimizer_momentum(ds_config: Mapping[str, Any], section: CompressConfig) -> Iterator[Diagnostic]:
    """Check that the optimizer adds no momentum to the one that DGC and DeMo give the gradients."""
    optimizer = ds_config.get("optimizer")
    if section.gradients.method not in OWN_MOMENTUM or not isinstance(optimizer, dict):
        return
    name, params = str(optimizer.get("type", "")), optimizer.get("params")
    params = params if isinstance(params, dict) else {}
    betas, momentum = params.get("betas", [0.9, 0.999] if name.lower() in _BETAS else None), params.get("momentum")
    method = pointer((SECTION, "gradients", "method"))
    if isinstance(betas, list | tuple) and len(betas) == 2 and betas[0] not in (0, "auto"):
        what = (
            f"{show(betas)} of {name} adds a second momentum to that of {method}: "
            f'"{section.gradients.method}" (allowed: a first value of 0)'
        )
        instead = f'"betas": {show([0.0, betas[1]])}{WITH_TRAINER}'
        yield Diagnostic(at("optimizer", "params", "betas"), what, write(instead))
    elif isinstance(momentum, int | float) and momentum:
        what = f'{show(momentum)} adds a second momentum to that of {method}: "{section.gradients.method}" (allowed: 0)'
        yield Diagnostic(at("optimizer", "params", "momentum"), what, write('"momentum": 0.0'))


def find_unknown_momentum(ds_config: Mapping[str, Any], section: CompressConfig) -> Diagnostic | None:
    """Return a diagnostic if the file does not show whether the optimizer has a first moment, and `section` needs none.

    Trainer's Adam has one of 0.9, both for "auto" and without an optimizer in the file.
    """
    optimizer, method = ds_config.get("optimizer"), section.gradients.method
    if method not in OWN_MOMENTUM:
        return None
    if optimizer is None:
        what = f'is missing, so the optimizer may add a second momentum to that of "{method}"'
        instead = f'"betas": [0.0, 0.999] of Adam{WITH_TRAINER}'
        return Diagnostic(at("optimizer"), f"{what} (allowed: none)", write(instead))
    params = optimizer.get("params") if isinstance(optimizer, dict) else None
    betas = params.get("betas") if isinstance(params, dict) else None
    if betas != "auto" and not (isinstance(betas, list) and betas[:1] == ["auto"]):
        return None
    what = f'{show(betas)} may add a second momentum to that of "{method}" (allowed: none)'
    return Diagnostic(at("optimizer", "params", "betas"), what, write(f'"betas": [0.0, 0.999]{WITH_TRAINER}'))


def _uneven_nodes(section: CompressConfig, world_size: int) -> Iterator[Diagnostic]:
    gradients = section.gradients
    hierarchy = gradients.hierarchy if isinstance(gradients, LayeredGradients) else None
    if hierarchy is not None and (world_size % hierarchy.ranks_per_node or world_size < 2 * hierarchy.ranks_per_node):
        what = (
            f"{hierarchy.ranks_per_node} does not divide {world_size} ranks into at least two nodes "
            "(allowed: the number of ranks that the launcher starts on each of several nodes)"
        )
        yield problem(("gradients", "hierarchy", "ranks_per_node"), what, 'that number, or "hierarchy": null')
