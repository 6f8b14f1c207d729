"""`CompressionCallback`: compression figures in the logs of Hugging Face Trainer.

It also keeps Trainer from removing a complete checkpoint while newer ones are still written in the background.
"""

import functools
import json
import signal
import statistics
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import Trainer, TrainerCallback

from deepspeed_compress.checkpointing.completeness import is_complete
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.collectives.objects import of_first
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import CompressWarning, StateError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.elastic import SEEDS
from deepspeed_compress.monitor import KINDS, StepStatistics
from deepspeed_compress.session.engine import BackgroundCheckpoints
from deepspeed_compress.session.session import Session


def _check_engine(trainer: Trainer) -> None:
    """Raise UnsupportedError unless `trainer` is about to train a compressed engine that Accelerate knows."""
    model = trainer.model_wrapped
    if not isinstance(model, DeepSpeedEngine):
        raise UnsupportedError(
            f"/{SECTION}: has no effect: Trainer does not train a DeepSpeed engine, but a {type(model).__name__}. On "
            "the CPU, write TrainingArguments(use_cpu=True), not ACCELERATE_USE_CPU or --cpu"
        )
    # Not hasattr: the engine forwards unknown attributes to the model.
    if "compression" not in vars(model):
        raise UnsupportedError(
            f"/{SECTION}: has no effect, because the DeepSpeed engine of this Trainer was made before "
            "deepspeed_compress.install(), or has no optimizer. Call install() before the engine is made"
        )


class CompressionCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that adds `compression_*` to the training logs of `trainer`.

    The values are means over the steps measured since the previous log. The names are those of DeepSpeed's monitors
    (`monitor.writer`); reporters prefix them with `train/`. The section's `monitor.every` sets how often steps are
    measured. Only rank 0 receives figures, and only rank 0 reports them.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._session: Session | None = None
        self._measured: list[StepStatistics] = []
        self._stops = False

    def exit_if_requested(self) -> None:
        """Raise SystemExit if SIGTERM has ended training, once all checkpoints are written. Collective."""
        if self._stops and self._session is not None and self._session.saving is not None:
            self._session.saving.wait()
            raise SystemExit(128 + signal.SIGTERM)

    def _stop(self) -> None:
        self._stops = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Save and stop training if all ranks have agreed to in this step."""
        if self._stops:
            control.should_save = control.should_training_stop = True
            # Otherwise Trainer may remove this checkpoint at the end, because another one is the best.
            args.save_total_limit = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the engine that Trainer is about to train. Any checkpoint has been loaded by now.

        Raises:
            UnsupportedError: if Trainer has no engine that can be trained and compressed.
        """
        _check_engine(self._trainer)
        session = self._trainer.model_wrapped.compression
        if session is not self._session:
            use_own_data_order(session, self._trainer.callback_handler.train_dataloader)
            session.subscribe(self._measured.append)
            if session.saving is not None:
                session.saving.leave_by(self._stop)
            if self._session is None:
                self._trainer._save_checkpoint = self._saving_exact_weights(self._trainer._save_checkpoint)
            # Only the newest engine matters: every trial of a hyperparameter search has its own.
            self._session = session

    def _saving_exact_weights(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return a `save` that first makes the weights exact. Collective.

        Trainer collects the weights before DeepSpeed saves, which would be too late.
        """

        @functools.wraps(save)
        def save_exactly(*args: Any, **options: Any) -> None:
            assert self._session is not None
            self._session.synchronise()
            with self._keep_one_more(self._session.saving):
                save(*args, **options)

        return save_exactly

    @contextmanager
    def _keep_one_more(self, saving: BackgroundCheckpoints | None) -> Iterator[None]:
        """Make Trainer keep more checkpoints than `save_total_limit` if they are written in the background.

        Trainer removes old checkpoints at once, when the newest one is not complete yet. One that could not be written
        must not take the place of a complete one either.
        """
        args = self._trainer.args
        limit = args.save_total_limit
        if saving is None or not limit or args.save_only_model:
            yield
            return
        # All earlier checkpoints are complete after this, or have failed, however slow the disk is.
        saving.wait()
        args.save_total_limit = limit + 1 + count_incomplete(Path(args.output_dir))
        try:
            yield
        finally:
            args.save_total_limit = limit

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make the weights exact, so that any rank may save them from now on. Collective."""
        if self._session is not None:
            self._session.synchronise()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the figures to training logs, which are the only ones with a `loss`."""
        if "loss" not in logs or not self._measured:
            return
        figures = log_entries(self._measured)
        self._measured.clear()
        logs.update(figures)
        state.log_history[-1].update(figures)


def use_own_data_order(session: Session, loader: Any) -> None:
    """Give an island that is a separate job its own order of the training data.

    Issues a CompressWarning if the type of `loader`'s sampler is not supported.
    """
    islands = session.config.islands
    if islands is None or islands.elastic is None or session.islands is None:
        return
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed += SEEDS * session.islands.number
        return
    text = (
        f"/{SECTION}/islands/elastic: all islands may read the data in the same order by a {type(sampler).__name__} "
        "(allowed: SeedableRandomSampler); make its order depend on engine.compression.islands.number"
    )
    warnings.warn(text, CompressWarning, stacklevel=2)


def log_entries(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the log entries for the `measured` steps, of which there is at least one.

    Kinds of traffic that sent no bytes are left out.
    """
    sent = sum(step.bytes_sent for step in measured)
    uncompressed = sum(step.bytes_uncompressed for step in measured)
    found: dict[str, float] = _total_ratio(measured) | ({"ratio": uncompressed / sent} if sent else {})
    for kind in (*KINDS, "bytes_exact"):
        mean = statistics.fmean(getattr(step, kind) or 0 for step in measured)
        found |= {kind: mean} if mean or kind == "bytes_sent" else {}
    found["time_ms"] = statistics.fmean(step.time_ms for step in measured)
    # For these, the newest value counts.
    for name in ("residual_norm", "cosine"):
        known = [value for step in measured if (value := getattr(step, name)) is not None]
        found |= {name: known[-1]} if known else {}
    return {f"compression_{name}": value for name, value in found.items()}


def _total_ratio(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the ratio of the bytes that plain DeepSpeed would send to all bytes sent; empty if it is unknown."""
    alone = sent = 0.0
    for step in measured:
        if step.total_ratio is not None:
            size = sum(getattr(step, kind) or 0 for kind in KINDS)
            alone, sent = alone + step.total_ratio * size, sent + size
    return {"total_ratio": alone / sent} if sent else {}


def newest_complete_checkpoint(output: Path) -> str | None:
    """Return Trainer's newest complete checkpoint in `output`; None if there is none. All ranks get rank 0's answer."""
    looks = not dist.is_initialized() or dist.get_rank() == 0
    folders = _folders(output) if looks else []
    return of_first(next((str(folder) for folder in folders if _is_complete(folder)), None))


def count_incomplete(output: Path) -> int:
    """Return the number of Trainer's checkpoints in `output` that are newer than its newest complete one."""
    return len(list(takewhile(lambda folder: not _is_complete(folder), _folders(output))))


def _folders(output: Path) -> list[Path]:
    """Return the folders of Trainer's checkpoints in `output`, newest first."""
    folders = [one for one in output.glob("checkpoint-*") if one.name.removeprefix("checkpoint-").isdecimal()]
    return sorted(folders, key=lambda folder: int(folder.name.removeprefix("checkpoint-")), reverse=True)


def _is_complete(folder: Path) -> bool:
    """Return True unless a file is missing, or cut off as Trainer's own ones may be after a crash of their host."""
    try:
        tag = CheckpointDirectory(folder).latest_tag()
        json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    except (OSError, StateError, ValueError):
        return False
    whole = all(map(zipfile.is_zipfile, folder.glob("*.pt*")))
    return whole and tag is not None and is_complete(folder / tag)
