"""Ranks as threads of this process, each with a gloo group over a common store: set up in milliseconds."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar

from torch.distributed import HashStore, ProcessGroupGloo

T = TypeVar("T")

TIMEOUT = timedelta(seconds=20)


def run_threads(ranks: int, work: Callable[[ProcessGroupGloo, int], T]) -> list[T]:
    """`work(group, rank)` on every rank at the same time; the results in rank order, or the first error."""
    store, results, errors = HashStore(), [None] * ranks, []

    def run(rank: int) -> None:
        try:
            results[rank] = work(ProcessGroupGloo(store, rank, ranks, TIMEOUT), rank)
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
