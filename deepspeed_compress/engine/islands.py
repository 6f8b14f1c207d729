"""Islands under DeepSpeed: a data-parallel group for each, batches of the whole job, exchanges, checkpoints.

DeepSpeed divides ranks as the `mpu` that it is given says, so an island is the data-parallel group of its engine, and
ZeRO, norms and overflow checks stay inside. What goes wrong by itself is put right here: batch arithmetic, samplers,
the first weights, and files that islands would overwrite for each other.
"""

import copy
import inspect
import itertools
import os
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.utils import groups
from torch.distributed import ProcessGroup
from torch.utils.data import DistributedSampler

from deepspeed_compress.communication.islands import IslandExchange
from deepspeed_compress.communication.reducer import Run, StepClock
from deepspeed_compress.communication.reduction import Groups, Parameters, Reductions, Site
from deepspeed_compress.compression import state
from deepspeed_compress.compression.residuals import ResidualStores
from deepspeed_compress.config import CompressConfig, Islands
from deepspeed_compress.engine.groups import downward_group, made_group
from deepspeed_compress.engine.masters import find_masters
from deepspeed_compress.engine.memories import check_owners, on_all_ranks
from deepspeed_compress.engine.session import Session
from deepspeed_compress.errors import CompressWarning, ConfigError, StateError, UnsupportedError

__all__ = ["IslandUnit", "attach_islands", "check_undivided", "divide_call", "make_unit"]

_POINTER = "/deepspeed_compress/islands"


@dataclass(frozen=True)
class IslandUnit:
    """What DeepSpeed calls an `mpu`: this rank's island as the data-parallel group, and no model parallelism.

    `ranks`: global ones of the island. `alone`: a group of this rank. `peers`: the ranks of equal place.
    """

    ranks: tuple[int, ...]
    number: int
    islands: int
    island: ProcessGroup
    alone: ProcessGroup
    peers: ProcessGroup
    downward: ProcessGroup | None

    def get_data_parallel_group(self) -> ProcessGroup:
        return self.island

    def get_data_parallel_group_ranks(self) -> list[int]:
        return list(self.ranks)

    def get_data_parallel_world_size(self) -> int:
        return len(self.ranks)

    def get_data_parallel_rank(self) -> int:
        return self.ranks.index(dist.get_rank())

    def get_model_parallel_group(self) -> ProcessGroup:
        return self.alone

    def get_model_parallel_world_size(self) -> int:
        return 1

    def get_model_parallel_rank(self) -> int:
        return 0

    # Names by which DeepSpeed asks as well (`bwc_tensor_model_parallel_rank` and others).
    get_tensor_model_parallel_group = get_model_parallel_group
    get_tensor_model_parallel_world_size = get_model_parallel_world_size
    get_tensor_model_parallel_rank = get_model_parallel_rank
    get_pipeline_model_parallel_world_size = get_model_parallel_world_size
    get_pipeline_model_parallel_rank = get_model_parallel_rank


def make_unit(settings: Islands) -> IslandUnit:
    """Divide the ranks of the job. Collective; joins the job first, where that is not done. Raises ConfigError."""
    if not dist.is_initialized():
        deepspeed.init_distributed()
    world, rank = dist.get_world_size(), dist.get_rank()
    size = _ranks_of_host() if settings.by_host else settings.size
    assert size is not None, "size or by_host: the section is checked"
    if world % size:
        key = "by_host" if settings.by_host else "size"
        raise ConfigError(
            f"{_POINTER}/{key}: islands of {size} do not divide the {world} ranks of the job (allowed: divisors); "
            "start as many ranks for every island"
        )
    if world == size and settings.outer.optimizer == "average" and settings.outer.lr == 1.0:
        text = (
            f"{_POINTER}: has no effect, because all {world} ranks are one island; start more, or write smaller islands"
        )
        warnings.warn(text, CompressWarning, stacklevel=4)
    islands = [tuple(range(first, first + size)) for first in range(0, world, size)]
    places = list(zip(*islands, strict=True))
    number = rank // size
    return IslandUnit(
        ranks=islands[number],
        number=number,
        islands=len(islands),
        island=made_group(islands),
        alone=made_group([(one,) for one in range(world)]),
        peers=made_group(places),
        downward=downward_group(places),
    )


