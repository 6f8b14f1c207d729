"""Islands that join and leave under DeepSpeed, each a job of its own.

An island's engine is the same as without islands. This module provides data in an order that no other island has,
learning-rate schedules that follow the other islands, checkpoints, and a history of exchanges. The exchange itself is
an `ExchangeStrategy`: in rounds, or asynchronous.
"""

import atexit
import hashlib
import inspect
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch.nn import Parameter
from torch.utils.data import DistributedSampler

from deepspeed_compress.backends.deepspeed.limits import tensor_size
from deepspeed_compress.backends.deepspeed.weights.master_weights import FlatMasterWeights, find_master_weights
from deepspeed_compress.checkpointing.deepspeed.exclusive import take_for_island
from deepspeed_compress.checkpointing.deepspeed.participants import LoadRequest, Participant, SaveRequest
from deepspeed_compress.collectives.parameters import Parameters
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.collectives.reduction import ReductionContext
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.config import Elastic, Islands, masked
from deepspeed_compress.errors import CompressWarning, ConfigError, StateError, UnsupportedError
from deepspeed_compress.local_sgd.coordinator.client import status
from deepspeed_compress.local_sgd.deepspeed.connecting import connect
from deepspeed_compress.local_sgd.deepspeed.consistency import (
    digest_parameters,
    recover_from_divergence,
    untrained_parameters,
)
from deepspeed_compress.local_sgd.deepspeed.context import ExchangeContext
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import select_exchanged
from deepspeed_compress.local_sgd.deepspeed.moments import find_second_moments
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates
from deepspeed_compress.local_sgd.deepspeed.replicated import WholeJob, check_equal_blocks, divide_replicated
from deepspeed_compress.local_sgd.deepspeed.tags import check_tag
from deepspeed_compress.local_sgd.island_ranks import IslandRanks
from deepspeed_compress.local_sgd.strategy import ExchangeResult
from deepspeed_compress.monitor import Event
from deepspeed_compress.session.parts import Parts
from deepspeed_compress.session.state_files import check_owners, on_all_ranks, save_on_all

_POINTER = "/deepspeed_compress/islands/elastic"
_STEM = "deepspeed_compress_islands"
_AHEAD = "ahead"
"""Key in the saved state: the number of steps by which the learning-rate schedule was ahead of the engine's steps."""
KEPT = 10_000
"""Maximum number of exchanges in the history."""
SEEDS = 1_000_003
"""Distance between the seeds of two islands. It is large because epochs add small numbers to a seed."""


