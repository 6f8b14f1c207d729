"""Exact, sparse (or on request lossy) weight updates from a trainer to rollout workers, which generate with the policy.

Data flows one way: the slices of a model that a rank publishes (`sources`) are encoded as changes (`changes`), which
form the parts of a version (`parts`, `shares`, `versions`) in a store (`store`), from which a receiver applies them to
its module (`receiver`). `served_store` shares a store with other hosts.
"""

from deepspeed_compress.rollout.publisher import Published, Publisher
from deepspeed_compress.rollout.receiver import Receiver
from deepspeed_compress.rollout.store import DirectoryStore, Store

__all__ = ["DirectoryStore", "Published", "Publisher", "Receiver", "Store", "open_store"]


def open_store(place: str) -> Store:
    """Return the store at `place`: a directory, or the address of a `StoreServer` ("tcp://host:port").

    Raises:
        ConfigError: the address is malformed, or there is no usable secret.
    """
    if "://" not in place:
        return DirectoryStore(place)
    from deepspeed_compress.rollout.served_store import ServedStore

    return ServedStore(place)
