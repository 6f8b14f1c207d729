"""Mistakes that users reported, and correct public configurations, for which there must be no finding."""

import json
import re
from pathlib import Path
from typing import Any

import hjson  # type: ignore[import-untyped]
import pytest

from deepspeed_compress.tools.lint.files import sources
from deepspeed_compress.tools.lint.fixes import apply
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.runner import Selection, lint_document, lint_text
from deepspeed_compress.tools.lint.scanner import parse

CASES = hjson.loads(Path(__file__).with_name("mistakes.hjson").read_text(encoding="utf-8"), object_pairs_hook=dict)


@pytest.mark.parametrize("case", [case for case in CASES if "files" not in case], ids=lambda case: case["name"])
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
        fixed = apply(parse(text), lambda one: lint_document(one, context, Selection()))
        assert fixed.document.data == case["fixed"]
        assert fixed.document.duplicates == 0


@pytest.mark.parametrize("case", [case for case in CASES if "files" in case], ids=lambda case: case["name"])
def test_files_have_these_findings(case: dict[str, Any], tmp_path: Path) -> None:
    for name, text in case["files"].items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found = [
        one
        for source in sources([str(tmp_path / case.get("argument", "."))])
        for one in lint_document(source.document, Context(source.world_size, framework=source.framework), Selection())
    ]
    assert [f"{one.code} {one.severity}" for one in found] == case["found"]
    assert [list(one.place.start) for one in found] == case["starts"]
    assert all(text in found[0].message for text in case.get("message", []))


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


FIXTURES = sorted(Path(__file__).with_name("fixtures").iterdir())
_CONTEXT = re.compile(r"# context: (\{.*\})")
_CODES = re.compile(r"DSC\d{3}")


def expected(text: str) -> set[tuple[int, str]]:
    """Return the lines with codes in the comments at their ends."""
    comments = [(number, line.partition("  # ")[2]) for number, line in enumerate(text.splitlines(), 1)]
    return {(number, code) for number, comment in comments for code in _CODES.findall(comment)}


@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name)
def test_findings_match_the_comments(path: Path) -> None:
    """Comments in the fixtures name, line by line, the rules that report them."""
    text = path.read_text(encoding="utf-8")
    context = _CONTEXT.match(text)
    findings = lint_text(text, path.name, Context(**json.loads(context[1]) if context else {}))
    assert {(finding.place.start[0], finding.code) for finding in findings} == expected(text)
