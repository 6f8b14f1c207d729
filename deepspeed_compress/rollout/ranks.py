"""Agreement among the publishing ranks."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import RolloutError

T = TypeVar("T")


class PublishingRanks:
    """Ranks that publish together: all ranks of the job, or this process alone.

    They have a gloo group of their own, because a version may be published while training continues. All ranks must
    construct this together.
    """

    def __init__(self) -> None:
        self._group: ProcessGroup | None = dist.new_group(backend="gloo") if dist.is_initialized() else None

    @property
    def rank(self) -> int:
        return 0 if self._group is None else self._group.rank()

    def gather(self, make: Callable[[], T]) -> list[T]:
        """Return the results of `make` on all ranks, in rank order. Collective.

        Raises:
            RolloutError: `make` has raised on a rank. All ranks raise then, so none waits for another.
        """
        made = finished(make)
        error = made.exception()
        mine = (None, f"rank {self.rank}: {type(error).__name__}: {error}") if error else ([made.result()], None)
        found = [mine] if self._group is None else gather_objects(mine, self._group)
        problems = [text for _, text in found if text is not None]
        if problems:
            raise RolloutError(f"a version was not published: {'; '.join(problems)}") from error
        return [one for results, _ in found for one in results or ()]

    def from_first(self, make: Callable[[], T]) -> T:
        """Return the result of `make` on rank 0, which alone calls it. Collective.

        Raises:
            RolloutError: `make` has raised.
        """
        return next(one for one in self.gather(lambda: make() if self.rank == 0 else None) if one is not None)


def finished(make: Callable[[], T]) -> Future[T]:
    """Call `make`, and return its result or its error, which a collective call then raises on all ranks."""
    future: Future[T] = Future()
    try:
        future.set_result(make())
    except Exception as error:
        future.set_exception(error)
    return future
