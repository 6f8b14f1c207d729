"""Universal checkpoints: refuses those that would load incorrectly, and prefers newer checkpoints of the run itself."""

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.checkpoint.constants import PARAM, ZERO_STAGE
from deepspeed.checkpoint.universal_checkpoint import SubparamShape

from deepspeed_compress.backends.deepspeed.versions import tensor_parallel_record
from deepspeed_compress.checkpointing.deepspeed.engine_files import read_states
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.patches import replaced
from deepspeed_compress.session.state_files import result_on_all

_LATEST = "latest_universal"


def check_universal(engine: Any, directory: Path, tag: str | None) -> None:
    """Check that a universal checkpoint has the weights of every rank in the form that `engine` has them. Collective.

    A missing checkpoint or tag is not checked, because DeepSpeed reports it.

    Raises:
        StateError: some rank's weights are missing or different. Raised on all ranks.
    """
    result_on_all(partial(_check, engine, directory, tag))


def _check(engine: Any, directory: Path, tag: str | None) -> None:
    found = tag or CheckpointDirectory(directory).latest_tag(_LATEST)
    if found is not None and (directory / found / "zero").is_dir():
        for problem in _problems(engine, directory / found / "zero"):
            raise StateError(f"{directory / found}: {problem}")


@contextmanager
def universal_if_newest(engine: Any, directory: Path, own: int | None) -> Iterator[None]:
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
    is_newest = engine._config.load_universal_checkpoint and _is_newest(directory, own)
    with replaced(engine._config, load_universal_checkpoint=is_newest):
        yield


def _is_newest(directory: Path, own: int | None) -> bool:
    """Return what the first rank finds, on all ranks."""
    found = result_on_all(lambda: None if dist.get_rank() else _step(directory))
    step = gather_objects(found)[0]
    return step is not None and (own is None or own <= step)


def _step(directory: Path) -> int | None:
    """Return the step of the universal checkpoint that DeepSpeed would load; None without any."""
    tag = CheckpointDirectory(directory).latest_tag(_LATEST)
    if tag is None:
        return None
    files = sorted((directory / tag).glob("mp_rank_*_model_states.pt"))
    if not files:
        raise StateError(f"{directory / tag}, which {directory / _LATEST} names, has no mp_rank_*_model_states.pt")
    return int(read_states(files[0])["global_steps"])


def _problems(engine: Any, place: Path) -> Iterator[str]:
    saved = _stage(place)
    stage = int(engine.zero_optimization_stage())
    if stage == 0 or (saved == 3) != (stage == 3):
        allowed = "ZeRO 3" if saved == 3 else "ZeRO 1 and 2"
        yield f"a universal checkpoint of ZeRO {saved} cannot be loaded by ZeRO {stage} (allowed: {allowed})"
    trained = [(name, one) for one, name in engine.param_names.items() if one.requires_grad and _numel(one)]
    for name, parameter in trained:
        yield from _differences(place / name / "fp32.pt", name, _shape(parameter))


def _stage(place: Path) -> int:
    return int(torch.load(place / "optimizer_state.pt", map_location="cpu", weights_only=False).get(ZERO_STAGE, 1))


def _numel(parameter: Any) -> int:
    return int(getattr(parameter, "ds_numel", parameter.numel()))


def _shape(parameter: Any) -> tuple[int, ...] | None:
    """Return the shape of the whole weight; None if this rank has a part and the whole shape is unknown."""
    meta = tensor_parallel_record(parameter)
    shape = getattr(parameter, "ds_shape", parameter.shape) if meta is None else meta.get("logical_shape")
    return None if shape is None else tuple(shape)


def _weight(file: Path) -> Any:
    """Return DeepSpeed's saved data of one weight, without executing code from the file."""
    try:
        with torch.serialization.safe_globals([SubparamShape]):
            return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise StateError(f"{file} contains more than a weight, so it is not read ({error})") from error


def _differences(file: Path, name: str, wanted: tuple[int, ...] | None) -> Iterator[str]:
    if not file.is_file():
        yield (
            f"it has no weight {name}: a pipeline numbers its layers, so the names of a model differ with and without "
            "one. Transfer the weights instead: write the model with --export, and train it as --model"
        )
        return
    found = _weight(file)
    # DeepSpeed stores a ZeRO 3 weight as a plain flat tensor, others in a dictionary with metadata.
    saved = tuple((found[PARAM] if isinstance(found, dict) else found).shape)
    if wanted is not None and len(saved) > 1 and saved != wanted and saved == wanted[::-1]:
        yield (
            f"the weight {name} has the shape {saved}, but this run has {wanted}: GPT-2's matrices are transposed "
            "if tensor is above 1, and DeepSpeed loads them as they are. Convert again with the tensor size of this "
            "run: ds-compress checkpoint convert DIR --tensor N"
        )
