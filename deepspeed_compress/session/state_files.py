"""Saving and loading of a session's residuals, momenta and decisions: on all ranks or on none."""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residual_stores import kind_of, owner_of
from deepspeed_compress.compression.segments import PADDING, Range
from deepspeed_compress.compression.state_description import Description, Moment, Position
from deepspeed_compress.config import CompressConfig, masked
from deepspeed_compress.errors import CompressWarning, StateError
from deepspeed_compress.session.session import Session

T = TypeVar("T")
Write = Callable[[state.Contents, Path], None]
"""`state.write`, or a function that does the same later."""
NOT_SAVED = "compression state is not saved: "
"""Beginning of the message if a state cannot be written; see `result_on_all`."""


@dataclass(frozen=True)
class Place:
    """Owner of residuals and momenta that are saved or loaded.

    Attributes:
        rank: number of this rank's files among those of all `Position`s that share a directory.
        position: position of this rank.
        device: device of the loaded values.
        group: the ranks that save and load together; None for the whole job.
    """

    rank: int
    position: Position
    device: torch.device
    group: ProcessGroup | None = None


def save_state_files(session: Session, directory: Path, place: Place, moment: Moment, write: Write) -> None:
    """Have `write` write the files of this rank."""
    section, decisions = masked(session.config.model_dump(mode="json")), session.decisions()
    kept = state.contents(session.residuals.by_name, place.position, moment, section, decisions)
    write(kept, state.state_file(directory, place.rank))


def load_state_files(
    session: Session, directory: Path, place: Place, loss_scale: float, step: int | None = None, save: str = ""
) -> int | None:
    """Restore the state that `save_state_files` wrote to `directory`, on all ranks or on none. Collective.

    `step` and `save` are those of the engine's files; see `check_save`.

    Returns:
        The optimizer step at which it was saved; None if every store starts empty.

    Raises:
        StateError: on all ranks, if something is wrong on any rank. With `on_missing_state` "reset" it is a
            CompressWarning instead, and every store starts empty.
    """
    decided = session.decisions()
    try:
        return result_on_all(partial(_restore, session, directory, place, loss_scale, step, save), place.group)
    except StateError as error:
        text = str(error)
    session.residuals.clear()
    # Ranks whose own files were complete would decide differently from the others.
    session.load_decisions(decided)
    if session.config.on_missing_state == "error":
        raise StateError(
            f'{text}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
            '"error", "reset") to start with empty residuals'
        )
    warnings.warn(f"compression starts with empty residuals: {text}", CompressWarning, stacklevel=4)
    return None


def _restore(session: Session, directory: Path, place: Place, loss_scale: float, step: int | None, save: str) -> int:
    """Restore the state of this rank, and return the step at which it was saved."""
    found = state.sources(directory, place.rank, place.position)
    check_save(found, step, save)
    check_owners(found[0][1], session.config)
    if session.reductions is not None:
        check_parameters([description for _, description in found], session.parameters)
    check_experts(found[0][1], session.residuals.by_name, place.position)
    session.residuals.expect(found[0][1].storage)
    same = state.restore(session.residuals.by_name, found, place.position, loss_scale, place.device)
    session.residuals.restored(same)
    file, description = found[0]
    try:
        session.load_decisions(description.decisions)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StateError(f"{file.with_suffix('.json')}: the decisions are damaged ({error!r})") from error
    if not same and session.policy.auto is not None:
        # The times were those of other ranks.
        session.policy.auto.restart()
    return description.step


def result_on_all(work: Callable[[], T], group: ProcessGroup | None = None, problem: str = "") -> T:
    """Return the result of `work` on this rank. Collective: no rank raises while the others wait for it.

    Raises:
        StateError: it failed on some rank. Raised on all ranks, with all errors; the message begins with `problem`.
    """
    result: T | None = None
    own = ""
    try:
        result = work()
    except Exception as error:  # whatever it is, the other ranks must be told
        named = f"rank {dist.get_rank()}: {type(error).__name__}: {error}"
        own = str(error) if isinstance(error, StateError) else named
    problems = dict.fromkeys(one for one in gather_objects(own, group) if one)
    if problems:
        raise StateError(f"{problem}{'; '.join(problems)}")
    return cast(T, result)


