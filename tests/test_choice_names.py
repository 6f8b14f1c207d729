"""The names of choices are the same in the code, in what commands print, and on the pages."""

from pathlib import Path

import pytest

from deepspeed_compress.choice_names import (
    AS_NOW,
    INSIDE_NODES,
    ISLANDS,
    LOSS,
    NOW,
    TIMES,
    in_bits,
    inside_nodes,
    islands,
)
from deepspeed_compress.config import CompressConfig
from deepspeed_compress.config.schedules import choice_name

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": (INSIDE_NODES,),
    "docs/planning.md": (NOW, AS_NOW, TIMES, LOSS, in_bits(8), in_bits(4), inside_nodes(4), islands(2, 30)),
    "docs/gains.md": (TIMES, LOSS, INSIDE_NODES, ISLANDS),
    "docs/start.md": (TIMES, LOSS, in_bits(4), in_bits(3), islands(2, 4)),
    "docs/steering.md": (f'"{NOW}"', f'"{in_bits(4)}"', TIMES, LOSS),
    "docs/doctor.md": (TIMES, in_bits(4), INSIDE_NODES),
}
"""Names that each page has."""
OTHERS = ("shard inside nodes", "within nodes of", "times faster")
"""Other words for the same, which pages on choices do not have."""


@pytest.mark.parametrize("page", PAGES)
def test_pages_name_choices_as_commands_do(page: str) -> None:
    text = " ".join((ROOT / page).read_text(encoding="utf-8").lower().split())
    assert [name for name in PAGES[page] if name.lower() not in text] == []
    assert [other for other in OTHERS if other in text] == []


@pytest.mark.parametrize(
    ("gradients", "name"),
    [({"bits": 4}, "the same, 4 bits"), ({"method": "topk", "density": 0.01}, "the same, topk density=0.01")],
)
def test_settings_have_the_name_of_their_choice(gradients: dict[str, object], name: str) -> None:
    assert choice_name(CompressConfig.model_validate({"gradients": gradients}).gradients) == name
