"""The table of all checks of settings, by what a setting contradicts. The modules `..._problems` define them by key."""

from collections.abc import Iterator, Mapping
from typing import Literal

from deepspeed_compress.config import (
    gradient_problems,
    island_problems,
    layout_problems,
    policy_problems,
    service_problems,
    unsupported,
    weight_problems,
)
from deepspeed_compress.config.models import CompressConfig
from deepspeed_compress.config.problems import Check, Configuration
from deepspeed_compress.diagnostics import Diagnostic

Kind = Literal["section", "parallelism", "file", "unsupported", "notice"]

CHECKS: Mapping[Kind, tuple[Check, ...]] = {
    # Errors that the section alone shows.
    "section": (
        gradient_problems.delayed_without_feedback,
        gradient_problems.group_beyond_block,
        policy_problems.schedule,
        policy_problems.adaptive_choice,
        policy_problems.auto_comparison,
        island_problems.within_section,
        layout_problems.sharding_within_section,
        layout_problems.idle_activations,
        service_problems.rate_limit,
        service_problems.checkpoints,
        service_problems.rollout,
    ),
    # Contradictions of the parallelism with DeepSpeed's keys, DeepSpeed's rules, or the number of ranks.
    "parallelism": (
        layout_problems.disagreement,
        layout_problems.pipeline,
        layout_problems.world_size,
    ),
    # Other contradictions with the rest of the file, or with the number of ranks.
    "file": (
        weight_problems.within_file,
        gradient_problems.second_momentum,
        gradient_problems.uneven_nodes,
        policy_problems.unknown_length,
        policy_problems.empty_choice,
        policy_problems.guard_without_norms,
        weight_problems.ownership,
        island_problems.within_file,
        layout_problems.sharding_within_file,
        layout_problems.activations_within_file,
    ),
    # Features of DeepSpeed that cannot be compressed.
    "unsupported": (unsupported.features, unsupported.scaler_without_zero),
    # Settings that are valid, but have no effect or cost more than they gain.
    "notice": (
        gradient_problems.density,
        gradient_problems.unused_block_size,
        gradient_problems.feedback,
        gradient_problems.overrides,
        gradient_problems.unused_seed,
        policy_problems.idle_policy,
        service_problems.idle_memory_checkpoints,
        service_problems.costly_rollout,
    ),
}


def find(kind: Kind, configuration: Configuration) -> Iterator[Diagnostic]:
    """Yield what the checks of a kind find."""
    for check in CHECKS[kind]:
        yield from check(configuration)


def find_notices(section: CompressConfig) -> list[Diagnostic]:
    """Return the settings of `section` without effect; empty for the defaults."""
    return list(find("notice", Configuration(section)))
