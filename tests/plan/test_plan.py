import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.plan import Interval, intervals

SECTION: dict[str, Any] = {
    "gradients": {"method": "topk", "density": 0.01, "values": {"bits": 4}},
    "schedule": {
        "warmup_steps": 100,
        "ramp": {"steps": 400},
        "phases": [{"until": 0.2, "gradients": {"density": 0.05}}, {"until": 0.8}, {"gradients": {"density": 0.02}}],
    },
}


def test_stretches_cover_training_without_gaps() -> None:
    found = intervals({"bf16": {"enabled": True}, "deepspeed_compress": SECTION | {}}, 10000)
    assert found[0] == Interval(0, 99, "none", 16.0)
    assert found[-1].settings == "topk density=0.02 values=blockwise bits=4"
    assert (found[-1].first, found[-1].last) == (8000, 9999)
    assert all(before.last == after.first - 1 for before, after in itertools.pairwise(found))
    assert all(before.bits > after.bits for before, after in itertools.pairwise(found[:18]))


def test_an_endless_schedule_has_no_last_step() -> None:
    assert intervals({"deepspeed_compress": {}}, None) == [Interval(0, None, "blockwise bits=8", 8.125)]


def test_sizes_that_depend_on_shapes_are_not_told() -> None:
    [interval] = intervals({"deepspeed_compress": {"gradients": {"method": "powersgd"}}}, 5)
    assert (interval.last, interval.bits) == (4, None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    file, picture = tmp_path / "ds.json", tmp_path / "plan.png"
    file.write_text(json.dumps({"deepspeed_compress": SECTION}))
    assert main(["plan", "schedule", str(file)]) == 1
    assert "--steps" in capsys.readouterr().err
    assert main(["plan", "schedule", str(file), "--steps", "10000", "--output", str(picture)]) == 0
    assert "topk density=0.02" in capsys.readouterr().out
    assert picture.read_bytes().startswith(b"\x89PNG")
