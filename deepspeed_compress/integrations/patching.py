"""Changes to other libraries: when a program imports them, and to their methods, until they are undone.

A library that is imported before the program begins reads its environment too early: scripts often set HF_HOME,
HF_HUB_OFFLINE and CUDA_VISIBLE_DEVICES in their first lines. So a patch never imports the library that it changes.
Instead, a finder at the front of `sys.meta_path` waits until the program itself imports the module.
"""

import functools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from deepspeed_compress.errors import CompressWarning, SeamError
from deepspeed_compress.session.patches import Patches

Undo = Callable[[], None]


def after_import(name: str, action: Callable[[], Undo]) -> Undo:
    """Run `action` after the module `name` has been imported, or at once if it already has been.

    Returns:
        A function that undoes this. It drops an action that is still waiting, and calls the function that a completed
            action has returned.
    """
    hook = _Hook(name, action)
    if name in sys.modules:
        hook.run()
    else:
        sys.meta_path.insert(0, hook)
    return hook.undo


def is_waiting(kind: type) -> bool:
    """Return True if an action of class `kind` is waiting for its module."""
    return any(isinstance(finder, _Hook) and isinstance(finder.action, kind) for finder in sys.meta_path)


class _Hook(MetaPathFinder):
    """Finder that waits for one module.

    It stays in `sys.meta_path` until the module has been executed or the hook is undone.
    """

    def __init__(self, name: str, action: Callable[[], Undo]) -> None:
        self.action = action
        self._name = name
        self._undo: Undo | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        # The finders before this one either did not find the module or are hooks that have called this one.
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.run)
        return spec

    def run(self) -> None:
        self._leave()
        self._undo = self.action()

    def undo(self) -> None:
        self._leave()
        if self._undo is not None:
            self._undo()
            self._undo = None

    def _leave(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(Loader):
    """Loader that wraps `wrapped`, and calls `then` after the module has been executed."""

    def __init__(self, wrapped: Loader, then: Callable[[], None]) -> None:
        self._wrapped, self._then = wrapped, then

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module, and code that looks for its source or data, must see the original loader.
        module.__loader__ = self._wrapped
        if module.__spec__ is not None:
            module.__spec__.loader = self._wrapped
        self._wrapped.exec_module(module)
        self._then()


_OURS = "_compress_original"


def is_replaced(owner: type | ModuleType, name: str) -> bool:
    """Return True if `replace_methods` has wrapped the method and that has not been undone."""
    return hasattr(getattr(owner, name), _OURS)


def replace_methods(*changes: tuple[type | ModuleType, str, Callable[..., Any]]) -> Undo:
    """Replace methods, given as (owner, name, wrapper). A wrapper gets the method as its first argument.

    A method that is already replaced does not change.

    Returns:
        A function that undoes the replacements.
    """
    with ExitStack() as undo:
        for owner, name, wrapper in changes:
            if not is_replaced(owner, name):
                patches = Patches()
                patches.replace(owner, name, _wrapped(getattr(owner, name), wrapper))
                undo.callback(_undo, patches, f"{owner.__name__}.{name}")
        return undo.pop_all().close


def _wrapped(original: Callable[..., Any], wrapper: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `wrapper`. A class binds it to its objects, unlike a partial function."""

    @functools.wraps(original)
    def method(*args: Any, **options: Any) -> Any:
        return wrapper(original, *args, **options)

    setattr(method, _OURS, original)
    return method


def _undo(patches: Patches, name: str) -> None:
    try:
        patches.undo()
    except SeamError:
        text = f"{name}: other code has replaced it since install(), so it is left as it is"
        warnings.warn(text, CompressWarning, stacklevel=2)
