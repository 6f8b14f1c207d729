"""A template is reported once, in every notation, and a configuration is not taken for one."""

import time

import pytest

from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules.syntax import placeholders
from deepspeed_compress.tools.lint.runner import Selection, lint_document, lint_text
from deepspeed_compress.tools.lint.scanner import parse
from deepspeed_compress.tools.lint.yaml_reader import parse_yaml

MARKS = (
    *("ZERO_STAGE", "$STAGE", "${STAGE}", "${oc.env:STAGE, 2}", "{{ stage }}", "{{stage|default(2)}}", "{stage}"),
    *("%(stage)d", "<your stage>", '"{{ stage }}"', '"${STAGE}"', '"<stage>"', "{% if a %}1{% endif %}"),
)


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("end", [",\n", "\n", "\n# a\n"])
def test_placeholders(mark: str, end: str) -> None:
    text = f'{{\n  "train_batch_size": 8,\n  "zero_optimization": {{\n    "stage": {mark}{end}  }}\n}}\n'
    assert [finding.code for finding in lint_text(text, context=Context(world_size=8))] == ["DSC006"]


@pytest.mark.parametrize(
    "text",
    [
        '{"optimizer": {"type": ADAM}}',
        "{wandb: {\n group: MY_GROUP\n}}",
        '{"wandb": {\n "group": MY_GROUP of ours\n}}',
        '{"wandb": {"group": "MY_GROUP"}}',
        '{"aio": {"nvme_path": "${SCRATCH}/nvme"}, "note": "a: ${B}, c"}',
        '{"a": "costs $5", "b": "x < y > z", "c": "100%"}',
        '{"a": {"b": {"c": 1}}, // {{ x }}\n "d": 2}',
        "{train_batch_size: 8 /* <n> */}",
    ],
)
def test_no_placeholders(text: str) -> None:
    assert placeholders(parse(text)) == []


def test_templates_of_yaml() -> None:
    def codes(text: str) -> list[str]:
        return [finding.code for finding in lint_document(parse_yaml(text), Context(), Selection())]

    assert codes("train_batch_size: 8\nzero_optimization:\n  stage: ${stage}\n") == ["DSC006"]
    assert codes("zero_optimization:\n  stage: {{ stage }}\n") == ["DSC006"]
    assert codes("train_batch_size: 8\nwandb:\n  enabled: true\n  group: MY_GROUP\n") == []


@pytest.mark.parametrize("piece", ["{{", "{%", "${", "<a", "@A", ": {a", '"$', "%(a", "{{ a ", "A_", ",    "])
def test_time_is_bounded(piece: str) -> None:
    for text in (piece * (2**21 // len(piece)), f'{{"a": {piece * (2**20 // len(piece))}\n}}'):
        document = parse(text)
        start = time.process_time()
        placeholders(document)
        assert time.process_time() - start < 5
