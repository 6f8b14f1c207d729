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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torch.utils.data import DistributedSampler

from deepspeed_compress.backends.deepspeed.engine_facts import stage_count, tensor_size, tied_copies
from deepspeed_compress.checkpointing.deepspeed.checkpoint import writing
from deepspeed_compress.checkpointing.deepspeed.participants import Loaded, LoadRequest, Participant, SaveRequest
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.state_description import Position, read_description
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import CompressWarning, ConfigError, StateError, UnsupportedError
from deepspeed_compress.local_sgd.anchors import SharedAnchor
from deepspeed_compress.local_sgd.asynchronous_exchange import AsynchronousExchange
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import (
    ExchangedParameters,
    digest_parameters,
    find_exchanged,
    recover_from_divergence,
)
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates
from deepspeed_compress.local_sgd.deepspeed.replicated import SharedLayers
from deepspeed_compress.local_sgd.deepspeed.state_files import ExchangeFiles, check_tag, first_file
from deepspeed_compress.local_sgd.elastic_exchange import ElasticExchange, RoundConnections
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.local_sgd.round_peers import group_of_one
from deepspeed_compress.local_sgd.strategy import ExchangeContext, ExchangeResult, IslandRanks
from deepspeed_compress.monitor import Event
from deepspeed_compress.safe_files import hold
from deepspeed_compress.session.session import Session
from deepspeed_compress.session.state_files import NOT_SAVED, check_save, result_on_all

ExchangeStrategy = ElasticExchange | AsynchronousExchange
"""Exchanges of one rank with islands that join and leave: in rounds, or asynchronous."""
_POINTER = "/deepspeed_compress/islands/elastic"
_AHEAD = "ahead"
"""Key in the saved state: the number of steps by which the learning-rate schedule was ahead of the engine's steps."""
KEPT = 10_000
"""Maximum number of exchanges in the history."""
PATIENCE = timedelta(days=1)
"""Time that ranks wait for the first one beyond `give_up`, because votes of other islands have no limit."""
SEEDS = 1_000_003
"""Distance between the seeds of two islands. It is large because epochs add small numbers to a seed."""


