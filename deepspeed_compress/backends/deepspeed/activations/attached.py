"""Hooks in a model that end with its engine, and the refusal to compile the model while they are there."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from torch import nn

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches


class Attached(Protocol):
    """Hooks that are registered in a model."""

    def detach(self) -> None: ...


def detach_with_engine(engine: Any, hooks: Sequence[Attached], patches: Patches) -> None:
    """Detach `hooks`, to which more may be added, when the engine is destroyed, collected, or detached from."""
    leave = weakref.finalize(engine, _detach, hooks)
    leave.atexit = False
    patches.on_undo(leave)
    patches.precede(engine, "destroy", leave)


def _detach(hooks: Sequence[Attached]) -> None:
    for one in hooks:
        one.detach()


def forbid_compiling(engine: Any, key: str, what: str, patches: Patches) -> None:
    """Let `engine.compile` raise an UnsupportedError: `key` takes over `what`, such as "sums"."""
    patches.replace(engine, "compile", partial(_refuse, _problem(key, what, "do not call engine.compile()")))


def _refuse(problem: str, *_: Any, **__: Any) -> None:
    raise UnsupportedError(problem)


def compiled_problems(engine: Any, key: str, what: str) -> list[str]:
    """Return the problem that `engine`, or one of its modules, is compiled; empty if none is."""
    compiled = engine.is_compiled or any(map(_is_compiled, engine.module.modules()))
    return [_problem(key, what, "do not compile the model")] if compiled else []


def _problem(key: str, what: str, remedy: str) -> str:
    return f"{key}: {what} inside a compiled graph cannot be taken over; {remedy}, or remove the key"


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or type(module).__name__ == "OptimizedModule"
