"""Replacement of an engine's `save_checkpoint` and `load_checkpoint`: a request that passes an ordered list of objects.

Each participant may change the request, and does its own part before and after DeepSpeed does what is requested. The
first participant is the outermost one: it is asked first, and finishes last.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.config import SECTION
from deepspeed_compress.session.patches import Patches

_SAVE = f"{SECTION}_save"
"""Key of the name of the save in `client_state`, which DeepSpeed puts into its own files."""


@dataclass(frozen=True)
class SaveRequest:
    """One call of `save_checkpoint`.

    Attributes:
        directory: the directory of checkpoints; never empty.
        tag: name of the checkpoint's directory below it.
        save_latest: let the file `latest` name the checkpoint.
        name: unique name of the save, equal on all ranks.
        in_memory: True if the files stay in the memory of this host.
    """

    directory: str | Path
    tag: str
    save_latest: bool
    name: str
    in_memory: bool = False

    @property
    def place(self) -> Path:
        """Return the absolute path of the tag directory."""
        return Path(self.directory).absolute() / self.tag


@dataclass(frozen=True)
class LoadRequest:
    """One call of `load_checkpoint`.

    Attributes:
        directory: the directory of checkpoints.
        tag: name of the checkpoint's directory below it; None for the latest checkpoint.
        load_optimizer_states: as in DeepSpeed.
        load_lr_scheduler_states: as in DeepSpeed.
        load_module_only: as in DeepSpeed.
    """

    directory: str | Path
    tag: str | None
    load_optimizer_states: bool
    load_lr_scheduler_states: bool
    load_module_only: bool

    @property
    def loads_states(self) -> bool:
        """Return True if the states of the optimizer are loaded, and not only weights."""
        return self.load_optimizer_states and not self.load_module_only


@dataclass(frozen=True)
class Loaded:
    """Checkpoint that DeepSpeed has loaded.

    Attributes:
        file: the first file.
        save: name of the save that has written DeepSpeed's files; empty if it was without this package.
    """

    file: str
    save: str

    @property
    def place(self) -> Path:
        """Return the tag directory."""
        return Path(self.file).parent


class Participant:
    """Object that takes part in every save and load of an engine. All ranks call the same methods in the same order.

    A participant overrides the methods that concern it. The others pass the request on.
    """

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Enter the save that is requested, and yield the request for the next participant.

        The block runs the rest of the save, and raises what fails there.
        """
        yield request

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest | None]:
        """Enter the load that is requested, and yield the request for the next participant.

        None ends the load: there is no checkpoint, and only the participants before this one learn of the result.
        """
        yield request

    def loaded(self, request: LoadRequest, found: Loaded | None) -> None:
        """Act on the result, after the blocks of all participants have ended. The last participant is called first.

        Args:
            request: the request that this participant has yielded.
            found: the checkpoint; None if there is none.
        """


def attach_participants(engine: Any, participants: Sequence[Participant], patches: Patches) -> None:
    """Have `participants` take part in each call of `save_checkpoint` and `load_checkpoint` of `engine`, in order.

    The signatures of both methods stay the same.
    """
    patches.wrap(engine, "save_checkpoint", partial(_save, engine, participants))
    patches.wrap(engine, "load_checkpoint", partial(_load, participants))


def _save(
    engine: Any, participants: Sequence[Participant], original: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    given = inspect.signature(original).bind(*args, **options).arguments
    if not given["save_dir"]:
        # DeepSpeed reports the problem before it writes anything.
        return original(**given)
    # The tag may be any value, including 0; None stands for the current step.
    tag = given.get("tag")
    directory = f"global_step{engine.global_steps}" if tag is None else str(tag)
    # DeepSpeed alone replaces its own files of the same tag and leaves ours, so both contain the name of their save.
    name = of_first(uuid4().hex)
    request = SaveRequest(given["save_dir"], directory, bool(given.get("save_latest", True)), name)
    client_state = {**(given.get("client_state") or {}), _SAVE: name}
    with ExitStack() as stack:
        for participant in participants:
            request = stack.enter_context(participant.saving(request))
        changed = {"save_dir": request.directory, "tag": request.tag, "client_state": client_state}
        return original(**{**given, **changed})


def _load(participants: Sequence[Participant], original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    given = inspect.signature(original).bind(*args, **options).arguments
    result: tuple[str | None, Any] = (None, None)
    request = _load_request(given)
    entered: list[tuple[Participant, LoadRequest]] = []
    with ExitStack() as stack:
        for participant in participants:
            passed_on = stack.enter_context(participant.loading(request))
            if passed_on is None:
                break
            request = passed_on
            entered.append((participant, request))
        else:
            result = original(**{**given, "load_dir": request.directory, "tag": request.tag})
    file, client_state = result
    save = (client_state or {}).pop(_SAVE, "")
    found = None if file is None else Loaded(file, save)
    for participant, passed_on in reversed(entered):
        participant.loaded(passed_on, found)
    return result


def _load_request(given: Mapping[str, Any]) -> LoadRequest:
    tag = given.get("tag")
    return LoadRequest(
        directory=given["load_dir"],
        # DeepSpeed accepts numbers too.
        tag=None if tag is None else str(tag),
        load_optimizer_states=bool(given.get("load_optimizer_states", True)),
        load_lr_scheduler_states=bool(given.get("load_lr_scheduler_states", True)),
        load_module_only=bool(given.get("load_module_only", False)),
    )