def prepare_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` without training data.

    The order of the data depends on the island's number, which is known only after the engine is made.

    Raises:
        UnsupportedError: the model is a pipeline, or the call has an `mpu`.
    """
    if call.get("mpu") is not None or isinstance(call.get("model"), PipelineModule):
        raise UnsupportedError(
            f"{_POINTER} cannot be combined with a pipeline or an mpu (allowed: data parallelism, ZeRO 0 to 3, "
            "AutoTP); remove the key, or the division of the model"
        )
    return {**call, "training_data": None}


def attach_elastic(engine: Any, parameters: Parameters, parts: Parts) -> "ElasticIsland":
    """Join the other islands, take their anchor, and exchange after steps from now on. Collective in the island.

    Raises:
        ConfigError: the engine already has a training data loader.
    """
    settings = parts.config.islands
    assert settings is not None, "attached for a section with islands"
    if engine.training_dataloader is not None:
        raise ConfigError(
            f"{_POINTER}: the engine already has a data loader, whose order would be the same in all islands "
            "(allowed: training_data of deepspeed_compress.initialize); pass the data there, or call "
            "engine.deepspeed_io after attach"
        )
    island = ElasticIsland(engine, settings, parameters, parts)
    parts.patches.precede(engine, "destroy", island.leave)
    parts.patches.on_undo(island.leave)
    # Most programs never destroy the engine, and process exit takes time.
    atexit.register(island.leave)
    parts.patches.wrap(engine, "deepspeed_io", island.deepspeed_io)
    island.catch_up(island.exchange.start(int(engine.global_samples)))
    return island


def _without_copies(
    master_weights: FlatMasterWeights, parameters: Parameters, tensor: int, moments: bool
) -> FlatMasterWeights:
    """Return `master_weights` without the weights that another rank sharing the layer exchanges. Collective.

    Args:
        master_weights: the master weights that this rank exchanges.
        parameters: the parameters, of which `excluded` names those that these ranks hold in full.
        tensor: the number of ranks that share each layer.
        moments: True if second moments are exchanged too.
    """
    job = WholeJob.of_all(tensor)
    if moments:
        check_equal_blocks(master_weights, parameters, job)
    return divide_replicated(master_weights, parameters, job)


class ElasticIsland(Participant):
    """This rank's island among others that join and leave, available as `engine.compression.islands`.

    Attributes:
        history: the results of the newest exchanges, at most `KEPT`.
        exchange: the exchange strategy.
    """

    def __init__(self, engine: Any, settings: Islands, parameters: Parameters, parts: Parts) -> None:
        assert settings.elastic is not None, "attached for elastic islands"
        self._engine, self._parts, self._settings = engine, parts, settings
        self._learning_rates, self._islands_in_last_round = LearningRates(engine), 0
        self._ranks = IslandRanks(dist.new_group(backend="gloo") if dist.get_world_size() > 1 else None)
        self.history: deque[ExchangeResult] = deque(maxlen=KEPT)
        self._has_left, self._scheduled = False, 0
        self._tensor = tensor_size(engine)
        trained = find_master_weights(engine)
        master_weights, shared = select_exchanged(settings.own, trained, parameters)
        moments = find_second_moments(engine, settings, master_weights)
        if self._tensor > 1:
            master_weights = _without_copies(master_weights, parameters, self._tensor, moments is not None)
        names = chain(*self._ranks.gather([one.parameter for one in trained.slices]))
        terms = self._terms(
            settings, settings.elastic, master_weights, untrained_parameters(engine, {*names}, settings.own)
        )
        reduction_context = partial(
            ReductionContext,
            parameters=shared,
            stores=ResidualStores(transactional=True),
            run=replace(parts.run, clock=StepClock()),
            traffic="bytes_islands",
        )
        recover = partial(recover_from_divergence, engine, master_weights, parts.residuals.clear)
        rates = self._learning_rates
        self.exchange = connect(
            ExchangeContext(settings, master_weights, reduction_context, self._ranks, terms, rates, moments, recover)
        )

    @property
    def number(self) -> int:
        """Return the unique number of this island."""
        return int(self.exchange.number)

    def step_ended(self, step: int) -> None:
        """Exchange after an optimizer step, if it is time or others are waiting. Collective in the island."""
        self._learning_rates.update_snapshot()
        result = self.exchange.step_ended(int(self._engine.global_samples))
        if result is None:
            return
        self.history.append(result)
        if result.metadata:
            self.catch_up(result.metadata)
        if result.kind != "exchange" or result.islands != self._islands_in_last_round:
            self._record(step, result)
        self._islands_in_last_round = result.islands

    def leave(self) -> None:
        """Leave the other islands, so that they do not wait for this one."""
        atexit.unregister(self.leave)
        self._has_left = True
        self.exchange.leave()

    def catch_up(self, metadata: Mapping[str, Any]) -> None:
        """Advance the learning rates to those of the other islands, which published `metadata`."""
        self._learning_rates.catch_up(metadata)

    def deepspeed_io(self, original: Callable[..., Any], dataset: Any, *args: Any, **options: Any) -> Any:
        """Call DeepSpeed's `deepspeed_io` with training data in an order that no other island has."""
        given = inspect.signature(original).bind(dataset, *args, **options).arguments
        training = given.get("route", "train") == "train"
        if training and given.get("data_sampler") is None and self._engine.is_map_style_dataset(dataset):
            # Ranks that share layers read the same data.
            world, rank = dist.get_world_size() // self._tensor, dist.get_rank() // self._tensor
            given["data_sampler"] = DistributedSampler(dataset, world, rank, seed=SEEDS * self.number)
        return original(**given)

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Save the island's state of exchanges next to DeepSpeed's files."""
        check_tag(request.tag)
        self.exchange.prepare_save()
        directory = Path(request.directory)
        self._ranks.run_on_first(partial(self._reserve_directory, directory))
        save_on_all(partial(self._save_state, directory / request.tag))
        yield request

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Note the step of the schedule, which a load without schedules keeps."""
        self._scheduled = self._learning_rates.step
        yield request

    def loaded(self, request: LoadRequest, file: str | None) -> None:
        """Take the newest anchor.

        That is the anchor of the other islands, or of the newest checkpoint if all islands start again. Collective in
        the island, and with the others if all start again.
        """
        if file is None:
            return
        directory = Path(file).parent
        self.exchange.prepare_load()
        saved = self._load_state(directory) if request.loads_states else None
        if request.load_lr_scheduler_states and not request.load_module_only:
            self._learning_rates.ahead = self._saved_ahead(directory)
        else:
            self._learning_rates.ahead = self._scheduled - int(self._engine.global_steps)
        metadata = self.exchange.resume(saved, int(self._engine.global_steps), int(self._engine.global_samples))
        self.catch_up(metadata)

    def _terms(
        self, settings: Islands, elastic: Elastic, master_weights: FlatMasterWeights, fixed: Sequence[Parameter]
    ) -> dict[str, Any]:
        """Return the settings that must be equal in all islands. Collective in the island.

        They include a digest of `fixed` weights, which no anchor contains.
        """
        layout = repr([(one.parameter, one.begin, one.numel) for one in master_weights.segments])
        return {
            "minimum": elastic.minimum,
            "exchange": settings.exchange.model_dump(mode="json"),
            "outer": settings.outer.model_dump(mode="json"),
            "second_moments": settings.second_moments and settings.second_moments.model_dump(mode="json"),
            "ranks": dist.get_world_size(),
            "zero_stage": int(self._engine.zero_optimization_stage()),
            "parameters": self._digest(layout),
            "weights that are not trained": self._digest(digest_parameters(fixed)),
        }

    def _digest(self, text: str) -> str:
        """Return a digest of the texts of all ranks. Collective in the island."""
        return hashlib.sha256("".join(self._ranks.gather(text)).encode()).hexdigest()[:16]

    def _record(self, step: int, result: ExchangeResult) -> None:
        before, after = (f"{count} islands" for count in (self._islands_in_last_round, result.islands))
        evidence = {"round": float(result.round), "seconds": result.seconds}
        reason = result.reason or ("taking part again" if result.kind == "renewed" else "islands have joined or left")
        self._parts.records.log.record(Event(step, f"islands_{result.kind}", reason, evidence, before, after))

    def _reserve_directory(self, directory: Path) -> None:
        """Reserve `directory` for the checkpoints of this island.

        Raises:
            StateError: another running island saves there. They would overwrite each other's files.
        """
        elastic, own = self._settings.elastic, self.exchange.describe()
        assert not self._has_left, "an island saves before it leaves"
        assert elastic is not None, "attached for elastic islands"
        take_for_island(directory, own["run"], own["number"], _connected_islands(elastic) - {self.number})

    def _save_state(self, directory: Path) -> None:
        kept = state.contents(
            self.exchange.stores.by_name,
            self._position,
            int(self._engine.zero_optimization_stage()),
            self._engine.global_steps,
            1.0,
            masked(self._parts.config.model_dump(mode="json")),
            {**self.exchange.describe(), _AHEAD: self._learning_rates.ahead},
        )
        state.write(kept, state.state_file(directory, dist.get_rank(), _STEM))

    @property
    def _position(self) -> state.Position:
        return state.Position(0, 1, dist.get_rank(), dist.get_world_size())

    def _load_state(self, directory: Path) -> Mapping[str, Any] | None:
        """Restore the residuals of a checkpoint, and return what `ExchangeStrategy.resume` needs. Collective.

        Returns:
            The saved description of the island; None (with a CompressWarning unless there is no file) if it cannot be
            used.

        Raises:
            StateError: the state is damaged or missing on some rank, and `on_missing_state` is "error".
        """
        first = state.state_file(directory, 0, _STEM)
        if not self._ranks.run_on_first(first.exists):
            return None
        problems = on_all_ranks(partial(self._restore, directory))
        config = self._parts.config
        if problems and config.on_missing_state == "error":
            raise StateError(
                f'{problems}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
                '"error", "reset"): the island then starts from the weights alone'
            )
        if problems:
            warnings.warn(f"the island starts from the weights alone: {problems}", CompressWarning, stacklevel=4)
            return None
        saved: Mapping[str, Any] = self._ranks.run_on_first(lambda: state.read_description(first).decisions)
        if "run" in saved:
            return saved
        warnings.warn(
            f"the island starts from the weights alone: {directory} was saved by islands of one job",
            CompressWarning,
            stacklevel=4,
        )
        return None

    def _saved_ahead(self, directory: Path) -> int:
        """Return the steps by which the schedule was ahead of the engine's; 0 if the checkpoint is not of an island."""
        file = state.state_file(directory, 0, _STEM)
        return self._ranks.run_on_first(lambda: _ahead_in(file))

    def _restore(self, directory: Path) -> None:
        found = state.sources(directory, dist.get_rank(), self._position, _STEM)
        check_owners(found[0][1], self._parts.config)
        state.restore(self.exchange.stores.by_name, found, self._position, 1.0, self._engine.device)


def _ahead_in(file: Path) -> int:
    try:
        return int(state.read_description(file).decisions.get(_AHEAD, 0))
    except StateError:
        # Reported before, or not a checkpoint of an island.
        return 0


def _connected_islands(elastic: Elastic) -> set[int]:
    """Return the numbers of the islands that are connected to the coordinator.

    Empty if the coordinator is unreachable, so that saving continues without it.
    """
    try:
        return {one["number"] for one in status(elastic.rendezvous)["islands"]}
    except (OSError, ValueError, KeyError):
        return set()
