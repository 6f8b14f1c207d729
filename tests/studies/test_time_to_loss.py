"""The comparison of times to a loss: its settings are valid."""

import json
from pathlib import Path

import pytest

from deepspeed_compress.config import SECTION, find_problems
from launch.time_to_loss import FILES, REFERENCE, SECTIONS


@pytest.mark.parametrize("name", SECTIONS)
def test_its_settings_are_valid(name: str) -> None:
    ds_config = json.loads(FILES.get(name, Path("configs/zero1_int4_weights.json")).read_text())
    assert not find_problems(ds_config | ({SECTION: SECTIONS[name]} if SECTIONS[name] else {}))


def test_the_reference_is_uncompressed() -> None:
    assert SECTIONS[REFERENCE] == {"gradients": {"method": "none"}}
