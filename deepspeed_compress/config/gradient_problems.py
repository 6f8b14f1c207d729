"""Checks of `gradients`, with its overrides, and of `seed`."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from deepspeed_compress.config.methods import Model
from deepspeed_compress.config.models import SECTION, CompressConfig
from deepspeed_compress.config.overrides import Override
from deepspeed_compress.config.places import (
    CompressedGradients,
    ErrorFeedbackConfig,
    FeedbackGradients,
    GradientsConfig,
    LayeredGradients,
    PowerSGDGradients,
    QSGDGradients,
)
from deepspeed_compress.config.problems import Configuration, notice, problem, show
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.config.sparse_methods import BlockTopKConfig, RandomKConfig, SparseConfig
from deepspeed_compress.diagnostics import Diagnostic, Path, at, pointer, write


def _sparse_places(section: CompressConfig) -> Iterator[tuple[Path, SparseConfig]]:
    """Yield every method of `section` that has a density, with its place."""
    places: list[tuple[Path, Model]] = [(("gradients",), section.gradients), (("weights",), section.weights)]
    for path, method in [*places, *_override_places(section)]:
        if isinstance(method, SparseConfig):
            yield path, method


def _override_places(section: CompressConfig) -> Iterator[tuple[Path, Override]]:
    """Yield every override of `section`, with its place."""
    gradients = section.gradients
    for index, override in enumerate(gradients.overrides if isinstance(gradients, CompressedGradients) else ()):
        yield ("gradients", "overrides", index), override


def delayed_without_feedback(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that error feedback keeps delayed gradients until they are sent; they wait in its residuals."""
    section = configuration.section
    for path, override in _override_places(section):
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


def group_beyond_block(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that a group of `block_topk` fits into a block."""
    for path, method in _sparse_places(configuration.section):
        if isinstance(method, BlockTopKConfig) and method.group > method.block_size:
            what = f"{method.group} is more than block_size {method.block_size} (allowed: up to block_size)"
            yield problem((*path, "group"), what, f'{method.block_size}, or "block_size": {method.group}')


WITH_TRAINER = '; with Hugging Face Trainer "betas": "auto", and pass --adam_beta1 0 to the script'
"""Trainer fills in its own betas, and stops if those of the file differ."""

_BETAS = frozenset({"adam", "adamw", "lamb", "lion", "muadam", "muadamw", "adamax", "nadam", "radam", "sparseadam"})
"""Optimizers that have a first moment, with factor 0.9 unless `params.betas` sets another."""


def second_momentum(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that the optimizer adds no momentum to the one that DGC and DeMo give the gradients."""
    method, optimizer = configuration.section.gradients.method, configuration.native("optimizer")
    if method not in OWN_MOMENTUM or not isinstance(optimizer, dict):
        return
    name, params = str(optimizer.get("type", "")), optimizer.get("params")
    params = params if isinstance(params, dict) else {}
    betas, momentum = params.get("betas", [0.9, 0.999] if name.lower() in _BETAS else None), params.get("momentum")
    second = f'adds a second momentum to that of {pointer((SECTION, "gradients", "method"))}: "{method}"'
    if isinstance(betas, list | tuple) and len(betas) == 2 and betas[0] not in (0, "auto"):
        what = f"{show(betas)} of {name} {second} (allowed: a first value of 0)"
        instead = f'"betas": {show([0.0, betas[1]])}{WITH_TRAINER}'
        yield Diagnostic(at("optimizer", "params", "betas"), what, write(instead))
    elif isinstance(momentum, int | float) and momentum:
        what = f"{show(momentum)} {second} (allowed: 0)"
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


def uneven_nodes(configuration: Configuration) -> Iterator[Diagnostic]:
    """Check that the nodes of `hierarchy` divide the ranks."""
    gradients, world_size = configuration.section.gradients, configuration.world_size
    hierarchy = gradients.hierarchy if isinstance(gradients, LayeredGradients) else None
    size = 1 if hierarchy is None else hierarchy.ranks_per_node
    if world_size is not None and size > 1 and (world_size % size or world_size < 2 * size):
        what = (
            f"{size} does not divide {world_size} ranks into at least two nodes (allowed: the number of ranks that the "
            "launcher starts on each of several nodes)"
        )
        yield problem(("gradients", "hierarchy", "ranks_per_node"), what, 'that number, or "hierarchy": null')


_LOSSY = frozenset({"sign", "topk", "block_topk", "powersgd"})
"""Methods that lose most of the gradient without error feedback."""


def feedback(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find methods that need error feedback and have none, and those that diverge with it."""
    section, gradients = configuration.section, configuration.section.gradients
    kept = isinstance(gradients, CompressedGradients) and gradients.residuals is not None
    methods = [gradients, *(override for _, override in _override_places(section))]
    lossy = [m.method for m in methods if m.method in _LOSSY or (isinstance(m, RandomKConfig) and not m.rescale)]
    if lossy and not kept:
        what = f'null with method "{lossy[0]}" loses every value that is not sent (allowed: an object)'
        yield notice(("gradients", "error_feedback"), what, '{}, or an unbiased method such as "qsgd"')
    for path, method in _sparse_places(section):
        if isinstance(method, RandomKConfig) and method.rescale and kept:
            what = "true together with error feedback sends values that are too large, and diverges (allowed: false)"
            yield notice((*path, "rescale"), what, 'false, or "error_feedback": null')
    if isinstance(gradients, QSGDGradients) and kept and gradients.block_size**0.5 > gradients.levels:
        # The error is up to sqrt(block_size) / levels times the values sent.
        what = f"with {gradients.levels} levels and blocks of {gradients.block_size}, residuals may grow without bound"
        instead = "null, or at least as many levels as the square root of block_size"
        yield notice(("gradients", "error_feedback"), f"{what} (allowed: null)", instead)


_ANY_NAMES = ("", "a", "0.b_1")
"""Names of parameters; a pattern that matches all of these matches every name."""


def overrides(configuration: Configuration) -> Iterator[Diagnostic]:
    """Find overrides that never apply or always do."""
    seen: set[str] = set()
    for path, override in _override_places(configuration.section):
        place, pattern = (*path, "parameters"), override.parameters
        if pattern in seen:
            what = f"{show(pattern)} has no effect, because an earlier override has the same pattern"
            yield notice(place, what, "it once")
        elif override.every == 1 and all(re.search(pattern, name) for name in _ANY_NAMES):
            what = f"{show(pattern)} matches every parameter, so gradients.method has no effect"
            yield notice(place, what, f'a narrower pattern, or "method": "{override.method}" for all gradients')
        seen.add(pattern)
