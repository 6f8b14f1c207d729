"""Chain of the versions in a store: its end, and the version after it. One publisher at a time extends a chain."""

from contextlib import suppress
from dataclasses import dataclass

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout.store import Store
from deepspeed_compress.rollout.versions import (
    Dtype,
    Manifest,
    claim_store,
    delete_old_versions,
    delete_unfinished,
    find_full_copies,
    find_versions,
    holds_claim,
    read_manifest,
    write_manifest,
)


@dataclass(frozen=True)
class Chain:
    """End of the chain of versions in a store.

    Attributes:
        version: the newest version; 0 in an empty store.
        digest: its model digest; empty if no change may be based on it.
        full: the newest version with a full copy.
        claim: claim of the publisher (see `claim_store`).
    """

    version: int
    digest: str
    full: int
    claim: str


def take_over(store: Store, dtype: Dtype) -> Chain:
    """Take over a store, delete what a killed publisher left behind the end of its chain, and return that end."""
    # A publisher that still runs must notice it before it completes a version, whose parts are deleted here.
    claim = claim_store(store)
    newest = max(find_versions(store), default=0)
    delete_unfinished(store, newest)
    full, digest = max(find_full_copies(store), default=0), ""
    # A damaged manifest proves nothing, and no change leads to the bits of another type.
    with suppress(RolloutError):
        manifest = read_manifest(store, newest)
        digest = manifest.digest if manifest.dtype == dtype else ""
    return Chain(newest, digest, full, claim)


def extend_chain(store: Store, chain: Chain, manifest: Manifest, keep_full: int) -> int:
    """Complete the version of `manifest`, and delete everything before the oldest of `keep_full` full copies.

    Returns:
        The bytes of the manifest.

    Raises:
        RolloutError: another publisher has taken over the store.
    """
    _check_alone(store, chain)
    size = write_manifest(store, manifest)
    delete_old_versions(store, keep_full)
    return size


def _check_alone(store: Store, chain: Chain) -> None:
    """Check that no other publisher has written to the store since `chain` was read.

    Raises:
        RolloutError: one has.
    """
    newest = max(find_versions(store), default=0)
    if newest > chain.version:
        raise RolloutError(
            f"another publisher has written version {newest} to the same store; end it, or use another store"
        )
    if not holds_claim(store, chain.claim):
        raise RolloutError(
            f"another publisher has started on the same store, and has deleted what was written of version "
            f"{chain.version + 1}; end it, or use another store"
        )
    # A publisher that was held up between this check and its manifest may have replaced the version before ours.
    if chain.digest and read_manifest(store, chain.version).digest != chain.digest:
        raise RolloutError(
            f"another publisher has replaced version {chain.version} in the same store; end it, or use another store"
        )
