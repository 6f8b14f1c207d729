"""Every rule finds its bad example once, and nothing in its good one. Its docstring has a fixed form."""

import re
from collections import Counter

import pytest

from deepspeed_compress.tools.lint.fixes import apply
from deepspeed_compress.tools.lint.rule import Context, LintRule, Proof, read_texts
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document, lint_text
from deepspeed_compress.tools.lint.scanner import parse

SAMPLED = pytest.mark.sampled(3)

BESIDES = {"DSC604": {"DSC803"}}
"""Rules that also find something in the bad example of another rule."""


def found(text: str, rule: LintRule) -> Counter[str]:
    return Counter(finding.code for finding in lint_text(text, context=Context(**rule.context)))


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}-{rule.name}")
def test_only_the_rule_itself_finds_its_bad_example_and_nothing_is_found_in_the_good_one(rule: LintRule) -> None:
    assert found(rule.wrong, rule) == Counter({rule.code, *BESIDES.get(rule.code, set())})
    assert found(rule.right, rule) == Counter()


@SAMPLED
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}-{rule.name}")
def test_the_fixes_of_a_rule_leave_nothing_for_it_to_find(rule: LintRule) -> None:
    context = Context(**rule.context)
    fixed = apply(parse(rule.wrong), lambda document: lint_document(document, context, Selection()))
    offered = any(finding.fix for finding in lint_text(rule.wrong, context=context) if finding.code == rule.code)
    assert offered != any(finding.code == rule.code for finding in fixed.remaining)


def test_the_table_is_in_order() -> None:
    assert len(RULES) >= 90
    assert len({rule.code for rule in RULES}) == len({rule.name for rule in RULES}) == len(RULES)
    assert [rule.code for rule in RULES] == sorted(rule.code for rule in RULES)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: f"{rule.code}-{rule.name}")
def test_a_row_is_complete(rule: LintRule) -> None:
    assert re.fullmatch(r"DSC\d{3}", rule.code)
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", rule.name)
    assert rule.summary.endswith(".")
    assert rule.reason.endswith(".")
    # Where it comes from: our own section apart, a file of DeepSpeed or of Hugging Face.
    assert rule.family in ("compress", "syntax") or re.search(r"\w\.py", rule.reason)
    assert "\n" not in rule.summary
    assert rule.proof.text or rule.proof.kind == "ignores"
    assert rule.check.__name__ == rule.name.replace("-", "_")
    for found in rule.check(parse(rule.wrong), Context(**rule.context)):
        assert found.message
        assert not found.message.endswith(".")
        assert found.remedy.startswith("Write ")
        assert found.remedy.removesuffix(".")[-1] not in " ."


def test_a_file_with_the_section_alone_needs_no_batch_size() -> None:
    assert lint_text('{"deepspeed_compress": {"gradients": {"bits": 4}}}') == []


@pytest.mark.parametrize(
    ("keys", "is_found"),
    [
        ('"gradient_clipping": "auto", "zero_optimization": {"stage": 1}', True),
        ('"gradient_clipping": 0.0, "zero_optimization": {"stage": 1}', False),
        ('"zero_optimization": {"stage": 0}', False),
        ('"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}', True),
        (
            '"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}, "data_types": {"grad_accum_dtype": "fp32"}',
            False,
        ),
    ],
)
def test_steps_of_muon_are_clipped_where_deepspeed_orthogonalizes_first(keys: str, is_found: bool) -> None:
    (rule,) = (rule for rule in RULES if rule.name == "muon-update-clipped")
    text = f'{{"train_batch_size": 8, "optimizer": {{"type": "Muon", "params": {{"lr": 0.02}}}}, {keys}}}'
    assert (rule.code in found(text, rule)) is is_found


DOCSTRING = """Summary.

    A reason
    on two lines.

    Wrong:
        {
          a: 1
        }
    Right: {"a":
        2}
    Context: {"world_size": 2}
    Proof: raises a
        pattern
    """


def test_all_texts_are_read() -> None:
    texts = read_texts(DOCSTRING)
    assert (texts["summary"], texts["reason"]) == ("Summary.", "A reason on two lines.")
    assert (texts["wrong"], texts["right"]) == ("{\n  a: 1\n}\n", '{\n  "a": 2\n}\n')
    assert (texts["context"], texts["proof"]) == ({"world_size": 2}, Proof("raises", "a pattern"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Right:", "Good:"), "has no field Right"),
        (("Proof: raises", "Proof: refuses"), "'refuses' is not a kind of proof"),
        (("2}", "2"), "delimiter"),
    ],
)
def test_another_form_is_an_error(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_texts(DOCSTRING.replace(*change))
