"""Loading of DeepSpeed checkpoints saved by another number of data-parallel ranks, by repartitioning ZeRO's states.

DeepSpeed refuses them ("Automatic adjustment ... is not currently supported", `engine.py`, `_load_zero_checkpoint`; it
checks this before `elastic_checkpoint`). Each rank's partition is assembled from the files of all ranks that saved the
checkpoint (`zero_parts`). The files are memory-mapped, so a rank reads only what it needs.

Universal checkpoints are refused here if they would load incorrectly, and newer checkpoints of the run are preferred.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint import constants
from deepspeed.checkpoint.universal_checkpoint import SubparamShape
from torch import Tensor

from deepspeed_compress.backends.deepspeed.units import node_unit
from deepspeed_compress.backends.deepspeed.versions import model_parallel_rank, tensor_parallel_record
from deepspeed_compress.checkpointing.completeness import LATEST_UNIVERSAL
from deepspeed_compress.checkpointing.deepspeed.checkpoint import find_place
from deepspeed_compress.checkpointing.deepspeed.engine_files import read_states
from deepspeed_compress.checkpointing.deepspeed.participants import LoadRequest, Participant
from deepspeed_compress.checkpointing.deepspeed.zero_parts import (
    Fragments,
    even_piece,
    state_of_zero_3,
    state_of_zero_12,
)
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.patches import replaced
from deepspeed_compress.session.state_files import result_on_all


@dataclass(frozen=True)
class _Saved:
    """Description of a checkpoint, from the file of its first rank.

    Attributes:
        directory: the directory of checkpoints.
        tag: the tag of the checkpoint.
        ranks: the size of its data-parallel groups.
        models: the number of combinations of tensor and pipeline rank.
    """

    directory: Path
    tag: str
    ranks: int
    models: int


class Resharding(Participant):
    """Participant that lets `engine` load checkpoints of any number of data-parallel ranks."""

    def __init__(self, engine: Any, config: CompressConfig) -> None:
        self._engine, self._config = engine, config

    @contextmanager
    def loading(self, request: LoadRequest) -> Iterator[LoadRequest]:
        """Replace what DeepSpeed reads the files with, if another number of ranks has saved them. Collective.

        Raises:
            StateError: the checkpoint cannot be repartitioned. Raised before anything is loaded.
        """
        engine, directory = self._engine, Path(request.directory)
        models = find_place(engine, self._config).position.groups
        unit = node_unit(engine)
        if unit is not None:
            # Each shard of a node has a group of its own.
            models //= unit.get_data_parallel_world_size()
        if engine.load_universal_checkpoint():
            result_on_all(partial(_check_universal, engine, directory, request.tag))
            yield request
            return
        saved = result_on_all(partial(_read_saved, engine, directory, request.tag))
        if saved is not None and request.loads_states and models != saved.models:
            raise StateError(
                f"{saved.directory / saved.tag}: saved with {saved.models} combinations of tensor and pipeline rank, "
                f"this run has {models} (allowed: the same). Convert it, ds-compress checkpoint convert {directory} "
                f'--tag {saved.tag}, and write "checkpoint": {{"load_universal": true}}'
            )
        changes = {}
        if saved is not None and saved.ranks != engine.seq_dp_world_size:
            changes = _Cut(engine, saved).replacements(request.loads_states)
        with replaced(engine, **changes):
            yield request


def _read_saved(engine: Any, directory: Path, tag: str | None) -> _Saved | None:
    """Return the description of the checkpoint `tag`, or of the latest one; None if its files are missing.

    DeepSpeed reports that.
    """
    tag = tag or CheckpointDirectory(directory).latest_tag()
    names = [] if tag is None else _model_files(engine, str(directory), tag)
    if tag is None or not names:
        return None
    found = read_states(Path(names[0]))
    return _Saved(directory, tag, int(found["dp_world_size"]), len(names))


def _model_files(engine: Any, directory: str, tag: str) -> list[str]:
    """Return the files of the first data-parallel rank, one for each combination of tensor and pipeline rank."""
    pattern = Path(engine._get_ckpt_name(directory, tag, mp_placeholder="*", pp_placeholder="0"))
    return sorted(map(str, pattern.parent.glob(pattern.name)))


class _Cut:
    """Replacements for an engine's loading functions, which read the files of another number of ranks."""

    def __init__(self, engine: Any, saved: _Saved) -> None:
        self._engine = engine
        self._saved = saved
        self._rank = dist.get_rank(engine.seq_data_parallel_group)

    def replacements(self, states: bool) -> dict[str, Callable[..., Any]]:
        """Return the replacements by name, including that for ZeRO's states if these are loaded.

        Raises:
            StateError: they cannot be repartitioned.
        """
        engine, saved, found = self._engine, self._saved, dict[str, Callable[..., Any]]()
        if states and engine.zero_optimization():
            kept = {"experts": engine.has_moe_layers, "optimizer states on NVMe": engine.zero_nvme_offload_optimizer()}
            for what in (name for name, there in kept.items() if there):
                raise StateError(
                    f"{saved.directory / saved.tag}: saved by {saved.ranks} data-parallel ranks, but this run has "
                    f"{engine.seq_dp_world_size}: {what} cannot be resharded (allowed: the same number)"
                )
            found["_load_zero_checkpoint"] = self._load_zero
        if engine.zero_optimization_partition_weights():
            found["_get_all_ckpt_names"] = partial(self._find_model_files, engine._get_all_ckpt_names)
            found["load_module_state_dict"] = partial(self._load_module, engine.load_module_state_dict)
        return found

    def _load_zero(self, *args: Any, **options: Any) -> bool:
        """Load the ZeRO states in place of DeepSpeed's `_load_zero_checkpoint`. Collective.

        Raises:
            StateError: some rank failed. Raised on all ranks.
        """
        engine = self._engine
        states: list[dict[str, Any] | None] = [None] * engine.seq_dp_world_size
        states[self._rank] = result_on_all(self._state, problem=f"{self._saved.directory / self._saved.tag}: ")
        engine.optimizer.load_state_dict(
            state_dict_list=states, load_from_fp32_weights=engine.zero_load_from_fp32_weights()
        )
        return True

    def _state(self) -> dict[str, Any]:
        engine = self._engine
        files = engine._get_mp_rank_zero_checkpoint_names(
            str(self._saved.directory),
            self._saved.tag,
            model_parallel_rank(engine),
            self._saved.ranks,
            engine.bfloat16_enabled(),
        )
        found = [read_states(Path(file))[constants.OPTIMIZER_STATE_DICT] for file in files]
        shapes = read_states(self._model_file(0))[constants.PARAM_SHAPES]
        make = state_of_zero_3 if engine.zero_optimization_partition_weights() else state_of_zero_12
        return make(engine, self._rank, found, shapes)

    def _model_file(self, rank: int) -> Path:
        """Return the model state file of `rank` with this rank's tensor and pipeline rank."""
        saved = self._saved
        return Path(self._engine._get_ckpt_name(str(saved.directory), saved.tag, pp_placeholder=str(rank)))

    def _find_model_files(self, original: Callable[..., list[str]], checkpoints_path: str, tag: str) -> list[str]:
        """Return the result of DeepSpeed's `_get_all_ckpt_names`, or the first rank's files if this rank has none."""
        return original(checkpoints_path, tag) or _model_files(self._engine, checkpoints_path, tag)

    def _load_module(self, original: Callable[..., Any], *args: Any, checkpoint: dict[str, Any], **options: Any) -> Any:
        """Call DeepSpeed's `load_module_state_dict` with this rank's partitions of frozen parameters.

        The checkpoint that DeepSpeed read has those of another rank.
        """
        shapes = checkpoint.get(constants.FROZEN_PARAM_SHAPES)
        if shapes:
            checkpoint = {**checkpoint, constants.FROZEN_PARAM_FRAGMENTS: self._frozen(shapes)}
        return original(*args, checkpoint=checkpoint, **options)

    def _frozen(self, shapes: Mapping[str, torch.Size]) -> dict[str, Tensor]:
        """Return this rank's partitions of frozen parameters, by name."""
        fragments, engine = Fragments(), self._engine
        for rank in range(self._saved.ranks):
            for key, part in read_states(self._model_file(rank))[constants.FROZEN_PARAM_FRAGMENTS].items():
                fragments.add([even_piece(key, shapes[key].numel(), rank, self._saved.ranks, 0)[0]], part.flatten())
        wanted = {
            key: even_piece(key, shape.numel(), self._rank, engine.seq_dp_world_size, 0)
            for key, shape in shapes.items()
        }
        return {key: fragments.cut([piece], room) for key, (piece, room) in wanted.items()}


