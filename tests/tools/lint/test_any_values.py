"""No rule fails on odd values at any key of an example, with any model and any number of ranks."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import apply, edited, replace
from deepspeed_compress.tools.lint.rule import Context, LintRule
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.lint.scanner import parse
from tests.support.properties import properties
from tests.tools.lint.texts import walk

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2**62, -(2**63) + 1, 0.5, 1e308, -1e-308, "", "auto", "true", "1e400", "9" * 30),
    *(
        "none",
        "cpu",
        "\ud800",
        [],
        [None],
        [[]],
        {},
        {"": {}},
        {"type": []},
        {"enabled": "x"},
        {"a": {"b": [{"c": 1}]}},
    ),
)
MODELS: tuple[dict[str, Any] | None, ...] = (
    None,
    {},
    {"hidden_size": 0, "num_attention_heads": 0, "num_key_value_heads": 0, "num_hidden_layers": 0},
    {"hidden_size": "x", "num_attention_heads": None, "num_key_value_heads": [], "text_config": 3},
    {"text_config": {"hidden_size": 64, "num_attention_heads": 3}, "num_hidden_layers": 5, "vocab_size": -1},
    {"hidden_sizes": [1, 2], "d_model": 1e308, "n_embd": True, "n_head": 2**70, "n_layer": 1},
)
contexts = st.builds(
    Context,
    world_size=st.sampled_from((None, 1, 7, 8, 999_999_999)),
    ranks_per_node=st.sampled_from((None, 1, 3, 8)),
    framework=st.sampled_from((None, "deepspeed", "hf", "accelerate")),
    model=st.sampled_from(MODELS),
)


def places(document: Document) -> list[Path]:
    return [path for path, _ in walk(document.root)]


def shake(document: Document, context: Context) -> None:
    """Apply every rule and every fix to `document`, and check that all places are inside the text."""
    fixed = apply(document, lambda one: lint_document(one, context, Selection()))
    for finding in fixed.remaining:
        assert finding.place.region.end <= len(fixed.text)
        assert finding.message
    again = apply(fixed.document, lambda one: lint_document(one, context, Selection()))
    assert again.text == fixed.text


@settings(properties, max_examples=100)
@given(rule=st.sampled_from(RULES), data=st.data())
def test_odd_values(rule: LintRule, data: st.DataObject) -> None:
    document = parse(rule.wrong)
    text = rule.wrong
    if paths := places(document):
        change = replace(document, data.draw(st.sampled_from(paths)), data.draw(st.sampled_from(ODD)))
        text = edited(text, change)
    shake(parse(text), data.draw(contexts))
