"""Replaced attributes of an engine and of objects that belong to it: how to restore them, and copies without them."""

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.errors import CompressError, SeamError

_ABSENT = object()
_PACKAGE = __name__.partition(".")[0]
_REDUCE = "__reduce_ex__"


@dataclass(frozen=True)
class _Patch:
    """Replacement of the attribute `name` of `owner` by `value`; `before` is the instance's own former attribute."""

    owner: Any
    name: str
    value: Any
    before: Any

    def undo(self) -> None:
        if self.before is _ABSENT:
            delattr(self.owner, self.name)
        else:
            setattr(self.owner, self.name, self.before)


def _replace(owner: Any, name: str, value: Any) -> _Patch:
    patch = _Patch(owner, name, value, vars(owner).get(name, _ABSENT))
    setattr(owner, name, value)
    return patch


@contextmanager
def replaced(owner: Any, /, **values: Any) -> Iterator[None]:
    """Replace attributes of `owner`, an object, a class or a module, by `values` within the block.

    They are restored after the block, whatever other code has set meanwhile.
    """
    with ExitStack() as stack:
        for name, value in values.items():
            stack.callback(_replace(owner, name, value).undo)
        yield


class Patches:
    """Replaced attributes, and other actions to undo, in order.

    Owners are instances, and Megatron's class for messages between stages, whose instances live for one step.
    """

    def __init__(self) -> None:
        self._undo: list[_Patch | Callable[[], object]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name` to `value` until `undo`."""
        self._undo.append(_replace(owner, name, value))

    def wrap(self, owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
        """Replace the method `owner.name` by `wrapper`, which gets the method as its first argument."""
        method = getattr(owner, name)
        self.replace(owner, name, functools.wraps(method)(functools.partial(wrapper, method)))

    def precede(self, owner: Any, name: str, action: Callable[[], object]) -> None:
        """Call `action` before each call of the method `owner.name`."""
        self.wrap(owner, name, functools.partial(_after, action))

    def on_undo(self, action: Callable[[], object]) -> None:
        """Call `action` in `undo`, after everything that is replaced from now on has been restored."""
        self._undo.append(action)

    def end_with(self, engine: Any, action: Callable[..., object], *arguments: Any) -> None:
        """Call `action(*arguments)` once: in `undo`, or when `engine` is destroyed or collected.

        `action` and `arguments` must not refer to `engine`.
        """
        end = weakref.finalize(engine, action, *arguments)
        end.atexit = False
        self.on_undo(end)
        self.precede(engine, "destroy", end)

    @contextmanager
    def undone_on_failure(self) -> Iterator[None]:
        """Restore everything if the block raises.

        The block's own error is raised, even if restoring fails too.
        """
        try:
            yield
        except BaseException:
            with suppress(CompressError):
                self.undo()
            raise

    def check(self) -> None:
        """Check that `undo` can restore everything.

        Raises:
            SeamError: other code has replaced one of the attributes since.
        """
        seen: set[tuple[int, str]] = set()
        for patch in reversed(self._undo):
            if isinstance(patch, _Patch) and (id(patch.owner), patch.name) not in seen:
                seen.add((id(patch.owner), patch.name))
                if vars(patch.owner).get(patch.name, _ABSENT) is not patch.value:
                    owner = getattr(patch.owner, "__name__", type(patch.owner).__name__)
                    raise SeamError(
                        f"{owner}.{patch.name} has since been replaced by other code; undo that replacement first"
                    )

    def undo(self) -> None:
        """Restore everything, the newest first. If an action raises, the others are undone all the same.

        Raises:
            SeamError: if other code has replaced one of the attributes since; nothing is restored then.
        """
        self.check()
        with ExitStack() as undone:
            for patch in self._undo:
                undone.callback(patch.undo if isinstance(patch, _Patch) else patch)
            self._undo.clear()


class SwitchedPatches(Patches):
    """Patches of a reduction of gradients, which are made anew when an engine is left alone, and when it no longer is.

    Nothing is pending between steps, so they may be exchanged there.

    Args:
        replace: replaces the reduction until the given patches are undone.
        count: only counts the bytes of the engine's own reduction.
    """

    def __init__(self, replace: Callable[[Patches], None], count: Callable[[Patches], None]) -> None:
        super().__init__()
        self._attach = {False: replace, True: count}
        self._alone: bool | None = None

    def follow(self, alone: bool) -> None:
        """Prepare for the step that begins, in which the engine is left alone if `alone`."""
        if alone != self._alone:
            self.undo()
            self._alone = alone
            self._attach[alone](self)


def _after(action: Callable[[], object], method: Callable[..., Any], *args: Any, **options: Any) -> Any:
    action()
    return method(*args, **options)


def leave_out_of_copies(owner: Any) -> None:
    """Make `copy.deepcopy` and pickles of `owner` leave out hooks, methods and attributes of this package.

    Programs copy models to average their weights, and save whole models and scalers. The attached hooks hold process
    groups, which cannot be copied; and the copy is another object, to which nothing is attached yet.
    """
    # Both look up `__reduce_ex__` on the object itself. The reference is weak, so that the object can be freed.
    object.__setattr__(owner, _REDUCE, functools.partial(_reduce, weakref.ref(owner)))


def _reduce(reference: "weakref.ref[Any]", protocol: Any) -> tuple[Any, ...]:
    owner = reference()
    made, arguments, state, *rest = getattr(type(owner), _REDUCE)(owner, protocol)
    cleaned = {name: _without_ours(value) for name, value in state.items() if name != _REDUCE and not _is_ours(value)}
    return (made, arguments, cleaned, *rest)


def _without_ours(value: Any) -> Any:
    """Return `value` without the hooks of this package that it holds."""
    if isinstance(value, dict) and any(map(_is_ours, value.values())):
        return type(value)((key, hook) for key, hook in value.items() if not _is_ours(hook))
    if isinstance(value, list):
        # Communication hooks of DistributedDataParallel, each with its state.
        return [one for one in value if not (isinstance(one, tuple) and any(map(_is_ours, one)))]
    return value


def _is_ours(value: Any) -> bool:
    while isinstance(value, functools.partial):
        value = value.func
    owner = getattr(value, "__self__", value)
    return not isinstance(owner, Mapping) and str(getattr(owner, "__module__", "")).partition(".")[0] == _PACKAGE