def _check_universal(engine: Any, directory: Path, tag: str | None) -> None:
    """Check that a universal checkpoint has the weights of this rank in the form that `engine` has them.

    A missing checkpoint or tag is not checked, because DeepSpeed reports it.

    Raises:
        StateError: weights are missing or different.
    """
    found = tag or CheckpointDirectory(directory).latest_tag(LATEST_UNIVERSAL)
    if found is not None and (directory / found / "zero").is_dir():
        for problem in _problems(engine, directory / found / "zero"):
            raise StateError(f"{directory / found}: {problem}")


def universal_if_newest(engine: Any, directory: Path, own: int | None) -> AbstractContextManager[None]:
    """Make `engine.load_checkpoint` load a universal checkpoint only if no own checkpoint is newer. Collective.

    `checkpoint.load_universal` stays in the configuration of a run that is started again, and by then the run has saved
    checkpoints of its own.

    Args:
        engine: the engine.
        directory: directory of the checkpoints.
        own: step of the newest own checkpoint; None without any.

    Raises:
        StateError: on all ranks, if the universal checkpoint cannot be read.
    """
    is_newest = engine._config.load_universal_checkpoint
    if is_newest:
        step = of_first(result_on_all(lambda: None if dist.get_rank() else _step(directory)))
        is_newest = step is not None and (own is None or own <= step)
    return replaced(engine._config, load_universal_checkpoint=is_newest)


