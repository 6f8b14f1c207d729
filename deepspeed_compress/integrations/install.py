"""`install`: attach to all later engines, and make Hugging Face libraries check the section early.

No library is imported here before the program imports it, so that libraries read the environment that the program sets.

Processes that a program starts inherit compression, such as those of `llamafactory-cli` or `mp.spawn`: Python imports a
module `sitecustomize` at its start. `inherited/` has one, which calls `install_inherited` if `ds-compress run` has set
a variable, and `PYTHONPATH` leads there. Forked processes need nothing.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepspeed_compress.integrations.patching import Undo, after_import, replace_methods
from deepspeed_compress.integrations.plain import attach_to_all


def install(section: str | Path | dict[str, Any] | None = None) -> Callable[[], None]:
    """Attach to every engine that `deepspeed.initialize` makes from now on, if its configuration has the section.

    Use it for code that calls DeepSpeed itself: HF Trainer, Accelerate, TRL, Lightning, and scripts that cannot be
    edited. Configurations without the section are passed to DeepSpeed unchanged, and engines without an optimizer,
    which have no gradients, are left alone. With Accelerate and Lightning, the section is checked when the
    configuration is read, before a model is loaded. Trainers log compression figures (`integrations.hf`). A second call
    changes nothing. `install` imports no library: each is changed when the program imports it.

    Args:
        section: a file or a dict with the section, for programs without DeepSpeed. Compression is attached to every
            `DistributedDataParallel` or `fully_shard` (FSDP2) model at its first forward pass in training
            (`ddp.attach`, `fsdp2.attach`). Its residuals and momenta are saved in the checkpoints of Trainer and
            Accelerate. None leaves such models alone.

    Returns:
        A function that undoes the installation. Engines that exist by then stay compressed.

    Examples:
        >>> uninstall = deepspeed_compress.install()
        >>> trainer = Trainer(model=model, args=TrainingArguments(deepspeed="ds_config.json"))
    """
    with ExitStack() as undo:
        if find_spec("deepspeed") is not None:
            for module, action in _ACTIONS:
                undo.callback(after_import(module, action))
        if section is not None:
            undo.callback(attach_to_all(section))
        return undo.pop_all().close


def _follow_deepspeed() -> Undo:
    import deepspeed

    return replace_methods((deepspeed, "initialize", _attaching), (deepspeed.zero.Init, "__init__", _sharding_within))


def _sharding_within(original: Callable[..., None], *args: Any, **options: Any) -> None:
    from deepspeed_compress.backends.deepspeed.initialize import zero_init_arguments

    original(**zero_init_arguments(original, args, options))


def _attaching(original: Callable[..., Any], *args: Any, **options: Any) -> Any:
    # This imports torch's compiler, which reads its environment, so it has to wait until the program gets here.
    from deepspeed_compress.backends.deepspeed.initialize import initialize_if_asked

    return initialize_if_asked(original, args, options)


def _follow_accelerate() -> Undo:
    from deepspeed_compress.integrations.frameworks import follow_accelerate

    return follow_accelerate(_follow_trainers)


def _follow_trainers() -> Undo:
    """Follow Trainers if the program has imported them. Other programs need not wait for that import."""
    if "transformers.training_args" not in sys.modules:
        return lambda: None
    from deepspeed_compress.integrations.hf import follow_trainers

    return follow_trainers()


def _follow_lightning(module: str) -> Undo:
    from deepspeed_compress.integrations.frameworks import follow_strategy

    return follow_strategy(sys.modules[module].DeepSpeedStrategy)


_LIGHTNING = ("lightning.pytorch.strategies.deepspeed", "pytorch_lightning.strategies.deepspeed")
"""Modules with a `DeepSpeedStrategy`. The package `lightning` has a copy of `pytorch_lightning`."""
_ACTIONS: tuple[tuple[str, Callable[[], Undo]], ...] = (
    ("deepspeed", _follow_deepspeed),
    ("accelerate.accelerator", _follow_accelerate),
    *((module, partial(_follow_lightning, module)) for module in _LIGHTNING),
)
"""Modules, each with the action that runs after the program has imported it."""


INHERIT = "DS_COMPRESS_INHERIT"
"""Environment variable that makes new Python processes install compression: the file of `--section`, or ""."""
_REPORTS = "DS_COMPRESS_REPORTS"
"""Environment variable: path of an unnamed file, to which processes append a byte when they compress something."""
_NAME = "ds_compress_reports"
_SESSIONS = "deepspeed_compress.session.session"
_DIRECTORY = str(Path(__file__).with_name("inherited"))


@contextmanager
def inheriting(section: str | None) -> Iterator[Callable[[], bool]]:
    """Let processes that are started within the block install compression, like this one.

    Yields:
        A function that returns True if this process or any of them has compressed something.
    """
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path not in ("", _DIRECTORY)]
    descriptor = os.memfd_create(_NAME)
    try:
        os.environ[INHERIT], os.environ[_REPORTS] = section or "", f"/proc/{os.getpid()}/fd/{descriptor}"
        os.environ["PYTHONPATH"] = os.pathsep.join([_DIRECTORY, *paths])
        after_import(_SESSIONS, _follow_sessions)
        yield lambda: os.fstat(descriptor).st_size > 0
    finally:
        os.close(descriptor)


def install_inherited() -> None:
    """Install compression in a process that a program under `ds-compress run` has started."""
    install(os.environ[INHERIT] or None)
    after_import(_SESSIONS, _follow_sessions)


def _follow_sessions() -> Undo:
    from deepspeed_compress.session.session import Session

    return replace_methods((Session, "__init__", partial(_reporting, os.environ.get(_REPORTS, ""))))


def _reporting(reports: str, original: Callable[..., None], *args: Any, **options: Any) -> None:
    original(*args, **options)
    # The process that reads the reports may have ended, and its number may have been given to another one.
    with suppress(OSError):
        if _NAME in os.readlink(reports):
            Path(reports).write_bytes(b"1")
