"""docs/parallelism.md: its program runs, and its table has all families."""

import os
import re
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from deepspeed_compress.model_families import FAMILIES
from tests.support.forks import run_forks

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "parallelism.md").read_text(encoding="utf-8")
OUTPUT = "runs/python/model"


def run_program(rank: int, program: str) -> None:
    os.chdir(ROOT)
    exec(compile(program, "docs/parallelism.md", "exec"), {})


@pytest.mark.slow
def test_the_program_of_the_page_runs(tmp_path: Path) -> None:
    (program,) = re.findall(r"^```python\n(.+?)^```", PAGE, re.DOTALL | re.MULTILINE)
    assert OUTPUT in program
    run_forks(8, run_program, program.replace(OUTPUT, str(tmp_path)), timeout=400)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).num_parameters() == 3_147_456


def test_every_family_has_a_row() -> None:
    table = PAGE.partition("## Families")[2].partition("\n## ")[0]
    named = [
        name for row in re.findall(r"^\| (`[^|]+) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)
    ]
    assert sorted(name for name in named if name != "model_type") == sorted(
        name for name, family in FAMILIES.items() if family.modules is not None
    )
