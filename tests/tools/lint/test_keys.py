"""The key table is that of the installed DeepSpeed, and has the lookups that rules need."""

import deepspeed
import pytest

from deepspeed_compress.tools.lint.keys import closest, keys, known_values, places, unknown_keys
from deepspeed_compress.tools.lint.scanner import parse
from launch import lint_keys


def test_the_table_is_up_to_date() -> None:
    assert lint_keys.text() == lint_keys.FILE.read_text(encoding="utf-8")
    assert keys().version == deepspeed.__version__


def test_only_models_refuse_unknown_keys() -> None:
    strict = {path for path, section in keys().sections.items() if section.strict}
    assert {("zero_optimization",), ("fp16",), ("bf16",), ("tensor_parallel",), ("comms_logger",)} <= strict
    assert not {(), ("pipeline",), ("flops_profiler",), ("aio",), ("data_types",), ("optimizer",)} & strict


def test_limits_choices_and_aliases_are_kept() -> None:
    zero = keys().sections[("zero_optimization",)].keys
    assert zero["reduce_bucket_size"].limits == {"above": 0}
    assert zero["stage"].choices == [0, 1, 2, 3]
    assert zero["prefetch_bucket_size"].alias == "stage3_prefetch_bucket_size"
    assert zero["cpu_offload"].deprecated == "offload_optimizer"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("gradient_clippping", "gradient_clipping"),
        ("Optimizer", "optimizer"),
        ("train-batch-size", "train_batch_size"),
        ("something_else", None),
    ],
)
def test_did_you_mean(written: str, meant: str | None) -> None:
    assert closest(written, keys().sections[()].keys) == meant


def test_a_key_of_another_section_has_a_place() -> None:
    assert places(("offload_optimizer",)) == [("zero_optimization",)]
    assert places(("zero_optimization", "aio")) == [()]
    assert places(("enabled",)) == []


def test_comments_and_our_section_are_not_unknown_keys() -> None:
    text = '{"$schema": "x", "_why": 1, "# c": 2, "comment": 3, "deepspeed_compress": {}, "amp": {}, "odd": 1}'
    assert [path for path, _ in unknown_keys(parse(text), strict=False)] == [("odd",)]


def test_known_values_have_their_key() -> None:
    document = parse('{"zero_optimization": {"stage": 2}, "steps_per_print": 5}')
    assert [path for path, *_ in known_values(document, strict=True)] == [("zero_optimization", "stage")]
    assert ("steps_per_print",) in [path for path, *_ in known_values(document, strict=False)]