def _step(directory: Path) -> int | None:
    """Return the step of the universal checkpoint that DeepSpeed would load; None without any."""
    tag = CheckpointDirectory(directory).latest_tag(LATEST_UNIVERSAL)
    if tag is None:
        return None
    files = sorted((directory / tag).glob("mp_rank_*_model_states.pt"))
    if not files:
        raise StateError(f"{directory / tag}, which {LATEST_UNIVERSAL} names, has no mp_rank_*_model_states.pt")
    return int(read_states(files[0])["global_steps"])


def _problems(engine: Any, place: Path) -> Iterator[str]:
    states = torch.load(place / "optimizer_state.pt", map_location="cpu", weights_only=False)
    saved, stage = int(states.get(constants.ZERO_STAGE, 1)), int(engine.zero_optimization_stage())
    if stage == 0 or (saved == 3) != (stage == 3):
        allowed = "ZeRO 3" if saved == 3 else "ZeRO 1 and 2"
        yield f"a universal checkpoint of ZeRO {saved} cannot be loaded by ZeRO {stage} (allowed: {allowed})"
    for parameter, name in engine.param_names.items():
        if parameter.requires_grad and getattr(parameter, "ds_numel", parameter.numel()):
            yield from _differences(place / name / "fp32.pt", name, _shape(parameter))


def _shape(parameter: Any) -> tuple[int, ...] | None:
    """Return the shape of the whole weight; None if this rank has a part and the whole shape is unknown."""
    meta = tensor_parallel_record(parameter)
    shape = getattr(parameter, "ds_shape", parameter.shape) if meta is None else meta.get("logical_shape")
    return None if shape is None else tuple(shape)


def read_weight(file: Path, mmap: bool = True) -> Any:
    """Return DeepSpeed's saved data of one weight, without executing code that the file may refer to.

    Raises:
        StateError: the file contains other objects.
    """
    try:
        with torch.serialization.safe_globals([SubparamShape]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=mmap)
    except pickle.UnpicklingError as error:
        raise StateError(f"{file} contains more than a weight, so it is not read ({error})") from error


def _differences(file: Path, name: str, wanted: tuple[int, ...] | None) -> Iterator[str]:
    if not file.is_file():
        yield (
            f"it has no weight {name}: a pipeline numbers its layers, so the names of a model differ with and without "
            "one. Transfer the weights instead: write the model with --export, and train it as --model"
        )
        return
    found = read_weight(file)
    # DeepSpeed stores a ZeRO 3 weight as a plain flat tensor, others in a dictionary with metadata.
    saved = tuple((found[constants.PARAM] if isinstance(found, dict) else found).shape)
    if wanted is not None and len(saved) > 1 and saved != wanted and saved == wanted[::-1]:
        yield (
            f"the weight {name} has the shape {saved}, but this run has {wanted}: GPT-2's matrices are transposed if "
            "tensor is above 1. Convert again, for this run: ds-compress checkpoint convert DIR --tensor N"
        )
