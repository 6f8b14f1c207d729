"""Programs that train under DDP, and the cases of the contract that use them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tests.backends.contract.branches import Branching, resumed, skipped, trained
from tests.support.attached import Case, on
from tests.support.two_branches import Setting, look_first, loss_of, plain


# The programs: each makes the gradients of one optimizer step.
def accumulating(model: Any, rank: int, step: int) -> None:
    with model.no_sync():
        loss_of(model, rank, step).backward()
    loss_of(model, rank, step + 100).backward()


def synchronising_twice(model: Any, rank: int, step: int) -> None:
    for micro in (step, step + 100):
        loss_of(model, rank, micro).backward()


def now_and_then(model: Any, rank: int, step: int) -> None:
    """Use different branches on the ranks in some steps, and the same one on all ranks in others."""
    ways = ("both", "left", "right")[step % 3] if step % 2 else ("left", "right")[rank % 2]
    loss_of(model, rank, step, ways).backward()


def one_way(model: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step, "left").backward()


def one_way_at_last(model: Any, rank: int, step: int) -> None:
    """Reduce both branches, and then only one of them."""
    plain(model, rank, step)
    one_way(model, rank, step + 100)


def clear(model: Any, optimizer: Any, rank: int, step: int) -> None:
    optimizer.zero_grad()


UNUSED = {"find_unused_parameters": True}
VIEWS = {"gradient_as_bucket_view": True}
UNUSED_IN_VIEWS = Setting(options={**UNUSED, **VIEWS})
PROGRAMS: Mapping[str, Case] = {
    "plain": Branching(Setting(), plain),
    "views": Branching(Setting(options=VIEWS), plain),
    "accumulating": Branching(Setting(), accumulating),
    "accumulating in views": Branching(Setting(options=VIEWS), accumulating),
    "synchronising twice": Branching(Setting(), synchronising_twice),
    "static graph": Branching(Setting(options={"static_graph": True}), plain),
    "static graph of one way": Branching(Setting(options={"static_graph": True, **UNUSED}), one_way),
    "unused": Branching(Setting(options=UNUSED), now_and_then),
    "unused in views": Branching(UNUSED_IN_VIEWS, now_and_then),
    "unused in zeroed views": Branching(UNUSED_IN_VIEWS, now_and_then, to_none=False),
    "unused at last": Branching(Setting(options=UNUSED), one_way_at_last),
    "unused at last in views": Branching(UNUSED_IN_VIEWS, one_way_at_last),
    "always unused": Branching(Setting(options=UNUSED), one_way),
    "looking first": Branching(Setting(), look_first),
}
EXACT = on(3, PROGRAMS, "plain", "views", "accumulating", "unused", "static graph")
CONSERVED = {**on(2, PROGRAMS), **on(3, PROGRAMS)}
SKIPPED = skipped(Setting(), clear)
RESUMED = resumed(Setting())
TRAINED = trained(Setting())
OTHER_SIZES = (replace(PROGRAMS["plain"], ranks=3), PROGRAMS["plain"])
