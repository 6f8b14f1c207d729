"""Hugging Face Trainer: compression in its logs and progress bar, and early errors for what it cannot do."""

import functools
import inspect
import os
import signal
import statistics
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist
from accelerate.data_loader import SeedableRandomSampler, get_sampler
from deepspeed.pipe import PipelineModule
from deepspeed.runtime.engine import DeepSpeedEngine
from transformers import PrinterCallback, ProgressCallback, Trainer, TrainerCallback

from deepspeed_compress.checkpointing.completeness import checkpoints, latest_tag
from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.errors import CompressWarning, ConfigError, StateError, UnsupportedError
from deepspeed_compress.integrations.early import INSTEAD_OF_PIPELINE
from deepspeed_compress.integrations.install import install
from deepspeed_compress.integrations.replacing import replace_method
from deepspeed_compress.launcher.heartbeat import RESUME
from deepspeed_compress.local_sgd.deepspeed.elastic import SEEDS
from deepspeed_compress.monitor import KINDS, StepStatistics
from deepspeed_compress.session.protocols import BackgroundCheckpoints
from deepspeed_compress.session.session import Session

__all__ = ["CompressionCallback", "attach", "follow_trainers"]


def attach(trainer: Trainer) -> Trainer:
    """Compress what `trainer` trains, and log it; return the trainer. Call it before `trainer.train()`.

    It is not needed after `deepspeed_compress.install()`, which does it for every Trainer.

    Raises:
        ConfigError: if the trainer has no DeepSpeed configuration or no valid section in it.
        UnsupportedError: for a PipelineModule.
    """
    ds_config = _configuration(trainer)
    if ds_config is None:
        raise ConfigError(
            "the trainer does not use DeepSpeed: write TrainingArguments(deepspeed=FILE_OR_DICT), with the section "
            f'"{SECTION}" in it'
        )
    _refuse_pipeline(trainer.model)
    parse_section(ds_config)
    install()
    _add_callback(trainer)
    return trainer


