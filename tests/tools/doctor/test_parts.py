"""Merge patches, and ladders of settings."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.config.section import find_problems
from deepspeed_compress.tools.doctor.patches import (
    accumulated,
    apply,
    difference,
    slower,
    softer,
    stronger,
    with_gradients,
    with_stage,
)
from tests.support.sections import OF_GRADIENTS
from tests.support.synthetic_runs import config

OBJECTS = st.dictionaries(
    st.sampled_from("abc"),
    st.recursive(st.integers(), lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3), max_leaves=5),
    max_size=3,
)


@given(OBJECTS, OBJECTS)
def test_applying_a_difference_yields_the_new_configuration(old: dict[str, Any], new: dict[str, Any]) -> None:
    assert apply(old, difference(old, new)) == new
    assert difference(new, new) == {}


def test_apply_agrees_with_the_examples_of_rfc_7396() -> None:
    """Appendix A of RFC 7396."""
    cases: list[tuple[Any, Any, Any]] = [
        ({"a": "b"}, {"a": "c"}, {"a": "c"}),
        ({"a": "b", "b": "c"}, {"a": None}, {"b": "c"}),
        ({"a": ["b"]}, {"a": "c"}, {"a": "c"}),
        ({"a": {"b": "c"}}, {"a": {"b": "d", "c": None}}, {"a": {"b": "d"}}),
        ({"a": "foo"}, "bar", "bar"),
        ({"e": None}, {"a": 1}, {"e": None, "a": 1}),
        ([1, 2], {"a": "b", "c": None}, {"a": "b"}),
        ({}, {"a": {"bb": {"ccc": None}}}, {"a": {"bb": {}}}),
    ]
    assert [apply(target, patch) for target, patch, _ in cases] == [result for _, _, result in cases]


@pytest.mark.parametrize("method", [method for method in OF_GRADIENTS if method != "none"])
@pytest.mark.parametrize("step", [softer, stronger])
def test_softer_and_stronger_settings_are_valid_from_every_method(method: str, step: Any) -> None:
    optimizer = {"optimizer": {"type": "AdamW", "params": {"betas": [0.0, 0.99]}}}
    own = method in ("dgc", "demo")
    before = config({"method": method, **OF_GRADIENTS[method]}, optimizer if own else {}, weights=None)
    assert find_problems(before) == []
    patch = step(CompressConfig.model_validate(before[SECTION]).gradients)
    if patch is not None:
        after = with_gradients(before, patch)
        assert after != before
        assert find_problems(after) == []
    assert step is stronger or patch is not None


@pytest.mark.parametrize(
    "keys",
    [{"preset": "auto"}, {"auto": {}}, {"ownership": "balanced"}, {"communication": {"max_rate": "1 Gbit/s"}}],
    ids=lambda keys: next(iter(keys)),
)
@pytest.mark.parametrize("weights", [{"bits": 4}, {"method": "none"}])
def test_uncompressed_gradients_are_valid_in_every_section(keys: dict[str, Any], weights: dict[str, Any]) -> None:
    before = config(extra={"zero_optimization": {"stage": 2}}, weights=weights, **keys)
    assert find_problems(before) == []
    after = with_gradients(before, {"method": "none"})
    assert find_problems(after) == []
    assert apply(before, difference(before, after)) == after


def test_leaving_demo_restores_the_momentum_of_the_optimizer() -> None:
    demo = config({"method": "demo"}, {"optimizer": {"type": "AdamW", "params": {"betas": [0.0, 0.95]}}})
    after = with_gradients(demo, {"method": "blockwise", "bits": 4})
    assert after["optimizer"]["params"]["betas"] == [0.9, 0.95]
    assert demo["optimizer"]["params"]["betas"] == [0.0, 0.95]


@pytest.mark.parametrize(
    ("batch", "patch"),
    [
        ({}, {"gradient_accumulation_steps": 2}),
        ({"train_batch_size": 8}, {"train_batch_size": 16, "gradient_accumulation_steps": 2}),
        ({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 4}, {"train_batch_size": 16}),
        ({"train_micro_batch_size_per_gpu": 4}, {"gradient_accumulation_steps": 2}),
        ({"train_micro_batch_size_per_gpu": 4, "train_batch_size": None}, {"gradient_accumulation_steps": 2}),
        (
            {"train_batch_size": 8, "gradient_accumulation_steps": 2},
            {"train_batch_size": 16, "gradient_accumulation_steps": 4},
        ),
    ],
)
def test_accumulation_doubles(batch: dict[str, Any], patch: dict[str, Any]) -> None:
    assert accumulated(batch) == {**batch, **patch}


def test_slower_halves_the_learning_rate_in_all_places() -> None:
    before = {"optimizer": {"params": {"lr": 0.2}}, "scheduler": {"params": {"warmup_max_lr": 0.4}}}
    assert slower(before) == {"optimizer": {"params": {"lr": 0.1}}, "scheduler": {"params": {"warmup_max_lr": 0.2}}}
    assert slower({"optimizer": {"params": {"lr": "auto"}}}) is None


def test_softer_settings_end_with_method_none() -> None:
    now, seen = config({"method": "demo", "density": 0.001}, {"optimizer": {"type": "SGD"}}), []
    while (patch := softer(CompressConfig.model_validate(now[SECTION]).gradients)) is not None:
        now = with_gradients(now, patch)
        seen.append(now[SECTION]["gradients"])
        assert len(seen) < 10
    assert [one.get("density", one.get("bits")) for one in seen] == [0.1, 4, 8, None]
    assert seen[-1]["method"] == "none"


def test_stage_changes_in_both_places() -> None:
    both = config(extra={"zero_optimization": {"stage": 2}}, parallelism={"zero_stage": 2})
    after = with_stage(both, 1)
    assert (after["zero_optimization"]["stage"], after[SECTION]["parallelism"]["zero_stage"]) == (1, 1)


@pytest.mark.parametrize("key", ["train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"])
@pytest.mark.parametrize("size", ["auto", "8", 8.0, True, [8]])
def test_accumulation_of_an_unknown_batch_does_not_change(key: str, size: object) -> None:
    assert accumulated({key: size}) is None
    assert accumulated({"train_batch_size": 8, "gradient_accumulation_steps": 2, key: size}) is None
