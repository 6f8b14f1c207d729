"""Background checkpoints, for which training does not wait: each save and load, and the work in each step."""

import atexit
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch.distributed as dist
from deepspeed.utils import logger

from deepspeed_compress.backends.deepspeed.groups import destroy_groups
from deepspeed_compress.backends.deepspeed.sigterm import SigtermHandler, saves_on_sigterm
from deepspeed_compress.checkpointing.completeness import Save, is_complete
from deepspeed_compress.checkpointing.deepspeed.engine_files import EngineFiles, OpenCheckpoint, check_saving
from deepspeed_compress.checkpointing.deepspeed.exclusive import ExclusiveDirectory
from deepspeed_compress.checkpointing.deepspeed.memory_placement import HostMemory
from deepspeed_compress.checkpointing.deepspeed.participants import LoadRequest, Participant, SaveRequest
from deepspeed_compress.checkpointing.deepspeed.progress import Progress
from deepspeed_compress.checkpointing.deepspeed.recovery import find_complete, find_newest_step
from deepspeed_compress.checkpointing.deepspeed.writer_queue import Interval, WriterQueue, copies_for_device
from deepspeed_compress.checkpointing.directory import CheckpointDirectory, this_start
from deepspeed_compress.checkpointing.snapshot import NOTHING, Call, Memory, Snapshot
from deepspeed_compress.checkpointing.writer import Task, tried
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.compression import state
from deepspeed_compress.config.models import Checkpointing
from deepspeed_compress.config.numbers import byte_rate, seconds
from deepspeed_compress.session.observer import new_run
from deepspeed_compress.session.patches import Patches


def attach_background(engine: Any, settings: Checkpointing, patches: Patches) -> "BackgroundSaving":
    """Have DeepSpeed pass every file of `engine` to the returned `BackgroundSaving`. Collective.

    Raises:
        UnsupportedError: DeepSpeed saves in a way that cannot be done in the background.
        ConfigError: another job saves in the directory of the settings.
    """
    check_saving(engine)
    saving = BackgroundSaving(engine, settings)
    patches.on_undo(saving.cleanup)
    patches.replace(engine, "checkpoint_engine", saving.files)
    patches.wrap(engine, "_copy_recovery_script", saving.files.copy_script)
    return saving


def _clean_up(saving: "weakref.ref[BackgroundSaving]", process: int) -> None:
    """Clean up at the exit of `process`.

    Forked processes inherit this exit handler, but not the writers and connections.
    """
    found = saving()
    if found is not None and os.getpid() == process:
        found.cleanup()