def follow_trainers() -> Callable[[], None]:
    """Add a `CompressionCallback` to every later Trainer whose configuration has the section.

    Such Trainers also resume from their own checkpoints (`_going_on`).

    Returns:
        A function that undoes it.
    """

    def wrap(original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        def __init__(self: Any, *args: Any, **options: Any) -> None:  # noqa: N807  (put into a class)
            _refuse_pipeline(signature.bind(self, *args, **options).arguments.get("model"))
            original(self, *args, **options)
            if SECTION in (_configuration(self) or {}):
                _add_callback(self)

        return __init__

    undo = [replace_method(Trainer, "__init__", wrap), replace_method(Trainer, "train", _going_on)]

    def undo_all() -> None:
        for action in undo:
            action()

    return undo_all


def _going_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `train` that resumes from the newest complete checkpoint of Trainer on request.

    It does so if resuming is requested and the program names no other checkpoint. If SIGTERM has ended training, the
    program ends too, before it mistakes the model for a trained one.
    """

    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        section = (_configuration(self) or {}).get(SECTION)
        if section is None:
            return original(self, resume_from_checkpoint, *args, **options)
        with resuming_by_trainer(section) as asked:
            chosen = resume_from_checkpoint
            if chosen is True and section.get("checkpointing") is not None:
                # The newest may have been incomplete when training was ended. Trainer reports if there is none at all.
                chosen = last_whole(Path(self.args.output_dir)) or True
            elif chosen is None and asked:
                chosen = last_whole(Path(self.args.output_dir))
            result = original(self, chosen, *args, **options)
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, CompressionCallback):
                callback.leave_if_asked()
        return result

    return train


@contextmanager
def resuming_by_trainer(section: dict[str, Any]) -> Iterator[bool]:
    """Yield True if the section, or the environment, requests to resume.

    In this context the engine does not resume by itself, because its own checkpoints have nothing of Trainer's state.
    """
    settings = section.get("checkpointing")
    said = settings.get("resume") if isinstance(settings, dict) else None
    if isinstance(settings, dict):
        section["checkpointing"] = {**settings, "resume": False}
    try:
        yield os.environ.get(RESUME) == "1" if said is None else said
    finally:
        if isinstance(settings, dict):
            section["checkpointing"] = settings


def last_whole(output: Path) -> str | None:
    """Return the newest complete checkpoint of Trainer in `output`, the same on all ranks; None if there is none."""
    found = [_newest(output) if not dist.is_initialized() or dist.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(found, src=0)
    return found[0]


def _newest(output: Path) -> str | None:
    places = [place for place in output.glob("checkpoint-*") if place.name.removeprefix("checkpoint-").isdecimal()]
    for place in sorted(places, key=lambda place: int(place.name.removeprefix("checkpoint-")), reverse=True):
        try:
            named = latest_tag(place)
        except StateError:
            continue
        whole = [found.tag for found in checkpoints(place) if found.complete]
        if named in whole and (place / "trainer_state.json").is_file():
            return str(place)
    return None


def _configuration(trainer: Trainer) -> dict[str, Any] | None:
    """Return the DeepSpeed configuration from the arguments or `accelerate launch`; None without DeepSpeed."""
    plugin = trainer.args.deepspeed_plugin
    return None if plugin is None else plugin.hf_ds_config.config


def _refuse_pipeline(model: object) -> None:
    if isinstance(model, PipelineModule):
        raise UnsupportedError(
            f"model: a PipelineModule cannot be trained by Trainer, which calls forward and backward itself, and its "
            f"engine has train_batch alone (allowed: a model whose forward returns a loss). {INSTEAD_OF_PIPELINE}"
        )


def _refuse_untrained(trainer: Trainer) -> None:
    """Raise UnsupportedError unless `trainer` is about to train a compressed engine, which Accelerate holds."""
    model = trainer.model_wrapped
    if not isinstance(model, DeepSpeedEngine):
        raise UnsupportedError(
            f"/{SECTION}: has no effect, because Trainer does not train a DeepSpeed engine but a "
            f"{type(model).__name__} (allowed: DeepSpeedEngine). On the CPU write "
            "TrainingArguments(use_cpu=True), and leave out ACCELERATE_USE_CPU and --cpu: with these Accelerate "
            "ignores DeepSpeed"
        )
    if trainer.accelerator.deepspeed_engine_wrapped is None:
        raise UnsupportedError(
            f"/{SECTION}: train() would go on with the DeepSpeed engine of an earlier evaluate(), predict() or train() "
            "of this Trainer, which Accelerate no longer holds, so that backward() fails, with or without this section "
            "(allowed: one train() for each Trainer, before evaluate() and predict()). Make a new Trainer, or pass it "
            "model_init instead of model; to evaluate before the first step, write "
            "TrainingArguments(eval_on_start=True)"
        )
    # The engine hands unknown names on to the model, so getattr would not tell.
    if "compression" not in vars(model):
        raise UnsupportedError(
            f"/{SECTION}: has no effect, because the DeepSpeed engine of this Trainer was made before "
            "deepspeed_compress.install(), or has no optimizer (allowed: an engine made for training, after "
            "install()); call install() before the engine is made"
        )


def _add_callback(trainer: Trainer) -> None:
    """Add the callback in front of all others, because reporters send what they find in the logs."""
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, CompressionCallback) for callback in callbacks):
        callbacks.insert(0, CompressionCallback(trainer))


class CompressionCallback(TrainerCallback):  # type: ignore[misc]
    """Callback that adds `compression_*` to the training logs of `trainer`.

    The values are means over the steps measured since the previous log. Names are those of DeepSpeed's monitors
    (`monitor.writer`); reporters prefix them with `train/`. `monitor.every` of the section sets how often steps are
    measured. Only rank 0 receives figures, and it alone reports.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._session: Session | None = None
        self._measured: list[StepStatistics] = []
        self._leaves = False

    def leave_if_asked(self) -> None:
        """Raise SystemExit if SIGTERM has ended training, after everything saved is written. Collective."""
        if self._leaves and self._session is not None and self._session.saving is not None:
            self._session.saving.wait()
            raise SystemExit(128 + signal.SIGTERM)

    def _leave(self) -> None:
        self._leaves = True

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Stop if all ranks have agreed in this step to leave."""
        if self._leaves:
            control.should_save = control.should_training_stop = True

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Follow the engine that Trainer is about to train. A checkpoint has been loaded by now.

        Raises:
            UnsupportedError: there is no engine that can be trained and compressed.
        """
        _refuse_untrained(self._trainer)
        session = self._trainer.model_wrapped.compression
        if session is not self._session:
            read_by_itself(session, self._trainer.callback_handler.train_dataloader)
            session.subscribe(self._measured.append)
            if session.saving is not None:
                session.saving.leave_by(self._leave)
            if self._session is None:
                self._trainer._save_checkpoint = self._exactly(self._trainer._save_checkpoint)
            # Only the newest engine matters: every trial of a hyperparameter search has one.
            self._session = session
        self._print_readably()

    def _exactly(self, save: Callable[..., None]) -> Callable[..., None]:
        """Return a `save` that makes weights exact first, because it collects them before DeepSpeed saves.

        All ranks call it.
        """

        @functools.wraps(save)
        def save_exactly(*args: Any, **options: Any) -> None:
            assert self._session is not None
            self._session.synchronise()
            with self._one_more(self._session.saving):
                save(*args, **options)

        return save_exactly

    @contextmanager
    def _one_more(self, saving: BackgroundCheckpoints | None) -> Iterator[None]:
        """Make Trainer keep one more checkpoint than `save_total_limit` if checkpoints are written in the background.

        Trainer removes old ones at once, while the newest is not complete yet.
        """
        args = self._trainer.args
        limit = args.save_total_limit
        if saving is None or not limit:
            yield
            return
        # Earlier checkpoints are complete then, however slow the disk is.
        saving.wait()
        args.save_total_limit = limit + 1
        try:
            yield
        finally:
            args.save_total_limit = limit

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Make weights exact, as all ranks are here, so that any rank may save them from now on."""
        if self._session is not None:
            self._session.synchronise()

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any], **_: Any) -> None:
        """Add the figures to logs of training, which alone have `loss`; other logs get nothing."""
        if "loss" not in logs or not self._measured:
            return
        figures = log_entries(self._measured)
        self._measured.clear()
        logs.update(figures)
        state.log_history[-1].update(figures)
        self._show(figures)

    def _print_readably(self) -> None:
        """Make callbacks that print logs print megabytes; reporters and `trainer_state.json` get bytes."""
        for one in self._trainer.callback_handler.callbacks:
            if isinstance(one, PrinterCallback | ProgressCallback) and "on_log" not in vars(one):
                one.on_log = partial(_printing_readably, one.on_log)

    def _show(self, figures: Mapping[str, float]) -> None:
        bars = [one for one in self._trainer.callback_handler.callbacks if isinstance(one, ProgressCallback)]
        for bar in (one.training_bar for one in bars):
            if bar is not None:
                shown = {name: f"{figures[key]:.1f}x" for name, key in _SHOWN.items() if key in figures}
                bar.set_postfix(shown, refresh=False)


def read_by_itself(session: Session, loader: Any) -> None:
    """Make an island that is a separate job read data in an order of its own.

    Issues a CompressWarning if the sampler of `loader` is not known.
    """
    islands = session.config.islands
    if islands is None or islands.elastic is None or session.islands is None:
        return
    sampler = get_sampler(loader)
    if isinstance(sampler, SeedableRandomSampler):
        sampler.initial_seed += SEEDS * session.islands.number
        return
    text = (
        f"/{SECTION}/islands/elastic: all islands may read the data in the same order, because the sampler is a "
        f"{type(sampler).__name__} (allowed: SeedableRandomSampler of Accelerate, as Trainer has it for data sets with "
        "a length); make its order depend on engine.compression.islands.number"
    )
    warnings.warn(text, CompressWarning, stacklevel=2)


_SHOWN: Mapping[str, str] = MappingProxyType(
    {"compressed": "compression_total_ratio", "gradients": "compression_ratio"}
)
"""Labels in the progress bar: all traffic first, because uncompressed weights may be most of it."""


_LAST: Mapping[str, Callable[[StepStatistics], float | None]] = MappingProxyType(
    {"residual_norm": lambda step: step.residual_norm, "cosine": lambda step: step.cosine}
)
"""Figures whose newest value is logged; for all others it is the mean."""


def log_entries(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the log entries for the steps `measured`, at least one.

    Kinds of traffic without any bytes are left out.
    """
    sent, alone = (sum(getattr(step, name) for step in measured) for name in ("bytes_sent", "bytes_uncompressed"))
    found: dict[str, float] = _total(measured) | ({"ratio": alone / sent} if sent else {})
    for kind in KINDS:
        mean = statistics.fmean(getattr(step, kind) or 0 for step in measured)
        found |= {kind: mean} if mean or kind == "bytes_sent" else {}
    found["time_ms"] = statistics.fmean(step.time_ms for step in measured)
    for name, of in _LAST.items():
        known = [value for value in map(of, measured) if value is not None]
        found |= {name: known[-1]} if known else {}
    return {f"compression_{name}": value for name, value in found.items()}


def _printing_readably(on_log: Callable[..., Any], *given: Any, logs: Mapping[str, Any], **more: Any) -> Any:
    return on_log(*given, logs=readable(logs), **more)


def readable(logs: Mapping[str, Any]) -> dict[str, Any]:
    """Return `logs` with megabytes, as `compression_MB_sent`, in place of bytes, as `compression_bytes_sent`."""
    return dict(map(_in_megabytes, logs.items()))


def _in_megabytes(entry: tuple[str, Any]) -> tuple[str, Any]:
    name, value = entry
    if not name.startswith(_BYTES):
        return entry
    return _MEGABYTES + name.removeprefix(_BYTES), round(value / 1e6, 3)


_BYTES, _MEGABYTES = "compression_bytes_", "compression_MB_"


def _total(measured: list[StepStatistics]) -> dict[str, float]:
    """Return the ratio of the bytes that plain DeepSpeed sends to all bytes that are sent."""
    known = [(step.total_ratio, sum(getattr(step, kind) or 0 for kind in KINDS)) for step in measured]
    pairs = [(ratio, sent) for ratio, sent in known if ratio is not None]
    sent = sum(sent for _, sent in pairs)
    return {"total_ratio": sum(ratio * sent for ratio, sent in pairs) / sent} if sent else {}