def check_save(found: Iterable[tuple[Path, Description]], step: int | None, save: str) -> None:
    """Raise StateError if the files `found` were left by an earlier save of the same tag.

    Args:
        found: the files and their descriptions.
        step: step of the engine's files of the checkpoint; None if it has none.
        save: name of the save in the engine's files; empty if it was without this package.
    """
    if step is None:
        return
    for file, saved in found:
        if (saved.step, saved.save) != (step, save):
            raise StateError(
                f"{file.with_suffix('.json')} was left by an earlier save of this tag, after step {saved.step}: "
                f"DeepSpeed's files next to it were saved after step {step}, without a state of compression"
            )


def check_owners(saved: Description, config: CompressConfig) -> None:
    """Raise StateError if the values that owners keep were saved under another `ownership`.

    Residuals of senders are not affected: their sum is the same whichever rank holds them.
    """
    owners = saved.section.get("ownership", "contiguous")
    kept = sorted(name for name, slots in saved.layouts.items() if slots and kind_of(name) in state.OWNED)
    if kept and owners != config.ownership:
        raise StateError(
            f'/deepspeed_compress/ownership: "{config.ownership}" cannot continue from a checkpoint with '
            f'"{owners}", whose owners keep {", ".join(kept)} (allowed: the same ownership); write "{owners}"'
        )


def check_parameters(saved: Sequence[Description], parameters: Parameters) -> None:
    """Raise StateError if the saved values belong to another model.

    They do if none of their parameters is in `parameters`, or if one was larger. Parameters that are no longer trained
    may be among them.
    """
    ends: dict[str, int] = {}
    for name, begin, numel in _ranges(saved):
        ends[name] = max(ends.get(name, 0), begin + numel)
    if not ends:
        return
    known = sorted(ends.keys() & parameters.shapes.keys())
    if not known:
        raise StateError(
            f"the residuals belong to another model: they are those of {_some(ends)}, but this model has "
            f"{_some(parameters.shapes)}"
        )
    larger = [name for name in known if ends[name] > parameters.numel(name)]
    if larger:
        sizes = f"at least {ends[larger[0]]} elements were saved, but it now has {parameters.numel(larger[0])}"
        raise StateError(
            f"the residuals belong to another model, with another {_some(larger)}; of {larger[0]}, {sizes}"
        )


def check_experts(saved: Description, stores: Iterable[str], position: Position) -> None:
    """Raise StateError if this rank has other experts than the rank that saved the state.

    Their parameters have equal names on all ranks, so the names of their `stores` tell which experts they belong to.
    """
    theirs, mine = ({owner_of(name) for name in names} - {""} for names in (saved.layouts, stores))
    if saved.position == position and theirs <= mine:
        return
    if theirs | mine:
        raise StateError(
            f"the residuals of experts cannot be redistributed: they were saved by {saved.position.size} ranks for "
            f"{_some(sorted(theirs)) or 'no experts'}, but this run has {position.size} ranks, and this one has "
            f"{_some(sorted(mine)) or 'no experts'} (allowed: the same number of ranks, and the same ep_size)"
        )


def _ranges(saved: Sequence[Description]) -> Iterator[Range]:
    """Yield the saved ranges of parameters; shared stores are left out, because they hold factors."""
    for description in saved:
        for memory, layouts in description.layouts.items():
            if kind_of(memory) not in state.SHARED:
                yield from (one for layout in layouts for one in layout if one[0] != PADDING)


def _some(names: Iterable[str]) -> str:
    """Return the first three names, comma-separated, with " ..." if there are more."""
    first = list(islice(names, 4))
    return ", ".join(first[:3]) + (" ..." if len(first) > 3 else "")
