"""A template gives one hint, whatever its placeholders look like; a configuration is no template."""

import time

import pytest

from deepspeed_compress.lint.document import parse
from deepspeed_compress.lint.finding import Finding
from deepspeed_compress.lint.rule import Context
from deepspeed_compress.lint.runner import lint_document, lint_text
from deepspeed_compress.lint.selection import Selection
from deepspeed_compress.lint.templates import placeholders
from deepspeed_compress.lint.yaml_reader import parse_yaml

MEGATRON = """{
  "train_batch_size" : GLOBAL_BATCH,
  "train_micro_batch_size_per_gpu": MICRO_BATCH,
  "steps_per_print": LOG_INTERVAL,
  "zero_optimization": {
    "stage": ZERO_STAGE
  },
  "bf16": {
    "enabled": BF16_ENABLED
  },
  "unknown": 1
}
"""


def found(text: str) -> list[Finding]:
    return lint_text(text, context=Context(framework="hf", world_size=3))


def test_many_placeholders_are_one_hint() -> None:
    [finding] = found(MEGATRON)
    assert (finding.rule.code, finding.start, finding.end) == ("DSC006", (2, 24), (2, 36))
    assert finding.message.startswith("a template, with GLOBAL_BATCH and 4 more still to be filled in")
    assert finding.rule.severity == "info"


@pytest.mark.parametrize(
    ("value", "count"),
    [
        ("ZERO_STAGE", 1),
        ("$STAGE", 1),
        ("${STAGE}", 1),
        ("${oc.env:STAGE, 2}", 1),
        ("{{ stage }}", 1),
        ("{{stage|default(2)}}", 1),
        ("{stage}", 1),
        ("%(stage)d", 1),
        ("<your stage>", 1),
        ('"{{ stage }}"', 1),
        ('"${STAGE}"', 1),
        ('"<stage>"', 1),
        ("{% if a %}1{% endif %}", 2),
    ],
)
@pytest.mark.parametrize("layout", ['{{"train_batch_size": 8, "zero_optimization": {{"stage": {}}}}}', "{{\n{}\n}}\n"])
def test_placeholders(value: str, count: int, layout: str) -> None:
    text = layout.format(
        value if "stage" in layout else f'  "zero_optimization": {{\n    "stage": {value},\n    "a": 1\n  }}'
    )
    assert [finding.rule.code for finding in found(text)] == ["DSC006"]
    assert len(placeholders(parse(text))) == count


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
        return [finding.rule.code for finding in lint_document(parse_yaml(text), Context(), Selection())]

    assert codes("zero_optimization:\n  stage: ${stage}\n  a: 1\n") == ["DSC006"]
    assert codes("zero_optimization:\n  stage: {{ stage }}\n") == ["DSC006"]
    assert codes("train_batch_size: 8\nwandb:\n  enabled: true\n  group: MY_GROUP\n") == []


@pytest.mark.parametrize("piece", ["{{", "{%", "${", "<a", ": {", '"$', "%(", "{{ a ", "A_", ",    "])
def test_time_is_bounded(piece: str) -> None:
    texts = (piece * (2**21 // len(piece)), f'{{"a": {piece * (2**20 // len(piece))}\n}}')
    start = time.process_time()
    for text in texts:
        placeholders(parse(text))
    assert time.process_time() - start < 5
