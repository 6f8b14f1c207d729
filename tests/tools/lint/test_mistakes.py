"""Mistakes that users reported, and correct public configurations, in which nothing may be found."""

import io
import json
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]
import pytest

from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.lint.files import Search, sources
from deepspeed_compress.tools.lint.fixes import apply
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import lint_document, lint_text
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.selection import Selection

CASES = hjson.loads(Path(__file__).with_name("mistakes.hjson").read_text(encoding="utf-8"), object_pairs_hook=dict)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["name"])
def test_a_configuration_has_these_findings(case: dict[str, Any]) -> None:
    context = Context(**case.get("given", {}))
    text = case["text"] if "text" in case else json.dumps(case["config"], indent=1)
    found = lint_text(text, context=context)
    assert [f"{one.code} {one.severity}" for one in found] == case["found"]
    assert case.get("places", [one.pointer for one in found]) == [one.pointer for one in found]
    for first in found[:1]:
        assert case.get("message", "") in first.message
        assert case.get("remedy", first.remedy) == first.remedy
    if "fixed" in case:
        fixed = apply(parse(text), lambda one: lint_document(one, context, Selection()), unsafe=True)
        assert fixed.document.data == case["fixed"]
        assert fixed.document.duplicates == 0


def in_directory(directory: Path) -> list[Diagnostic]:
    """Return the findings in all configurations of a directory."""
    found = sources([str(directory)], Search(), io.BytesIO())
    return [
        finding
        for source in found
        for finding in lint_document(
            source.document, Context(source.world_size, framework=source.framework), Selection()
        )
    ]


COMPLETE = """{
  "train_micro_batch_size_per_gpu": "auto",
  "gradient_clipping": "auto",
  "zero_optimization": {"stage": 2}
}
"""
LAUNCH = "distributed_type: DEEPSPEED\nnum_processes: 2\n"


def test_keys_that_accelerate_drops_are_reported_and_not_checked(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(
        LAUNCH + "deepspeed_config:\n  zero_stage: 2\n  optimizer: {type: NoSuch, params: {}}\n"
        "  train_micro_batch_size_per_gpu: 0\n  zero_force_ds_cpu_optimizer: false\n"
    )
    found = in_directory(tmp_path)
    assert [(finding.code, finding.place.start[0]) for finding in found] == [("DSC731", 5)]
    for key in ("optimizer", "train_micro_batch_size_per_gpu", "zero_force_ds_cpu_optimizer"):
        assert key in found[0].message


@pytest.mark.parametrize(("beside", "line"), [("  zero_stage: 3\n", 5), ("mixed_precision: bf16\n", 5)])
def test_settings_beside_a_file_are_refused(tmp_path: Path, beside: str, line: int) -> None:
    (tmp_path / "ds.json").write_text(COMPLETE)
    (tmp_path / "a.yaml").write_text(LAUNCH + f"deepspeed_config:\n  deepspeed_config_file: ds.json\n{beside}")
    [found] = in_directory(tmp_path)
    assert (found.code, found.severity, found.place.start[0]) == ("DSC730", "error", line)


def test_a_file_in_a_parent_directory_is_found(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()  # both are in one project
    (tmp_path / "configs").mkdir()
    (tmp_path / "launch" / "deep").mkdir(parents=True)
    (tmp_path / "configs" / "ds.json").write_text('{"train_batch_size": 8}')
    (tmp_path / "launch" / "deep" / "a.yaml").write_text(
        LAUNCH + "deepspeed_config:\n  deepspeed_config_file: configs/ds.json\n"
    )
    assert {finding.code for finding in in_directory(tmp_path / "launch")} == {"DSC710", "DSC716"}


def test_a_missing_file_is_reported_as_missing(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text(LAUNCH + "deepspeed_config:\n  deepspeed_config_file: no.json\n")
    [found] = in_directory(tmp_path)
    assert (found.code, found.severity, found.place.start) == ("DSC732", "warning", (4, 26))


SECTIONS = sorted(
    (*section.path, name)
    for section in keys().sections.values()
    for name, key in section.keys.items()
    if "object" in key.kinds and {*key.kinds} <= {"object", "null"} and name not in ("inference", "msamp")
)


@pytest.mark.parametrize("value", [True, 2, "cpu", []], ids=repr)
@pytest.mark.parametrize("path", SECTIONS, ids="/".join)
def test_a_plain_value_instead_of_a_section_is_found(path: tuple[str, ...], value: object) -> None:
    """DeepSpeed refuses all of these except "zero_optimization": true, which has its own rule."""
    data: object = value
    for key in reversed(path):
        data = {key: data}
    assert isinstance(data, dict)
    found = lint_text(json.dumps({"train_batch_size": 8, **data}), context=Context(framework="deepspeed"))
    assert any(one.code in ("DSC018", "DSC120") and one.place.path == path for one in found)


@pytest.mark.parametrize(
    ("path", "value", "meant"),
    [
        (("zero_optimization", "offload_optimizer"), "cpu", {"device": "cpu"}),
        (("zero_optimization", "offload_optimizer"), True, {"device": "cpu"}),
        (("zero_optimization", "offload_param"), "nvme", {"device": "nvme"}),
        (("zero_optimization",), 2, {"stage": 2}),
        (("optimizer",), "AdamW", {"type": "AdamW"}),
        (("scheduler",), "WarmupLR", {"type": "WarmupLR"}),
        (("fp16",), True, {"enabled": True}),
        (("bf16",), False, {"enabled": False}),
    ],
)
def test_a_plain_value_is_moved_to_the_key_it_was_meant_for(
    path: tuple[str, ...], value: object, meant: object
) -> None:
    data: object = value
    for key in reversed(path):
        data = {key: data}
    document = parse(json.dumps(data))
    fixed = apply(document, lambda one: lint_document(one, Context(), Selection(("DSC018",))), unsafe=True)
    assert fixed.document.get(*path) == meant


@pytest.mark.parametrize("section", ["fp16", "bf16", "optimizer", "scheduler", "flops_profiler"])
def test_auto_instead_of_a_section_is_found_for_every_framework(section: str) -> None:
    text = json.dumps({"train_batch_size": 8, section: "auto", "zero_optimization": {"stage": 0}})
    for framework, code in ((None, "DSC018"), ("lightning", "DSC018"), ("deepspeed", "DSC700"), ("hf", "DSC702")):
        codes = [one.code for one in lint_text(text, context=Context(framework=framework))]
        assert code in codes
        assert len({"DSC018", "DSC700", "DSC702"} & {*codes}) == 1


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("OneCycle", {"cycle_min_lr": 0.001, "cycle_max_lr": 0.002}),
        ("LRRangeTest", {"lr_range_test_min_lr": 0.001}),
        ("LRRangeTest", {}),
        ("WarmupDecayLR", {"total_num_steps": 2000, "warmup_num_steps": 2}),
    ],
)
def test_these_schedulers_replace_the_learning_rate_of_the_optimizer(name: str, params: dict[str, Any]) -> None:
    from deepspeed.runtime import lr_schedules
    from torch import nn, optim

    rates = []
    for rate in (0.1, 0.01):
        optimizer = optim.AdamW(nn.Linear(2, 2).parameters(), lr=rate)
        scheduler = getattr(lr_schedules, name)(optimizer, **params)
        for _ in range(5):
            optimizer.step()
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates[0] == rates[1] != 0.1