def prepare_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of `deepspeed.initialize` without training data.

    The order of the data depends on the island's number, which is known only after the engine is made.

    Raises:
        UnsupportedError: the call has an `mpu`.
    """
    if call.get("mpu") is not None:
        raise UnsupportedError(
            f"{_POINTER} cannot be combined with an mpu (allowed: data parallelism, ZeRO 0 to 3, AutoTP, pipelines); "
            "remove the key, or the mpu"
        )
    return {**call, "training_data": None}


def attach_elastic(engine: Any, session: Session) -> "ElasticIsland":
    """Join the other islands, take their anchor, and exchange after steps from now on. Collective in the island.

    Raises:
        ConfigError: the engine already has a training data loader.
    """
    settings, patches = session.config.islands, session.patches
    assert settings is not None, "attached for a section with islands"
    # A stage in the middle of a pipeline has none.
    if any(gather_objects(engine.training_dataloader is not None)):
        raise ConfigError(
            f"{_POINTER}: the engine already has a data loader, whose order would be the same in all islands; pass "
            "the data to deepspeed_compress.initialize (training_data), or call engine.deepspeed_io after attach"
        )
    island = ElasticIsland(engine, settings, session)
    patches.precede(engine, "destroy", island.leave)
    patches.on_undo(island.leave)
    # Most programs never destroy the engine, and process exit takes time.
    atexit.register(island.leave)
    patches.wrap(engine, "deepspeed_io", island.deepspeed_io)
    island.start()
    session.join_islands(island)
    return island


class ElasticIsland(Participant):
    """This rank's island among others that join and leave, available as `engine.compression.islands`.

    Attributes:
        history: the results of the newest exchanges, at most `KEPT`.
        exchange: the exchange strategy.
    """

    def __init__(self, engine: Any, settings: Islands, session: Session) -> None:
        self._engine, self._session = engine, session
        self._learning_rates, self._islands_in_last_round = LearningRates(engine), 0
        self._ranks = IslandRanks(_make_group(settings) if dist.get_world_size() > 1 else None)
        self.history: deque[ExchangeResult] = deque(maxlen=KEPT)
        self._scheduled, self._must_resume = 0, False
        self._held: TextIO | None = None
        """Lock of the directory in which this island has saved last."""
        tensor, stages = tensor_size(engine), stage_count(engine)
        layers = SharedLayers(tensor, range(dist.get_world_size()), None, stages, tied_copies(engine))
        found = find_exchanged(engine, settings, session.parameters, layers)
        run, stores = replace(session.run, clock=StepClock()), ResidualStores(transactional=True)
        alone = ReductionContext(Groups(group_of_one()), found.parameters, stores, run, traffic="bytes_islands")
        recover = partial(recover_from_divergence, engine, found.master_weights, session.residuals.clear)
        self._context = ExchangeContext(settings, found.master_weights, alone, self._ranks, found.moments, recover)
        position = Position(0, 1, dist.get_rank(), dist.get_world_size())
        self._files = ExchangeFiles(engine, session.config, stores, position)
        self.exchange = _connect(self._context, self._terms(found), self._learning_rates)

    @property
    def number(self) -> int:
        """Return the unique number of this island."""
        return int(self.exchange.number)

    def start(self) -> None:
        """Take the anchor of the other islands, and follow their learning rates. Collective in the island."""
        self._learning_rates.catch_up(self.exchange.start(int(self._engine.global_samples)))

    def step_ended(self, step: int) -> None:
        """Exchange after an optimizer step, if it is time or others are waiting. Collective in the island."""
        if self._must_resume:
            # A load has raised an error, and the program continues without the state of the checkpoint.
            self._resume(None)
        self._learning_rates.update_snapshot()
        result = self.exchange.step_ended(int(self._engine.global_samples))
        if result is None:
            return
        self.history.append(result)
        if result.metadata:
            self._learning_rates.catch_up(result.metadata)
        if result.kind != "exchange" or result.islands != self._islands_in_last_round:
            before, after = (f"{count} islands" for count in (self._islands_in_last_round, result.islands))
            evidence = {"round": float(result.round), "seconds": result.seconds}
            usual = "taking part again" if result.kind == "renewed" else "islands have joined or left"
            reason = result.reason or usual
            self._session.log.record(Event(step, f"islands_{result.kind}", reason, evidence, before, after))
        self._islands_in_last_round = result.islands

    def leave(self) -> None:
        """Leave the other islands, so that they do not wait for this one."""
        atexit.unregister(self.leave)
        self.exchange.leave()
        if self._held is not None:
            self._held.close()
            self._held = None

    def deepspeed_io(self, original: Callable[..., Any], dataset: Any, *args: Any, **options: Any) -> Any:
        """Call DeepSpeed's `deepspeed_io` with training data in an order that no other island has."""
        given = inspect.signature(original).bind(dataset, *args, **options).arguments
        training = given.get("route", "train") == "train"
        if training and given.get("data_sampler") is None and self._engine.is_map_style_dataset(dataset):
            readers = self._engine.seq_data_parallel_group
            given["data_sampler"] = IslandSampler(dataset, readers.size(), readers.rank(), self)
        return original(**given)

    @contextmanager
    def saving(self, request: SaveRequest) -> Iterator[SaveRequest]:
        """Save the island's state of exchanges next to DeepSpeed's files."""
        check_tag(request.tag)
        self.exchange.prepare_save()
        self._ranks.run_on_first(partial(self._reserve_directory, Path(request.directory)))
        described = {**self.exchange.describe(), _AHEAD: self._learning_rates.ahead}
        result_on_all(partial(self._files.save, request, described, writing(self._session.saving)), problem=NOT_SAVED)
        yield request

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Note the step of the schedule, which a load without schedules keeps."""
        self._scheduled = self._learning_rates.step
        yield request

    def loaded(self, request: LoadRequest, found: Loaded | None) -> None:
        """Take the newest anchor.

        That is the anchor of the other islands, or of the newest checkpoint if all islands start again. Collective in
        the island, and with the others if all start again.
        """
        if found is None:
            return
        self.exchange.prepare_load()
        self._must_resume = True
        if request.load_lr_scheduler_states and not request.load_module_only:
            self._learning_rates.ahead = self._ranks.run_on_first(_saved_ahead, found, self._engine.global_steps)
        else:
            self._learning_rates.ahead = self._scheduled - int(self._engine.global_steps)
        self._resume(self._load_state(found) if request.loads_states else None)

    def _resume(self, saved: Mapping[str, Any] | None) -> None:
        """Take the newest anchor after a load. For `saved`, see `ElasticExchange.resume`."""
        metadata = self.exchange.resume(saved, int(self._engine.global_steps), int(self._engine.global_samples))
        self._must_resume = False
        self._learning_rates.catch_up(metadata)

    def _terms(self, found: ExchangedParameters) -> dict[str, Any]:
        """Return the settings that must be equal in all islands. Collective in the island.

        They include a digest of untrained weights, which no anchor contains.
        """
        settings = self._context.settings
        layout = repr([(segment.parameter, segment.begin, segment.numel) for segment in found.master_weights.segments])
        return {
            "minimum": self._context.elastic.minimum,
            "exchange": settings.exchange.model_dump(mode="json"),
            "outer": settings.outer.model_dump(mode="json"),
            "second_moments": settings.second_moments and settings.second_moments.model_dump(mode="json"),
            "ranks": dist.get_world_size(),
            "zero_stage": int(self._engine.zero_optimization_stage()),
            "parameters": self._digest(layout),
            "weights that are not trained": self._digest(digest_parameters(found.untrained)),
        }

    def _digest(self, text: str) -> str:
        """Return a digest of the texts of all ranks. Collective in the island."""
        return hashlib.sha256("".join(self._ranks.gather(text)).encode()).hexdigest()[:16]

    def _reserve_directory(self, directory: Path) -> None:
        """Reserve `directory` for the checkpoints of this island, until it saves in another one.

        Raises:
            StateError: another running island saves there. They would overwrite each other's files.
        """
        held, self._held = self._held, None
        if held is not None:
            held.close()
        # If nothing can be written there, the checkpoint itself reports it.
        with suppress(OSError):
            self._held = hold(directory)
            if self._held is None:
                raise StateError(
                    f"another running job saves in {directory}, and this is island {self.number}; give "
                    "save_checkpoint, or Trainer's output_dir, a different directory on every island"
                )

    def _load_state(self, found: Loaded) -> Mapping[str, Any] | None:
        """Restore the residuals of a checkpoint, and return what `ElasticExchange.resume` needs. Collective.

        Returns:
            The saved description of the island; None (with a CompressWarning unless there is no file) if it cannot be
            used.

        Raises:
            StateError: the state is damaged or missing on some rank, and `on_missing_state` is "error".
        """
        first, reset = first_file(found.place), "the island starts from the weights alone"
        if not self._ranks.run_on_first(first.exists):
            return None
        if not self._files.restored_on_all(partial(self._files.restore, found.place, found.save), reset):
            return None
        saved: Mapping[str, Any] = self._ranks.run_on_first(lambda: read_description(first).decisions)
        if "run" in saved:
            return saved
        warnings.warn(f"{reset}: {found.place} was saved by islands of one job", CompressWarning, stacklevel=4)
        return None


class IslandSampler(DistributedSampler[Any]):
    """Sampler of `island`, whose order follows from the island's number. A loaded checkpoint may change that number.

    Args:
        dataset: the data, all of which every island reads.
        readers: number of ranks of the island that read different samples.
        reader: index of this rank among them.
        island: the island.
    """

    def __init__(self, dataset: Any, readers: int, reader: int, island: ElasticIsland) -> None:
        super().__init__(dataset, readers, reader)
        self._island = island

    def __iter__(self) -> Iterator[Any]:
        self.seed = SEEDS * self._island.number
        return super().__iter__()


def _connect(context: ExchangeContext, terms: Mapping[str, Any], rates: LearningRates) -> ExchangeStrategy:
    """Return the exchange strategy that the configuration names, with its connections. Collective in the island.

    Args:
        context: the inputs of any strategy.
        terms: the settings that must be equal in all islands.
        rates: the learning rates of this island.
    """
    elastic, ranks = context.elastic, context.ranks
    if elastic.parameter_server is not None:
        pace = context.reduction.run.wait_to_send
        client = PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds, pace)
        terms = {**terms, "max_staleness": elastic.parameter_server.max_staleness}
        return AsynchronousExchange(context, client, terms, lambda: rates.step)
    connections = RoundConnections(elastic, SharedAnchor(context, rates.published))
    try:
        ranks.run_on_first(connections.join, terms, ranks.gather(connections.address))
        return ElasticExchange(context, connections)
    except BaseException:
        # Only this rank can report it: otherwise the others would wait for an island that does not train.
        connections.close()
        raise


def _make_group(settings: Islands) -> dist.ProcessGroup:
    """Return a group of the island's ranks, in which they wait while the first rank waits for other islands."""
    assert settings.elastic is not None, "made for elastic islands"
    timeout = timedelta(seconds=settings.elastic.give_up_seconds) + PATIENCE
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=timeout)
    return group


def _saved_ahead(found: Loaded, step: int) -> int:
    """Return the steps by which the schedule was ahead of the engine's; 0 if the checkpoint is not of an island."""
    file = first_file(found.place)
    try:
        description = read_description(file)
        check_save([(file, description)], step, found.save)
        return int(description.decisions.get(_AHEAD, 0))
    except StateError:
        # Reported before, or not a checkpoint of an island.
        return 0