class BackgroundSaving(Participant):
    """Background saving of one engine. All ranks of the job call the same methods in the same order.

    Args:
        engine: a DeepSpeed engine.
        settings: the section's `checkpointing`.
    """

    def __init__(self, engine: Any, settings: Checkpointing) -> None:
        self.files = EngineFiles(self.cleanup)
        self._engine, self._settings = engine, settings
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._run, self._count, self._start = new_run(), 0, of_first(this_start())
        self._directory = None if settings.directory is None else Path(settings.directory).absolute()
        """Absolute directory of automatic checkpoints, so that it does not depend on the working directory."""
        self._exclusive = ExclusiveDirectory(self._directory, self._start, self._run)
        self._group = dist.new_group(backend="gloo")
        rate = None if settings.max_rate is None else byte_rate(settings.max_rate)
        self._disk = WriterQueue(Interval(settings.every), rate)
        self._queues = [self._disk]
        self._memory: HostMemory | None = None
        try:
            if settings.memory is not None:
                self._memory = HostMemory(settings.memory, Path(str(settings.directory)), self._start, self._group)
                self._queues.append(WriterQueue(Interval(settings.memory.every), private=True))
        except BaseException:
            self._release()
            raise
        self._copies = copies_for_device()
        self._copying: Thread | None = None
        self._automatic = False
        self._saved = -1
        """Step of the last automatic checkpoint on disk."""
        self._sigterm = SigtermHandler() if saves_on_sigterm(settings) else None
        stops = settings.on_error == "stop"
        self._progress = Progress(self._queues, self._memory, self._sigterm, stops, self._group)
        self._leave: Callable[[], None] = self._save_and_leave
        # Programs may exit without `engine.destroy`. The weak reference lets an unused engine be freed before that.
        self._at_exit = partial(_clean_up, weakref.ref(self), os.getpid())
        atexit.register(self._at_exit)
        self._client_state: Callable[[], dict[str, Any]] = dict

    def cleanup(self) -> None:
        """Write everything that was saved, and end the writer processes. A second call does nothing."""
        atexit.unregister(self._at_exit)
        if self._sigterm is not None:
            self._sigterm.stop_listening()
        self.before_step()
        self._progress.close()
        self._release()

    def _release(self) -> None:
        """End the writer processes, and release the directories and the group."""
        for queue in self._queues:
            queue.close()
        self._exclusive.close()
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        destroy_groups([self._group])

    @property
    def memory_directory(self) -> Path | None:
        """Return the directory of checkpoints in memory on this host; None without them."""
        return None if self._memory is None else self._memory.directory

    def write_state(self, contents: state.Contents, file: Path) -> None:
        """Keep a state of compression, whose files belong to the current checkpoint, next to DeepSpeed's."""
        now = self.files.open
        assert now is not None, "save_checkpoint is not running"
        now.snapshot.add(Call(state.write, (contents, file, now.directory.held), (file, file.with_suffix(".json"))))

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Keep everything that is saved for the writer process instead of writing it."""
        self._count += 1
        # The writer process keeps the working directory that the program had when it made the engine.
        directory = Path(request.directory).absolute()
        save = Save(
            directory=directory,
            tag=request.tag,
            run=self._run,
            number=self._count,
            step=int(self._engine.global_steps),
            world=self._world,
            latest=request.save_latest,
            automatic=self._automatic,
        )
        self.before_step()
        host = self._memory if save.directory == self.memory_directory else None
        in_memory, queue = host is not None, self._disk if host is None else self._queues[-1]
        claimed = self._claimed(save, in_memory)
        memory = queue.take_memory()
        snapshot = Snapshot(memory, self._copies)
        self.files.open = OpenCheckpoint(snapshot, claimed, queue.rate, in_memory)
        try:
            yield replace(request, directory=str(directory), in_memory=in_memory)
            # A failure, such as a lack of memory, is a problem of one checkpoint only.
            _, problem = tried(snapshot.copy)
            problem = problem or (self._exclusive.problem if save.directory == self._directory else "")
            task = self._task(claimed, save, host)
            queue.begin(task, memory)
            self._copying = Thread(target=_copy_and_send, args=(queue, task, snapshot, memory, problem))
            self._copying.start()
        except BaseException:
            queue.give_back(memory)
            raise
        finally:
            self.files.open = None
        if not self._settings.asynchronous:
            self.wait()

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest | None]:
        """Request a complete checkpoint. Collective.

        If no tag is given, that is the newest complete one, also from host memory, with a warning about newer ones that
        are not complete.

        Raises:
            StateError: the requested checkpoint is damaged, or none is complete. Raised on all ranks.
        """
        self.wait()
        if self._engine.load_universal_checkpoint():
            yield request
            return
        memory = self._memory_of(request.directory)
        found = find_complete(Path(request.directory), request.tag, memory, self._group)
        if self._memory is not None:
            self._memory.catalog.restart_from(found.tag if found is not None and found.save is not None else None)
        if found is None:
            # DeepSpeed would log the same, but each rank would look again separately, while a checkpoint may be
            # published.
            logger.warning(f"{request.directory} has no file `latest`: no checkpoint is loaded")
            yield None
            return
        yield replace(request, directory=str(found.directory), tag=found.tag)

    def newest_step(self, directory: str) -> int | None:
        """Return the step of the newest checkpoint in `directory`, or of its run in memory; None without any."""
        return find_newest_step(Path(directory), self._memory_of(directory), self._group)

    def _memory_of(self, directory: str | Path) -> HostMemory | None:
        return self._memory if self._memory is not None and self._memory.is_of(directory) else None

    def before_step(self) -> None:
        """Wait until the current snapshot has been copied and sent to the writer process."""
        if self._copying is not None:
            self._copying.join()
            self._copying = None

    def step_ended(self, step: int, applied: bool) -> None:
        """Process the progress of checkpoints, and save those that are due."""
        self._progress.process_answers()
        for queue in self._queues:
            if (applied and queue.interval.is_due_at(step)) or (queue.interval.due and not queue.in_flight):
                self._save_automatically(queue)
        if self._progress.is_leaving:
            self._leave()
        self._progress.ask_if_needed()

    def set_client_state(self, client_state: Callable[[], dict[str, Any]]) -> None:
        """Save what `client_state` returns as the `client_state` of automatic checkpoints."""
        self._client_state = client_state

    def leave_by(self, leave: Callable[[], None]) -> None:
        """Have all ranks call `leave` after the same step once SIGTERM has arrived, instead of saving and exiting."""
        self._leave = leave
        if self._sigterm is not None:
            self._sigterm.listen()

    def listen(self, tell: Callable[[bool], None]) -> None:
        """Have this rank save on SIGTERM, if configured.

        `tell` is called with True if it does, with False if not, now and whenever that changes.
        """
        if self._sigterm is not None:
            self._sigterm.report_to(tell)
            if self._settings.directory is not None:
                self._sigterm.listen()

    def wait(self) -> None:
        """Wait until everything that was saved is written on all ranks. Collective.

        Raises:
            StateError: something could not be written, and `on_error` is "stop". Raised on all ranks.
        """
        self.before_step()
        self._progress.wait()

    def _claimed(self, save: Save, in_memory: bool) -> CheckpointDirectory:
        """Return the directory of a checkpoint, with a claim of this start.

        Directories that belong to this job alone were claimed when the engine was made; in others, each tag has its own
        claim. A collective follows before any rank's files are sent.
        """
        if in_memory or save.directory == self._directory:
            self._exclusive.take_again()
            return CheckpointDirectory(save.directory, self._start)
        directory = CheckpointDirectory(save.directory, self._start, claimed=save.place)
        if not self._rank:
            # If this fails, the checkpoint itself reports it.
            with suppress(OSError):
                save.place.mkdir(parents=True, exist_ok=True)
                directory.claim()
        return directory

    def _save_and_leave(self) -> None:
        """Save on disk after SIGTERM, unless this step is already being saved there, and exit.

        Raises:
            SystemExit: always, with 128 + SIGTERM.
        """
        if self._saved != self._engine.global_steps:
            self._save_automatically(self._disk)
        self.wait()
        place = Path(str(self._directory), f"global_step{self._saved}")
        if self._rank == 0 and is_complete(place):
            print(f"ds-compress: saved {place.name} in {place.parent}", file=sys.stderr, flush=True)
        raise SystemExit(128 + signal.SIGTERM)

    def _save_automatically(self, queue: WriterQueue) -> None:
        queue.interval.begin()
        self._exclusive.check_only_engine()
        on_disk = queue is self._disk
        if on_disk:
            self._saved = int(self._engine.global_steps)
        directory, client_state = self._directory if on_disk else self.memory_directory, self._client_state()
        self._automatic = True
        try:
            self._engine.save_checkpoint(str(directory), client_state=client_state, save_latest=on_disk)
        finally:
            self._automatic = False

    def _task(self, directory: CheckpointDirectory, save: Save, host: HostMemory | None) -> Task:
        patience, keep = seconds(self._settings.timeout), self._settings.keep if save.automatic else None
        if host is not None:
            # No directory has the files of all ranks, so no writer waits for those of the others.
            return host.task(Task(directory, save, self._rank, NOTHING, False, patience))
        publishes = self._rank == 0
        return Task(directory, save, self._rank, NOTHING, publishes, patience, keep, ended=self._disk.agreed)


def _copy_and_send(queue: WriterQueue, task: Task, snapshot: Snapshot, memory: Memory, problem: str) -> None:
    """Finish the snapshot and send it to the writer, in a thread that the next optimizer step waits for."""
    problem = problem or tried(snapshot.finish)[1]
    queue.send(replace(task, kept=NOTHING if problem else snapshot.kept(), problem=problem), memory)