def _ranks_of_host() -> int:
    """As torchrun, and as the deepspeed launcher says it. Raises ConfigError where neither has."""
    told = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE")
    if told is None:
        raise ConfigError(
            f"{_POINTER}/by_host: true, and this launcher sets neither LOCAL_WORLD_SIZE nor LOCAL_SIZE (allowed: size "
            'in its place); write "size": 8, the ranks of a host'
        )
    return int(told)


def divide_call(unit: IslandUnit, call: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `deepspeed.initialize` for one island; `config`: of the whole job. Raises UnsupportedError.

    `train_batch_size` is that of the job, as without islands; DeepSpeed gets the island's part. Training data is left
    out, for `attach_islands` to divide over all ranks.
    """
    if call.get("mpu") is not None or isinstance(call.get("model"), PipelineModule):
        raise UnsupportedError(
            f"{_POINTER} divides the ranks by itself, and not beside a pipeline or another mpu (allowed: data "
            "parallelism, ZeRO 0 to 3); remove the key, or the other division"
        )
    divided = copy.deepcopy(dict(config))
    batch = divided.get("train_batch_size")
    if isinstance(batch, int):
        if batch % unit.islands:
            raise ConfigError(
                f"/train_batch_size: {batch} is not divisible by {unit.islands} islands (allowed: multiples); write "
                f"{batch + -batch % unit.islands}"
            )
        divided["train_batch_size"] = batch // unit.islands
    return {**call, "config": divided, "mpu": unit, "training_data": None}


def attach_islands(engine: Any, unit: IslandUnit, parameters: Parameters, session: Session) -> IslandExchange:
    """Exchange after steps of `engine`, which was made by a `divide_call`, and keep the files of islands apart."""
    run = Run(StepClock(), session.meter, session.config.seed)
    settings = session.config.islands
    assert settings is not None, "attached for a section without islands"
    stores = ResidualStores(transactional=False)
    whole = replace(parameters, exempt=frozenset(), dtype=torch.float32)
    site = Site(Groups(unit.peers, downward=unit.downward), whole, stores, run)
    exchange = IslandExchange(settings, find_masters(engine), Reductions(site), unit.island)
    session.patches.precede(engine, "destroy", partial(_undivide, unit))
    session.patches.wrap(engine, "deepspeed_io", partial(_over_all_ranks, engine))
    files = _Files(engine, unit, exchange, session.config)
    session.patches.wrap(engine, "save_checkpoint", files.save)
    session.patches.wrap(engine, "load_checkpoint", files.load)
    exchange.start()
    return exchange


def _undivide(unit: IslandUnit) -> None:
    """DeepSpeed keeps the last `mpu` for all engines to come; without this one they are divided as ever."""
    if groups.mpu is unit:
        groups.mpu = None


def check_undivided() -> None:
    """UnsupportedError while an engine with islands lives: DeepSpeed would divide another one in the same way."""
    if isinstance(groups.mpu, IslandUnit):
        raise UnsupportedError(
            f"{_POINTER} is missing, and an engine of this process has it: DeepSpeed divides the ranks of both alike; "
            "write the same islands into both, or destroy the first engine"
        )


def _over_all_ranks(engine: Any, original: Callable[..., Any], dataset: Any, *args: Any, **options: Any) -> Any:
    """DeepSpeed's `deepspeed_io`, which divides a data set over the island alone."""
    given = inspect.signature(original).bind(dataset, *args, **options).arguments
    if given.get("data_sampler") is None and engine.is_map_style_dataset(dataset):
        shuffle = given.get("route", "train") == "train"
        world, rank = dist.get_world_size(), dist.get_rank()
        given["data_sampler"] = DistributedSampler(dataset, num_replicas=world, rank=rank, shuffle=shuffle)
    return original(**given)


@dataclass(frozen=True)
class _Files:
    """Checkpoints: those of island 0 stand where a job without islands has them, those of island k in `island_k` there.

    What islands remember of each other stands in the tag directory of island 0, a pair of files a rank (`state`).
    """

    engine: Any
    unit: IslandUnit
    exchange: IslandExchange
    config: CompressConfig

    @property
    def position(self) -> state.Position:
        """Islands may be more or fewer when it is loaded; their ranks may not."""
        return state.Position(
            self.unit.number, self.unit.islands, self.unit.get_data_parallel_rank(), len(self.unit.ranks)
        )

    def save(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """DeepSpeed's `save_checkpoint`. What is on its way is taken first, so a resumed run goes on as this one."""
        given = inspect.signature(original).bind(*args, **options).arguments
        if not given["save_dir"]:
            return original(**given)
        self.exchange.finish()
        base, tag = _base(given["save_dir"]), str(given.get("tag") or f"global_step{self.engine.global_steps}")
        mine = _directory(base, self.unit.number)
        (mine / tag).mkdir(parents=True, exist_ok=True)
        problems = on_all_ranks(partial(self._save_state, base / tag))
        if problems:
            raise StateError(f"the state of islands is not saved: {problems}")
        saved = original(**{**given, "save_dir": str(mine), "tag": tag})
        if self.unit.number and dist.get_rank() == self.unit.ranks[0] and given.get("save_latest", True):
            (mine / "latest").write_text(tag, encoding="utf-8")
        dist.barrier()
        return saved

    def load(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """DeepSpeed's `load_checkpoint`. With more islands than were saved, the first ones are loaded again."""
        given = inspect.signature(original).bind(*args, **options).arguments
        self.exchange.forget()
        base = _base(given["load_dir"])
        found = original(**{**given, "load_dir": str(_directory(base, self.unit.number % _saved_islands(base)))})
        if found[0] is not None:
            whole = given.get("load_optimizer_states", True) and not given.get("load_module_only", False)
            self._load_state(base / Path(found[0]).parent.name if whole else None)
        return found

    def _save_state(self, directory: Path) -> None:
        state.save(
            self.exchange.stores.by_name,
            state.state_file(directory, dist.get_rank(), _STEM),
            self.position,
            int(self.engine.zero_optimization_stage()),
            self.engine.global_steps,
            1.0,
            self.config.model_dump(mode="json"),
            {},
        )

    def _load_state(self, directory: Path | None) -> None:
        """What islands remember; where nothing is to be had, all begin with what the first one has loaded."""
        if directory is None or not state.state_file(directory, 0, _STEM).exists():
            self.exchange.start()
            return
        problems = on_all_ranks(partial(self._restore, directory))
        if not problems:
            return
        if self.config.on_missing_state == "error":
            raise StateError(
                f'{problems}. Restore the file, or write "on_missing_state": "reset" into deepspeed_compress (allowed: '
                '"error", "reset"): all islands then begin with the weights of the first one'
            )
        warnings.warn(f"islands begin with the weights of the first one: {problems}", CompressWarning, stacklevel=3)
        self.exchange.start()

    def _restore(self, directory: Path) -> None:
        found = state.sources(directory, dist.get_rank(), self.position, _STEM)
        check_owners(found[0][1], self.config)
        stores, device = self.exchange.stores.by_name, self.engine.device
        if not state.restore(stores, found, self.position, 1.0, device):
            self.exchange.keep_owned()


_STEM = "deepspeed_compress_islands"


def _base(directory: str | Path) -> Path:
    """The directory of the whole job, also where that of an island is given."""
    path = Path(directory)
    return path.parent if _ISLAND.fullmatch(path.name) else path


_ISLAND = re.compile(r"island_\d{4}")


def _directory(base: Path, island: int) -> Path:
    return base / f"island_{island:04d}" if island else base


def _saved_islands(base: Path) -> int:
    """How many islands have saved in `base`."""
    return next(count for count in itertools.count(1) if not _directory(base, count).is_dir())
