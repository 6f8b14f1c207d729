"""Islands within one DeepSpeed job: exchanges, data of the whole job, checkpoints.

An engine's data-parallel group is that of its island (`division`), so ZeRO, norms and overflow checks stay within it.
This module handles what would otherwise go wrong: samplers, initial weights, and checkpoint files that islands would
overwrite for each other.
"""

import atexit
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_compress.backends.deepspeed.division import divide_data
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.backends.deepspeed.weights.copies import check_equal_layouts, copy_weights
from deepspeed_compress.backends.deepspeed.weights.master_weights import find_master_weights
from deepspeed_compress.checkpointing.deepspeed.participants import (
    LoadRequest,
    Participant,
    SaveRequest,
    attach_participants,
)
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.config import CompressConfig, masked
from deepspeed_compress.config.islands import island_directory
from deepspeed_compress.errors import CompressWarning, StateError
from deepspeed_compress.local_sgd.deepspeed.consistency import (
    recover_from_divergence,
    untrained_parameters,
)
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import select_exchanged
from deepspeed_compress.local_sgd.deepspeed.moments import find_second_moments
from deepspeed_compress.local_sgd.deepspeed.rates import rates_of, warn_of_unequal_rates
from deepspeed_compress.local_sgd.deepspeed.replicated import check_equal_blocks, divide_replicated
from deepspeed_compress.local_sgd.deepspeed.tags import ISLAND, check_tag, tag_of_file
from deepspeed_compress.local_sgd.fixed_exchange import FixedExchange
from deepspeed_compress.session.parts import Parts
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.state_files import check_owners, on_all_ranks


def attach_islands(
    engine: Any, unit: IslandUnit, parameters: Parameters, parts: Parts
) -> tuple[FixedExchange, Participant]:
    """Exchange after steps of `engine`, which was made from a `divide_call`. Collective.

    Returns:
        The exchange, and the participant in saving and loading that keeps the files of islands apart.
    """
    run, settings, patches = replace(parts.run, clock=StepClock()), parts.config.islands, parts.patches
    assert settings is not None, "attached for a section without islands"
    stores = ResidualStores(transactional=False)
    trained = find_master_weights(engine)
    master_weights, shared = select_exchanged(settings.own, trained, parameters)
    moments = find_second_moments(engine, settings, master_weights)
    if unit.tensor > 1 and moments is not None:
        check_equal_blocks(master_weights, parameters, unit)
    if unit.tensor > 1:
        master_weights = divide_replicated(master_weights, parameters, unit)
    check_equal_layouts(master_weights, unit)
    _warn_of_unequal_rates(engine)
    names = gather_objects([one.parameter for one in trained.slices])
    # No exchange sends untrained weights.
    copy_weights(untrained_parameters(engine, {*chain(*names)}, settings.own), engine.device, unit.peers)
    reduction_context = ReductionContext(
        Groups(unit.peers, downward=unit.downward), shared, stores, run, traffic="bytes_islands"
    )
    exchange = FixedExchange(
        settings,
        master_weights,
        reduction_context,
        unit.whole,
        unit.number,
        moments,
        partial(recover_from_divergence, engine, master_weights, parts.residuals.clear),
    )
    divide_data(engine, unit, patches)
    exchange.start()
    # Most programs never destroy the engine.
    end = partial(_end, weakref.ref(exchange))
    atexit.register(end)
    patches.precede(engine, "destroy", end)
    patches.on_undo(end)
    return exchange, _Files(engine, unit, exchange, parts.config)


def _warn_of_unequal_rates(engine: Any) -> None:
    """Warn, on each rank whose learning rates differ from those of the first rank. Collective."""
    every = gather_objects(rates_of(engine))
    warn_of_unequal_rates(rates_of(engine), every[0], "the first island")


def stay_apart(engine: Any, unit: IslandUnit) -> None:
    """Keep the data and files of this island apart after `detach`, for as long as `engine` exists.

    Its groups are still those of an island, whose files others must not overwrite.
    """
    patches = Patches()
    divide_data(engine, unit, patches)
    attach_participants(engine, [_Directory(unit)], patches)


