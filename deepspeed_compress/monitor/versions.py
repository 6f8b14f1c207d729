"""Statistics of the versions of the weights that are published for rollout workers."""

from dataclasses import dataclass

VERSIONS = "rollout.jsonl"
"""File with a line for each published version."""


@dataclass(frozen=True)
class VersionStatistics:
    """Statistics of one version over all ranks.

    Attributes:
        step: optimizer steps done.
        rollout_version: number of the version.
        rollout_bytes: bytes of the changes since the version before.
        rollout_full_bytes: bytes of the full copy; 0 if the version has none.
        rollout_changed: share of the values that changed.
        rollout_encode_ms: milliseconds of encoding on the slowest rank.
        rollout_write_ms: milliseconds of writing to the store on the slowest rank.
        rollout_publish_ms: milliseconds from the copy of the weights until the version was complete.
        rollout_age_ms: age of the version before when this one was complete, which is the largest age of the weights of
            a rollout worker that is never late; None for the first version of a process.
        rollout_lag: number of versions by which the samples of this step were behind; None if it was not reported.
    """

    step: int
    rollout_version: int
    rollout_bytes: int
    rollout_full_bytes: int
    rollout_changed: float
    rollout_encode_ms: float
    rollout_write_ms: float
    rollout_publish_ms: float
    rollout_age_ms: float | None
    rollout_lag: float | None
