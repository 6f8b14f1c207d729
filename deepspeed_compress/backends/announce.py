"""The line that is printed at the start of training without DeepSpeed."""

from collections.abc import Callable, Sequence
from functools import partial

from torch.distributed import ProcessGroup

from deepspeed_compress.session.announced import joined, tell
from deepspeed_compress.session.session import Session


def announce(session: Session, group: ProcessGroup, where: str, figures: Callable[[], Sequence[str]]) -> None:
    """Write the line to standard error, on the first rank of `group`, unless `monitor.announce` is false.

    `where` names the engine. `figures` returns texts about gradients and weights, none if nothing is compressed.
    """
    if group.rank() == 0 and session.config.monitor.announce:
        tell(partial(joined, session.config, where, group.size(), figures))
