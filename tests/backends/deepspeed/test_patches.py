"""Replacements on instances can be removed, however deep, unless other code has replaced them since."""

import gc
from types import ModuleType
from typing import Any

import pytest

from deepspeed_compress.errors import SeamError
from deepspeed_compress.session.patches import Patches, replaced


class Engine:
    def step(self, size: int, *, scale: float = 1.0) -> float:
        """Return a constant."""
        return size * scale


def twice(original: Any, size: int, **options: float) -> Any:
    return 2 * original(size, **options)


def test_attributes_of_class_and_instance_are_restored() -> None:
    engine, patches = Engine(), Patches()
    engine.__dict__["scale"] = 3
    patches.replace(engine, "scale", 4)
    patches.replace(engine, "scale", 5)
    patches.wrap(engine, "step", twice)
    patches.wrap(engine, "step", twice)
    assert engine.step(1, scale=0.5) == 2
    assert vars(engine)["scale"] == 5
    patches.undo()
    assert vars(engine) == {"scale": 3}
    assert engine.step(1) == 1
    patches.undo()


def test_actions_come_in_order() -> None:
    engine, patches, done = Engine(), Patches(), []
    patches.on_undo(lambda: done.append("first made, last undone"))
    patches.precede(engine, "step", lambda: done.append("before"))
    patches.on_undo(lambda: done.append("step" in vars(engine)))
    assert engine.step(1) == 1
    patches.undo()
    assert done == ["before", True, "first made, last undone"]


def test_everything_is_undone_if_an_action_fails() -> None:
    engine, patches, done = Engine(), Patches(), []

    def fail() -> None:
        raise OSError("the disk is full")

    patches.on_undo(lambda: done.append("first"))
    patches.replace(engine, "size", 1)
    patches.on_undo(fail)
    with pytest.raises(OSError, match="the disk is full"):
        patches.undo()
    assert not vars(engine)
    assert done == ["first"]


def test_nothing_is_undone_if_other_code_has_wrapped_a_method() -> None:
    engine, patches = Engine(), Patches()
    patches.replace(engine, "size", 1)
    patches.wrap(engine, "step", twice)
    theirs, engine.step = engine.step, lambda size: 0  # type: ignore[method-assign, misc, assignment]
    with pytest.raises(SeamError, match=r"Engine\.step has since been replaced by other code"):
        patches.undo()
    assert vars(engine)["size"] == 1
    engine.step = theirs  # type: ignore[method-assign]
    patches.undo()
    assert not vars(engine)


class Derived(Engine):
    pass


def fail_within(owner: Any) -> None:
    with replaced(owner, step=abs, added=1):
        with replaced(owner, step=len):
            assert owner.step is len
        assert owner.step is abs
        assert owner.added == 1
        owner.step = sum  # other code, which has not undone this
        raise OSError("failed")


@pytest.mark.parametrize(
    "owner", [Engine(), Engine, Derived, ModuleType("module")], ids=["object", "class", "inherited", "module"]
)
def test_attributes_are_restored_after_a_block_that_fails(owner: Any) -> None:
    if isinstance(owner, ModuleType):
        owner.step = Engine.step  # type: ignore[attr-defined]
    before = dict(vars(owner))
    with pytest.raises(OSError, match="failed"):
        fail_within(owner)
    assert dict(vars(owner)) == before


def destroyable() -> Any:
    class Destroyable(Engine):
        def destroy(self) -> None: ...

    return Destroyable()


@pytest.mark.parametrize("end", ["undo", "destroy", "collect"])
def test_an_action_ends_with_its_engine_once(end: str) -> None:
    engine, patches, done = destroyable(), Patches(), []
    patches.end_with(engine, done.append, "ended")
    if end == "undo":
        patches.undo()
    elif end == "destroy":
        engine.destroy()
        patches.undo()
    patches = Patches()
    del engine
    gc.collect()
    assert done == ["ended"]
