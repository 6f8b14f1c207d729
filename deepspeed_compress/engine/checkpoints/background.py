"""Checkpoints that training does not wait for: DeepSpeed's `checkpoint_engine`, and what a step does about them.

`save_checkpoint` of DeepSpeed hands every file to `engine.checkpoint_engine` (runtime/checkpoint_engine). Ours keeps
what is to be written, and a process of its own writes it (`checkpoints`). It says that it is decoupled, so that
DeepSpeed leaves the file `latest` alone, which is written when the files of all ranks are there.
"""

import atexit
import inspect
import os
import signal
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.checkpoint_engine import CheckpointCommitInfo, TorchCheckpointEngine
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import logger

from deepspeed_compress.checkpoints.claim import Claim
from deepspeed_compress.checkpoints.files import Save
from deepspeed_compress.checkpoints.snapshot import NOTHING, Call, Memory, Snapshot
from deepspeed_compress.checkpoints.writer import Task, write_torch
from deepspeed_compress.config import Checkpointing
from deepspeed_compress.config.durations import byte_rate, seconds
from deepspeed_compress.engine.checkpoints.alone import alone_in, start_of_all
from deepspeed_compress.engine.checkpoints.host_memory import HostMemory
from deepspeed_compress.engine.checkpoints.lane import Interval, Lane
from deepspeed_compress.engine.checkpoints.progress import Progress
from deepspeed_compress.engine.checkpoints.recovery import find_newest_step, find_whole
from deepspeed_compress.engine.checkpoints.side_stream import copies_for_device
from deepspeed_compress.engine.checkpoints.tags import tag_of
from deepspeed_compress.engine.leaving import Leaving, saves_on_sigterm
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.observer import new_run
from deepspeed_compress.session.session import Session

__all__ = ["BackgroundSaving", "check_saving"]


def check_saving(engine: Any) -> None:
    """UnsupportedError where DeepSpeed saves in a way that is not ours to put off."""
    if type(engine.checkpoint_engine) is not TorchCheckpointEngine:
        raise UnsupportedError(
            f"/deepspeed_compress/checkpointing: with {type(engine.checkpoint_engine).__name__} (allowed: DeepSpeed's "
            "plain writer); remove the key, or checkpoint.writer and nebula of the file"
        )
    if not hasattr(os, "memfd_create"):
        raise UnsupportedError("/deepspeed_compress/checkpointing: needs Linux (memfd_create); remove the key")
    if engine.use_node_local_storage() or engine.zero_nvme_offload_optimizer():
        raise UnsupportedError(
            "/deepspeed_compress/checkpointing: with use_node_local_storage or an optimizer on NVMe, whose files are "
            "not all in one directory (allowed: one directory for all ranks); remove one of the two keys"
        )


def _tried(work: Callable[[], object]) -> str:
    """Do `work`; what went wrong, such as that there is no more memory, which is a problem of one checkpoint."""
    try:
        work()
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return f"{type(error).__name__}: {error}"
    return ""


def _clean_up(saving: "weakref.ref[BackgroundSaving]", process: int) -> None:
    """At the end of `process`. Those that it has forked inherit this, and neither its writers nor its connections."""
    found = saving()
    if found is not None and os.getpid() == process:
        found.cleanup()


class _Scripts:
    """What DeepSpeed needs of an engine to leave its scripts beside checkpoints."""

    _copy_recovery_script = DeepSpeedEngine._copy_recovery_script
    _change_recovery_script_permissions = DeepSpeedEngine._change_recovery_script_permissions


