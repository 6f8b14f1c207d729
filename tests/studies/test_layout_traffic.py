"""The table of what travels on which link, against formulas and against the page that shows it."""

from pathlib import Path

import pytest

from launch.studies import layout_traffic
from launch.studies.layout_traffic import LAYOUTS, SEQ, messages

PAGE = Path(__file__).parents[2] / "docs" / "parallelism.md"
HIDDEN, HALF = 4096, 2


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_activations_are_those_of_the_layout(layout: layout_traffic.Layout) -> None:
    """A ring of two ranks sends a tensor once per sum. A stage in the middle sends both ways, each rank its part."""
    plain, ours = (list(messages(layout, compressed).values()) for compressed in (False, True))
    tensor = SEQ * HIDDEN * HALF * layout.accumulation
    assert plain[0].inside == pytest.approx(9 * 32 / layout.pipeline * tensor)
    assert ours[0].inside == pytest.approx(6 * 32 / layout.pipeline * tensor)
    assert plain[1].outside == pytest.approx(tensor * min(2, layout.pipeline - 1) / 2)
    assert ours[1].outside == pytest.approx(plain[1].outside * 8.25 / 16)
