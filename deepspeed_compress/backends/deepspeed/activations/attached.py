"""Hooks in a model that end with its engine, and the refusal to compile the model while they are there."""

import weakref
from collections.abc import Sequence
from functools import partial
from typing import Any, Protocol

from deepspeed_compress.backends.activations.hooks import CompiledCalls, compiled_problem, is_compiled
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.session.patches import Patches


class Attached(Protocol):
    """Hooks that are registered in a model."""

    def detach(self) -> None: ...


def detach_with_engine(engine: Any, hooks: Sequence[Attached], patches: Patches) -> None:
    """Detach `hooks`, to which more may be added, when the engine is destroyed, collected, or detached from."""
    patches.end_with(engine, _detach, hooks)


def _detach(hooks: Sequence[Attached]) -> None:
    for hook in hooks:
        hook.detach()


def forbid_compiling(engine: Any, key: str, what: str, patches: Patches) -> CompiledCalls:
    """Refuse to compile the model, from which `key` takes over `what`, such as "sums".

    `engine.compile` raises an UnsupportedError, and so does the next step after a call that the result has noted.
    """
    patches.replace(engine, "compile", partial(_refuse, compiled_problem(key, what, "do not call engine.compile()")))
    calls = CompiledCalls(weakref.ref(engine.module), key, what)
    patches.precede(engine, "_take_model_step", calls.before_step)
    return calls


def _refuse(problem: str, *_: Any, **__: Any) -> None:
    raise UnsupportedError(problem)


def compiled_problems(engine: Any, key: str, what: str) -> list[str]:
    """Return the problem that `engine`, or one of its modules, is compiled; empty if none is."""
    compiled = engine.is_compiled or any(map(is_compiled, engine.module.modules()))
    return [compiled_problem(key, what, "do not compile the model")] if compiled else []
