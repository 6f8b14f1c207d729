"""Changes to frameworks that read a DeepSpeed configuration themselves, before a model is loaded.

Accelerate: `TrainingArguments`, `DeepSpeedPlugin` and `HfDeepSpeedConfig` all call
`accelerate.utils.deepspeed.HfDeepSpeedConfig.set_stage_and_offload`: once after the file has been read, and again after
"auto" values have been filled in from the training arguments. So the section is checked there, and a warning tells of
inexact weights in state dicts.

PyTorch Lightning passes its configuration to `deepspeed.initialize`, and saves and loads with the methods of the
engine, so compression itself needs nothing more than `install`. The changes of `DeepSpeedStrategy` report errors early,
and keep what the program does after training correct.
"""

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from deepspeed_compress.checkpointing.completeness import is_complete
from deepspeed_compress.config import SECTION, CompressConfig, check_world, expand, parse_section, with_preset
from deepspeed_compress.config.section import is_misspelled
from deepspeed_compress.errors import CompressWarning, ConfigError, UnsupportedError
from deepspeed_compress.integrations.patching import Undo, replace_methods

if TYPE_CHECKING:
    from deepspeed_compress.session.session import Session

Method = Callable[..., Any]


def _has_section(ds_config: dict[str, Any]) -> bool:
    """Return True if `ds_config` has the section, or an obvious typo of it, or one inside another section."""
    return SECTION in ds_config or is_misspelled(ds_config)


def _checked(ds_config: dict[str, Any], frameworks: str) -> tuple[dict[str, Any], CompressConfig]:
    """Return `ds_config` with the section's parallelism expanded into DeepSpeed's own keys, and the section.

    Frameworks read DeepSpeed's keys themselves. "auto" values outside the section stay. Warnings are left to the
    engine, which issues them once.

    Args:
        ds_config: DeepSpeed configuration with the section.
        frameworks: the training frameworks that read it, for error messages.

    Raises:
        ConfigError: if the section is invalid, or does not fit the number of ranks.
        UnsupportedError: if the section asks for pipeline parallelism.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CompressWarning)
        section = parse_section(ds_config)
        expanded = expand(ds_config, section)
        # Accelerate takes any "auto" for a value that it must fill in.
        expanded[SECTION] = with_preset(expanded)
        if "WORLD_SIZE" in os.environ:
            check_world(section, int(os.environ["WORLD_SIZE"]), expanded)
    if section.parallelism is not None and section.parallelism.pipeline > 1:
        raise UnsupportedError(
            f"/{SECTION}/parallelism/pipeline: {section.parallelism.pipeline} is not possible with {frameworks}, which "
            "run forward and backward themselves (allowed: 1). Use ZeRO or tensor instead, or for a pipeline "
            "launch/train_gpt.py or deepspeed_compress.models.build_parallel (docs/parallelism.md)."
        )
    return expanded, section


def follow_accelerate(on_section: Callable[[], Undo]) -> Undo:
    """Check and expand the section of every configuration that Accelerate reads from now on.

    `Accelerator.get_state_dict` warns if the compressed weights are behind the optimizer's weights. They are not made
    exact automatically: a single rank may call this method, and a program may have put other weights into the model,
    such as averages, in order to save those.

    Args:
        on_section: called whenever a configuration has the section. It returns a function that undoes its effect.

    Returns:
        A function that undoes everything.
    """
    # This module is loaded for any of the frameworks.
    from accelerate.accelerator import Accelerator
    from accelerate.utils.deepspeed import HfDeepSpeedConfig

    undo = ExitStack()
    undo.callback(
        replace_methods(
            (HfDeepSpeedConfig, "set_stage_and_offload", partial(_expanding, undo, on_section)),
            (Accelerator, "get_state_dict", _warning),
        )
    )
    return undo.close


def _expanding(undo: ExitStack, on_section: Callable[[], Undo], original: Method, self: Any) -> None:
    """Call `HfDeepSpeedConfig.set_stage_and_offload` with a configuration that is checked and expanded."""
    if _has_section(self.config):
        self.config, _ = _checked(self.config, "Trainer or Accelerate")
        undo.callback(on_section())
    original(self)


def _warning(original: Method, self: Any, model: Any, *args: Any, **options: Any) -> Any:
    """Call `Accelerator.get_state_dict`, after a warning if the weights are inexact."""
    # Not getattr: the engine forwards unknown attributes to the model.
    session = vars(model).get("compression")
    if session is not None and session.exact is not None and session.exact.behind:
        text = (
            f"/{SECTION}/weights: this state dict is behind the optimizer's weights by one compression error. Call "
            "model.compression.synchronise() on all ranks before get_state_dict"
        )
        warnings.warn(text, CompressWarning, stacklevel=3)
    return original(self, model, *args, **options)


def follow_strategy(strategy: type) -> Undo:
    """Change the methods of `strategy`, Lightning's `DeepSpeedStrategy`.

    Returns:
        A function that undoes this.
    """
    return replace_methods(
        (strategy, "__init__", _checking),
        (strategy, "setup_distributed", _counting_processes),
        (strategy, "remove_checkpoint", _completing),
        (strategy, "on_train_end", _finishing),
    )


def _checking(original: Method, self: Any, *args: Any, **options: Any) -> None:
    """Make a strategy, check its section, and expand the parallelism in it, which Lightning reads."""
    original(self, *args, **options)
    if _has_section(self.config):
        self.config, section = _checked(self.config, "Lightning's training_step")
        if section.checkpointing is not None and section.checkpointing.directory is not None:
            raise UnsupportedError(
                f"/{SECTION}/checkpointing/directory: automatic checkpoints lack the state of Lightning's loops "
                "(allowed: null). Remove directory and the keys that need it (every, resume, save_on_sigterm, memory), "
                "use Lightning's ModelCheckpoint, and pass ckpt_path to Trainer.fit"
            )


def _counting_processes(original: Method, self: Any) -> None:
    """Run `setup_distributed`, but refuse to wait for processes that were never started."""
    started, expected = os.environ.get("WORLD_SIZE"), self.num_nodes * self.num_processes
    if SECTION in self.config and started is not None and int(started) != expected:
        raise ConfigError(
            f"the launcher has started {started} processes, but Lightning's Trainer expects {expected} (num_nodes x "
            f"devices); start them all: ds-compress run --launcher torchrun --nproc_per_node {self.num_processes}"
        )
    original(self)


def _completing(original: Method, self: Any, filepath: Any) -> None:
    """Run `remove_checkpoint`, but keep the older checkpoint unless the newer one was written. Collective."""
    session = _wait(self)
    if session is None or session.saving is None or not session.saved or is_complete(session.saved[-1]):
        original(self, filepath)


def _finishing(original: Method, self: Any) -> None:
    """Run `on_train_end`, and leave exact weights and complete checkpoints. Collective."""
    session: Session | None = vars(self.model).get("compression")
    if session is not None:
        session.synchronise()
    _wait(self)
    original(self)


def _wait(strategy: Any) -> "Session | None":
    """Wait until everything that was saved is written, and return the session of `strategy`, if any. Collective."""
    # Not getattr: the engine forwards unknown names to the user's model.
    session: Session | None = vars(strategy.model).get("compression")
    if session is not None and session.saving is not None:
        session.saving.wait()
    return session
