"""The real DeepSpeed treats the bad example of a rule as its proof says."""

import copy
import re
from typing import Any

import pytest

from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.scanner import parse
from tests.tools.lint.starting import Outcome, read_configuration, start

PROVED = [rule for rule in RULES if rule.proof.kind != "unproved"]

pytestmark = pytest.mark.sampled(28)


@pytest.mark.parametrize("rule", PROVED, ids=lambda rule: f"{rule.code}-{rule.name}")
def test_deepspeed_behaves_as_the_rule_claims(rule: LintRule) -> None:
    outcome = start(rule.wrong, rule.context)
    if rule.proof.kind == "raises":
        assert re.search(rule.proof.text, outcome.error), outcome.error or "started"
    else:
        assert outcome.error == ""
    if rule.proof.kind == "warns":
        assert re.search(rule.proof.text, outcome.log), outcome.log
    if rule.proof.kind == "ignores":
        assert read_configuration(parse(rule.wrong).data) == read_configuration(without_hits(rule))


@pytest.mark.parametrize("rule", PROVED, ids=lambda rule: f"{rule.code}-{rule.name}")
def test_deepspeed_starts_with_the_good_example(rule: LintRule) -> None:
    outcome = start(rule.right, rule.context)
    assert outcome.error == ""
    if rule.proof.kind == "warns":
        assert not re.search(rule.proof.text, outcome.log), outcome.log


def without_hits(rule: LintRule) -> dict[str, Any]:
    """Return the bad example without the keys that the rule reports."""
    document = parse(rule.wrong)
    data = copy.deepcopy(document.data)
    for hit in rule.check(document, Context(**rule.context)):
        holder = data
        for part in hit.place.path[:-1]:
            holder = holder[str(part)]
        del holder[str(hit.place.path[-1])]
    return data


def test_a_failing_start_is_detected() -> None:
    assert "Error" in start('{"train_batch_size": 0}', {}).error
    assert start('{"train_batch_size": 8}', {}) == Outcome("", "")


def test_an_effective_setting_is_not_reported_as_ignored() -> None:
    plain, clipped = {"train_batch_size": 8}, {"train_batch_size": 8, "gradient_clipping": 0.5}
    assert read_configuration(plain) != read_configuration(clipped)
