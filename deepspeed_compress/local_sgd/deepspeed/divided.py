"""Islands within one DeepSpeed job: exchanges, data of the whole job, checkpoints.

An engine's data-parallel group is that of its island (`division`), so ZeRO, norms and overflow checks stay within it.
This module handles what would otherwise go wrong: samplers, initial weights, and checkpoint files that islands would
overwrite for each other.
"""

import atexit
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_compress.backends.deepspeed.division import divide_data
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.backends.deepspeed.weights.copies import check_equal_layouts, copy_weights
from deepspeed_compress.checkpointing.completeness import LATEST
from deepspeed_compress.checkpointing.deepspeed.participants import Loaded, LoadRequest, Participant, SaveRequest
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.state_description import Position, read_description
from deepspeed_compress.config.islands import island_directory
from deepspeed_compress.errors import StateError
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import find_exchanged, recover_from_divergence
from deepspeed_compress.local_sgd.deepspeed.rates import rates_of, warn_of_unequal_rates
from deepspeed_compress.local_sgd.deepspeed.replicated import SharedLayers
from deepspeed_compress.local_sgd.deepspeed.state_files import ISLAND, ExchangeFiles, check_tag, first_file
from deepspeed_compress.local_sgd.fixed_exchange import FixedExchange
from deepspeed_compress.local_sgd.strategy import ExchangeContext, IslandRanks
from deepspeed_compress.safe_files import write_text
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.state_files import result_on_all


def attach_islands(engine: Any, unit: IslandUnit, session: Session) -> Participant:
    """Exchange after steps of `engine`, which was made from a `divide_call`. Collective.

    Returns:
        The participant in saving and loading that keeps the files of islands apart.
    """
    run, settings, patches = replace(session.run, clock=StepClock()), session.config.islands, session.patches
    assert settings is not None, "attached for a section without islands"
    stores = ResidualStores(transactional=False)
    found = find_exchanged(engine, settings, session.parameters, SharedLayers(unit.tensor, unit.ranks, unit.whole))
    master_weights = found.master_weights
    check_equal_layouts(master_weights, unit)
    rates = rates_of(engine)
    warn_of_unequal_rates(rates, gather_objects(rates)[0], "the first island")
    # No exchange sends untrained weights.
    copy_weights(found.untrained, engine.device, unit.peers)
    groups = Groups(unit.peers, downward=unit.downward)
    reduction = ReductionContext(groups, found.parameters, stores, run, traffic="bytes_islands")
    recover = partial(recover_from_divergence, engine, master_weights, session.residuals.clear)
    context = ExchangeContext(settings, master_weights, reduction, IslandRanks(unit.whole), found.moments, recover)
    exchange = FixedExchange(context, unit.number)
    divide_data(engine, unit, patches)
    exchange.start()
    # Most programs never destroy the engine.
    end = partial(_end, weakref.ref(exchange))
    atexit.register(end)
    patches.precede(engine, "destroy", end)
    patches.on_undo(end)
    # The number of islands may change between saving and loading. Their number of ranks may not.
    position = Position(unit.number, unit.count, unit.place, len(unit.ranks))
    session.join_islands(exchange)
    return _Files(unit, exchange, ExchangeFiles(engine, session.config, stores, position))


def _end(exchange: "weakref.ref[FixedExchange]") -> None:
    """Wait for pending exchanges, since a slower island cannot receive messages from a process that has exited."""
    found = exchange()
    if found is not None:
        # Other islands may have failed; they report that themselves.
        with suppress(RuntimeError):
            found.discard()


@dataclass(frozen=True)
class _Files(Participant):
    """Checkpoints of islands.

    Those of island 0 are stored where a job without islands stores them, those of island k in its subdirectory
    (`island_directory`). The islands' exchange state is stored in the tag directory of island 0, a pair of files per
    rank (`state`).
    """

    unit: IslandUnit
    exchange: FixedExchange
    files: ExchangeFiles

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Save the exchange state, and the rest in the island's directory.

        Pending exchanges are finished first, so that a resumed run equals this one.

        Raises:
            StateError: the exchange state was not saved on some rank.
        """
        base, tag = _base(request.directory), request.tag
        check_tag(tag)
        self.exchange.finish()
        mine = base / island_directory(self.unit.number)
        (mine / tag).mkdir(parents=True, exist_ok=True)
        save = partial(self.files.save, replace(request, directory=base), {})
        result_on_all(save, problem="the state of islands is not saved: ")
        yield replace(request, directory=str(mine))
        if self.unit.number and dist.get_rank() == self.unit.ranks[0] and request.save_latest:
            write_text(mine / LATEST, tag)
        dist.barrier()

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Load from the island's directory.

        If there are more islands than were saved, the first ones are loaded more than once.
        """
        self.exchange.discard()
        base = _base(request.directory)
        tag = CheckpointDirectory(base).latest_tag() if request.tag is None else request.tag
        # A job without islands counts as one.
        saved = None if tag is None else first_file(base / tag)
        islands = 1 if saved is None or not saved.exists() else read_description(saved).position.size
        if not self.files.engine.load_universal_checkpoint():
            # Each directory has its own `latest`, which is outdated for an island that was not part of the last save.
            request = replace(request, tag=tag)
        yield replace(request, directory=str(base / island_directory(self.unit.number % islands)))

    def loaded(self, request: LoadRequest, found: Loaded | None) -> None:
        """Restore the exchange state.

        Raises:
            StateError: islands loaded different checkpoints, or the exchange state cannot be restored.
        """
        # A tag may have several parts.
        tag = None if found is None else Path(found.file).parent.relative_to(request.directory).as_posix()
        tags = set(gather_objects(tag))
        if len(tags) > 1:
            shown = ", ".join(sorted(map(str, tags)))
            raise StateError(
                f"islands loaded different checkpoints: {shown} (allowed: one for all islands); give load_checkpoint a "
                "tag"
            )
        if found is not None and tag is not None:
            directory = _base(request.directory) / tag
            is_there = request.loads_states and first_file(directory).exists()
            self._load_state(partial(self._restore, directory, found.save) if is_there else None)

    def _load_state(self, restore: Callable[[], None] | None) -> None:
        """Have `restore` restore the exchange state. Without it, all islands start with the weights of the first one.

        Raises:
            StateError: it cannot be restored, and `on_missing_state` is "error". A program that catches the error
                continues from the weights of the first island.
        """
        reset = "islands start from the weights of the first one"
        try:
            is_restored = restore is not None and self.files.restored_on_all(restore, reset)
        except StateError:
            self.exchange.start()
            raise
        if is_restored:
            self.exchange.complete()
        else:
            self.exchange.start()

    def _restore(self, directory: Path, save: str) -> None:
        ranks, own = read_description(first_file(directory)).position.groups, self.files.position.groups
        if ranks != own:
            raise StateError(
                f"{directory} was saved by islands of {ranks} ranks, and these have {own}; start islands of that size"
            )
        if not self.files.restore(directory, save):
            self.exchange.discard_unowned_means()


def _base(directory: str | Path) -> Path:
    """Return the directory of the whole job, given it or that of an island."""
    path = Path(directory)
    return path.parent if ISLAND.fullmatch(path.name) else path