@dataclass(frozen=True)
class _Directory(Participant):
    """Participant that saves and loads in the island's own directory, without any exchange."""

    unit: IslandUnit

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        check_tag(request.tag)
        yield replace(request, directory=self._own(request.directory))

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        if not request.directory:
            yield request
            return
        tag = request.tag
        if tag is None:
            # DeepSpeed writes `latest` only on the first rank of the job.
            tag = _latest(_base(request.directory))
        else:
            check_tag(tag)
        yield replace(request, directory=self._own(request.directory), tag=tag)

    def _own(self, directory: str | Path) -> str:
        return str(_directory(_base(directory), self.unit.number))


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

    engine: Any
    unit: IslandUnit
    exchange: FixedExchange
    config: CompressConfig

    @property
    def position(self) -> state.Position:
        """Return the position of this rank among all islands.

        The number of islands may change between saving and loading. Their number of ranks may not.
        """
        return state.Position(self.unit.number, self.unit.count, self.unit.place, len(self.unit.ranks))

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
        mine = _directory(base, self.unit.number)
        (mine / tag).mkdir(parents=True, exist_ok=True)
        problems = on_all_ranks(partial(self._save_state, base / tag))
        if problems:
            raise StateError(f"the state of islands is not saved: {problems}")
        yield replace(request, directory=str(mine))
        if self.unit.number and dist.get_rank() == self.unit.ranks[0] and request.save_latest:
            (mine / "latest").write_text(tag, encoding="utf-8")
        dist.barrier()

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Load from the island's directory.

        If there are more islands than were saved, the first ones are loaded more than once.
        """
        self.exchange.discard()
        base = _base(request.directory)
        tag = _latest(base) if request.tag is None else request.tag
        islands = 1 if tag is None else _saved_islands(base / tag)
        if not self.engine.load_universal_checkpoint():
            # Each directory has its own `latest`, which is outdated for an island that was not part of the last save.
            request = replace(request, tag=tag)
        yield replace(request, directory=str(_directory(base, self.unit.number % islands)))

    def loaded(self, request: LoadRequest, file: str | None) -> None:
        """Restore the exchange state.

        Raises:
            StateError: islands loaded different checkpoints, or the exchange state cannot be restored.
        """
        tag = None if file is None else tag_of_file(file, request.directory)
        self._check_loaded(tag)
        if tag is not None:
            self._load_state(_base(request.directory) / tag if request.loads_states else None)

    def _check_loaded(self, tag: str | None) -> None:
        """Check that all islands have loaded the checkpoint `tag`; None stands for no checkpoint. Collective.

        Raises:
            StateError: they have not. Raised on all ranks.
        """
        tags = gather_objects(tag)
        if len(set(tags)) > 1:
            found = ", ".join(sorted({str(tag) for tag in tags}))
            raise StateError(
                f"islands loaded different checkpoints: {found} (allowed: one for all islands); give load_checkpoint "
                "a tag"
            )

    def _save_state(self, directory: Path) -> None:
        kept = state.contents(
            self.exchange.stores.by_name,
            self.position,
            int(self.engine.zero_optimization_stage()),
            self.engine.global_steps,
            1.0,
            masked(self.config.model_dump(mode="json")),
            {},
        )
        state.write(kept, state.state_file(directory, dist.get_rank(), _STEM))

    def _load_state(self, directory: Path | None) -> None:
        """Restore the exchange state. If there is none, all islands start with the weights that the first one loaded.

        Raises:
            StateError: it cannot be restored, and `on_missing_state` is "error".
        """
        if directory is None or not state.state_file(directory, 0, _STEM).exists():
            self.exchange.start()
            return
        problems = on_all_ranks(partial(self._restore, directory))
        if not problems:
            self.exchange.complete()
            return
        if self.config.on_missing_state == "error":
            raise StateError(
                f'{problems}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
                '"error", "reset"): all islands then start from the weights of the first one'
            )
        warnings.warn(f"islands start from the weights of the first one: {problems}", CompressWarning, stacklevel=4)
        self.exchange.start()

    def _restore(self, directory: Path) -> None:
        ranks = state.read_description(state.state_file(directory, 0, _STEM)).position.groups
        if ranks != self.position.groups:
            raise StateError(
                f"{directory} was saved by islands of {ranks} ranks, and these have {self.position.groups} (allowed: "
                "the same number); start islands of that size"
            )
        found = state.sources(directory, dist.get_rank(), self.position, _STEM)
        check_owners(found[0][1], self.config)
        stores, device = self.exchange.stores.by_name, self.engine.device
        if not state.restore(stores, found, self.position, 1.0, device):
            self.exchange.discard_unowned_means()


_STEM = "deepspeed_compress_islands"


def _base(directory: str | Path) -> Path:
    """Return the directory of the whole job, given it or that of an island."""
    path = Path(directory)
    return path.parent if ISLAND.fullmatch(path.name) else path


def _directory(base: Path, island: int) -> Path:
    return base / island_directory(island)


def _latest(base: Path) -> str | None:
    file = base / "latest"
    return file.read_text(encoding="utf-8").strip() if file.is_file() else None


def _saved_islands(directory: Path) -> int:
    """Return the number of islands that saved the checkpoint in the tag `directory`; 1 for a job without islands."""
    first = state.state_file(directory, 0, _STEM)
    return state.read_description(first).position.size if first.exists() else 1
