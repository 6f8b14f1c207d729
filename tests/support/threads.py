"""Ranks as threads of this process, with gloo groups over a common store. They start within milliseconds."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, PrefixStore, ProcessGroupGloo, Store

T = TypeVar("T")

TIMEOUT = timedelta(seconds=20)


def connect(store: Store, rank: int, ranks: int) -> ProcessGroupGloo:
    """Join a gloo group over `store`, and return once every rank has joined it.

    Gloo returns as soon as a rank's own connections stand. A rank with nothing to exchange would then close them while
    others still open theirs, which fails there with "Connection closed by peer".
    """
    group = ProcessGroupGloo(store, rank, ranks, TIMEOUT)
    store.set(f"connected/{rank}", "")
    store.wait([f"connected/{other}" for other in range(ranks)], TIMEOUT)
    return group


def run_threads(ranks: int, work: Callable[[ProcessGroupGloo, int], T]) -> list[T]:
    """Run `work(group, rank)` on all ranks at once. Return the results in rank order, or raise the first error."""
    store, results, errors = HashStore(), [None] * ranks, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(connect(store, rank, ranks), rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * TIMEOUT.total_seconds())
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    return results  # type: ignore[return-value]


def run_nodes(
    nodes: int,
    locals_: int,
    work: Callable[[ProcessGroupGloo, ProcessGroupGloo, ProcessGroupGloo, int], T],
) -> list[T]:
    """Run `work(whole, inner, outer, rank)` on ranks of several nodes, with rank = node * locals_ + local.

    Args:
        nodes: number of nodes.
        locals_: number of ranks on each node.
        work: receives the group of all ranks, that of the node, and that of the ranks with the same local rank.

    Returns:
        The results in rank order.
    """
    store = HashStore()

    def on_rank(whole: ProcessGroupGloo, rank: int) -> T:
        node, local = divmod(rank, locals_)
        inner = connect(PrefixStore(f"node{node}", store), local, locals_)
        outer = connect(PrefixStore(f"across{local}", store), node, nodes)
        return work(whole, inner, outer, rank)

    return run_threads(nodes * locals_, on_rank)