class BackgroundSaving(TorchCheckpointEngine):  # type: ignore[misc]
    """The saving of one engine. All ranks of the job call the same methods in the same order.

    Args:
        engine: of DeepSpeed, whose `save_checkpoint` goes through `save_checkpoint` here.
        settings: of the section.
    """

    def __init__(self, engine: Any, settings: Checkpointing) -> None:
        super().__init__()
        self._engine, self._settings = engine, settings
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._run, self._count, self._start = new_run(), 0, start_of_all()
        self._directory = None if settings.directory is None else Path(settings.directory).absolute()
        """Of checkpoints of `every`, wherever the program goes."""
        self._alone = alone_in(settings.directory, self._start)
        self._group = dist.new_group(backend="gloo")
        rate = None if settings.max_rate is None else byte_rate(settings.max_rate)
        self._lanes = [Lane(Interval(settings.every), rate)]
        self._memory = self._begin_memory(settings)
        self._copies = copies_for_device()
        self._open: Snapshot | None = None
        self._lane = self._disk
        self._claim = Claim(Path(), self._start)
        """Of what is being saved, as the lane."""
        self._copying: Thread | None = None
        self._automatic = False
        self._saved = -1
        """Step of the last checkpoint of `every`."""
        self._leaving = Leaving() if saves_on_sigterm(settings) else None
        stops = settings.on_error == "stop"
        self._progress = Progress(self._lanes, self._memory, self._leaving, stops, self._group)
        self._leave: Callable[[], None] = self._save_and_leave
        # Programs end without `engine.destroy` too. An engine that nobody holds must not live until then.
        self._at_exit = partial(_clean_up, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        self.client_state: Callable[[], dict[str, Any]] = dict
        """Gives what the program adds to checkpoints of `every`: `client_state` of `save_checkpoint`."""

    # What DeepSpeed calls.

    def is_decoupled(self) -> bool:
        return True

    def preserves_storage_sharing(self) -> bool:
        """Every tensor is written by itself, so DeepSpeed need not copy those that share a buffer."""
        return False

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing: `save_checkpoint` has begun."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """A directory that cannot be made on one rank is a checkpoint that all ranks hear of."""
        with suppress(OSError):
            super().makedirs(path, exist_ok)

    def save(self, state_dict: Any, path: str) -> None:
        """Keep a file of the checkpoint that is being saved; write it at once where none is (`save_16bit_model`)."""
        if self._open is None:
            write_torch(state_dict, Path(path), self._lane.rate)
            return
        call = Call(write_torch, (state_dict, Path(path), self._lane.rate, self._claim.held), (Path(path),))
        self._open.add(call)

    def cleanup(self) -> None:
        """When the engine is destroyed: what was saved is written first. A second call does nothing."""
        atexit.unregister(self._at_exit)
        if self._leaving is not None:
            self._leaving.listen_no_more()
        self.before_step()
        self._progress.close()
        if self._alone is not None:
            self._alone.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    # What the package calls.

    @property
    def memory_directory(self) -> Path | None:
        """Where checkpoints in memory go on this host; None without them."""
        return None if self._memory is None else self._memory.directory

    @property
    def held(self) -> Callable[[], AbstractContextManager[None]]:
        """How files of the checkpoint that is being saved get their names: ranks of the past get none."""
        return self._claim.held

    def add(self, call: Call) -> None:
        """Have `call` write files of the checkpoint that is being saved, beside DeepSpeed's."""
        assert self._open is not None, "save_checkpoint is not running"
        self._open.add(call)

    def copy_script(self, original: Callable[[str], None], save_path: str) -> None:
        """DeepSpeed's `_copy_recovery_script`: the process that writes does it, on disk alone."""
        if self._open is None:
            original(save_path)
        elif self._lane is self._disk:
            self._open.add(Call(_Scripts()._copy_recovery_script, (save_path,), ()))

    def save_checkpoint(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """DeepSpeed's `save_checkpoint`, of which everything is kept and nothing written yet."""
        given = inspect.signature(original).bind(*args, **options).arguments
        if not given["save_dir"]:
            # DeepSpeed says what is wrong with it.
            return original(*args, **options)
        self._count += 1
        # The process that writes is where the program was when it made the engine.
        directory = Path(given["save_dir"]).absolute()
        save = Save(
            directory=directory,
            tag=tag_of(self._engine, given.get("tag")),
            run=self._run,
            number=self._count,
            step=int(self._engine.global_steps),
            world=self._world,
            latest=bool(given.get("save_latest", True)),
            automatic=self._automatic,
        )
        return self._keep(save, partial(original, **{**given, "save_dir": str(directory)}))

    def load_checkpoint(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """DeepSpeed's `load_checkpoint`, of a checkpoint that is whole. Collective.

        Raises StateError on all ranks where the one that is asked for is damaged. Where none is asked for, the newest
        that is whole is taken, from the memory of hosts too, and a warning tells of newer ones that are not.
        """
        self.wait()
        given = inspect.signature(original).bind(*args, **options).arguments
        if self._engine.load_universal_checkpoint():
            return original(**given)
        directory, tag = given["load_dir"], given.get("tag")
        memory = self._memory_of(directory)
        # DeepSpeed takes numbers too.
        named = None if tag is None else str(tag)
        found = find_whole(Path(directory), named, memory, self._group)
        if self._memory is not None:
            self._memory.shelf.begin_anew(found.tag if found is not None and found.save is not None else None)
        if found is None:
            # DeepSpeed would say the same, but look again, each rank by itself, while something may be published.
            logger.warning(f"{directory} has no file `latest`: no checkpoint is loaded")
            return None, None
        return original(**{**given, "load_dir": str(found.directory), "tag": found.tag})

    def newest_step(self, directory: str) -> int | None:
        """Return the step of the newest checkpoint in `directory`, or of its run in memory; None without any."""
        return find_newest_step(Path(directory), self._memory_of(directory), self._group)

    def _memory_of(self, directory: str) -> HostMemory | None:
        return self._memory if self._memory is not None and self._memory.is_of(directory) else None

    def before_step(self) -> None:
        """What is being saved has been copied, and is on its way to the process that writes."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def step_ended(self, step: int, applied: bool) -> None:
        """Hear what has become of checkpoints, and save what is due."""
        self._progress.hear()
        for lane in self._lanes:
            if (applied and lane.interval.says(step)) or (lane.interval.due and not lane.in_flight):
                self._save_automatically(lane)
        if self._progress.leaves:
            self._leave()
        self._progress.ask_where_needed()

    def leave_by(self, leave: Callable[[], None]) -> None:
        """Once SIGTERM has come `leave` is called on all ranks, after one step, in place of saving and ending."""
        self._leave = leave
        if self._leaving is not None:
            self._leaving.listen()

    def listen(self, tell: Callable[[bool], None]) -> None:
        """From now on SIGTERM has this rank save, where that is asked for. `tell` is told whether it does, now and when
        that changes."""
        if self._leaving is not None:
            self._leaving.tell = tell
            tell(self._leaving.listens)
            if self._settings.directory is not None:
                self._leaving.listen()

    def wait(self) -> None:
        """Until all that was saved is written on all ranks. Collective.

        Raises StateError on all ranks where something could not be written and `on_error` is "stop".
        """
        self.before_step()
        self._progress.settle()

    @property
    def _disk(self) -> Lane:
        return self._lanes[0]

    def _begin_memory(self, settings: Checkpointing) -> HostMemory | None:
        if settings.memory is None:
            return None
        memory = HostMemory(settings.memory, Path(str(settings.directory)), self._start, self._group)
        self._lanes.append(Lane(Interval(settings.memory.every), private=True))
        return memory

    def _keep(self, save: Save, original: Callable[[], Any]) -> Any:
        self.before_step()
        in_memory = self._memory is not None and save.directory == self._memory.directory
        self._lane = self._lanes[-1] if in_memory else self._disk
        self._claim = self._claimed(save, in_memory)
        memory = self._lane.take_memory()
        self._open = Snapshot(memory, self._copies)
        try:
            saved = original()
            self._send(save, self._open, memory)
        except BaseException:
            self._lane.give_back(memory)
            raise
        finally:
            self._open, self._lane = None, self._disk
        if not self._settings.asynchronous:
            self.wait()
        return saved

    def _claimed(self, save: Save, in_memory: bool) -> Claim:
        """The directories that are this job's alone were claimed when the engine was made; others have one for each
        tag. The files of all ranks are sent after a collective that follows."""
        if in_memory or save.directory == self._directory:
            return Claim(save.directory, self._start)
        claim = Claim(save.place, self._start)
        if not self._rank:
            # What cannot be written there is the matter of that checkpoint.
            with suppress(OSError):
                save.place.mkdir(parents=True, exist_ok=True)
                claim.take()
        return claim

    def _save_and_leave(self) -> None:
        """Where SIGTERM has come. What is not on its way to the disk in this step already is saved; SystemExit."""
        if self._saved != self._engine.global_steps:
            self._save_automatically(self._disk)
        self.wait()
        if self._rank == 0:
            print(f"ds-compress: saved global_step{self._saved} in {self._directory}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)

    def _save_automatically(self, lane: Lane) -> None:
        lane.interval.begin()
        self._automatic = True
        session: Session = self._engine.compression
        last_saved = session.last_saved
        try:
            if lane is self._disk or self._memory is None:
                self._saved = int(self._engine.global_steps)
                self._engine.save_checkpoint(str(self._directory), client_state=self.client_state())
            else:
                directory = str(self._memory.directory)
                self._engine.save_checkpoint(directory, client_state=self.client_state(), save_latest=False)
                # Where a guard goes back to is older than the last steps.
                session.last_saved = last_saved
        finally:
            self._automatic = False

    def _send(self, save: Save, snapshot: Snapshot, memory: Memory) -> None:
        problem = _tried(snapshot.copy)
        task = self._task(save)
        self._lane.begin(task, memory)
        self._copying = Thread(target=_copy_and_send, args=(self._lane, task, snapshot, memory, problem))
        self._copying.start()

    def _task(self, save: Save) -> Task:
        patience, keep = seconds(self._settings.timeout), self._settings.keep if save.automatic else None
        if self._memory is not None and save.directory == self._memory.directory:
            # No directory has the files of all ranks, so that nobody waits for them.
            return self._memory.task(Task(save, self._rank, self._claim, NOTHING, False, patience))
        return Task(save, self._rank, self._claim, NOTHING, self._rank == 0, patience, keep)


def _copy_and_send(lane: Lane, task: Task, snapshot: Snapshot, memory: Memory, problem: str) -> None:
    """Beside training, until the next step at most."""
    problem = problem or _tried(snapshot.finish)
    lane.send(replace(task, kept=NOTHING if problem else snapshot.kept(), problem=problem), memory)
