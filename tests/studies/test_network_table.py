"""The table of networks: its configurations, its scale, and its rows."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.config import parse_section
from deepspeed_compress.tools.bench.workload import DEEPSPEED
from launch.studies import network_table
from launch.studies.harness import ROOT
from launch.studies.network_table import (
    BITS,
    LAYOUTS,
    Scale,
    ScaledWire,
    Work,
    ds_config,
    group_of,
    in_process,
    main,
    measure,
    measure_scale,
)

SECONDS = {DEEPSPEED: 0.4, "8 bits": 0.3, "4 bits": 0.2, "3 bits": 0.16}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_configurations_are_valid(layout: str, bits: str) -> None:
    section = parse_section(ds_config(layout, bits, bf16=False))
    assert section.parallelism is not None
    assert (section.parallelism.shard_within == 8) == (layout == "hybrid")
    assert section.gradients.bits == int(bits[0])


def test_measurements_are_kept_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    taken: list[Work] = []

    def in_process(function: Any, work: Work) -> Scale | Mapping[str, Mapping[str, float]]:
        taken.append(work)
        return Scale(2.0, 0.01) if function is measure_scale else dict.fromkeys(work.rates, SECONDS)

    monkeypatch.setattr(network_table, "in_process", in_process)
    given = ["--output-dir", str(tmp_path), "--ranks", "16", "--only", "ZeRO 2", "hybrid", "--rates", "25gbit"]
    assert main(given) == 0
    out = capsys.readouterr().out
    assert "| 2M, 16, 25gbit | ZeRO 2 | 0.400 | 0.300, 1.33 | 0.200, 2.00 | 0.160, 2.50 |" in out
    assert "| 2M, 16, 25gbit | hybrid |" in out
    assert [(one.layout, one.ranks, one.scale) for one in taken[1:]] == [
        ("ZeRO 2", 16, Scale(2.0, 0.01)),
        ("hybrid", 16, Scale(2.0, 0.01)),
    ]
    assert main(given) == 0
    assert capsys.readouterr().out == out
    assert len(taken) == 3
    assert [one.name for one in group_of(taken[1]).contenders] == [DEEPSPEED, *BITS]


@pytest.mark.slow
def test_a_computed_network_makes_steps_longer_and_compression_worth_it() -> None:
    sizes = {"device": "cpu", "micro_batch": 1, "seq_len": 32, "steps": 3}
    model = str(ROOT / "configs" / "models" / "gpt_1m.json")
    seconds = in_process(measure, Work("ZeRO 2", model, 16, ("1gbit", "50mbit"), sizes, Scale()))
    # Each node sends 4.6 MB of gradients twice.
    assert seconds["50mbit"][DEEPSPEED] > seconds["1gbit"][DEEPSPEED] + 0.8
    assert seconds["50mbit"]["4 bits"] < 0.5 * seconds["50mbit"][DEEPSPEED]


def test_a_scaled_network_is_as_slow_relative_to_steps() -> None:
    card = ScaledWire(Scale(seconds=2.0, rate=0.01))
    assert card.gpu.link_rate == pytest.approx(0.01 * 450e9)
    assert card.gpu.backend == "nccl"
    assert card.constants("gather", 2).delay == 2.0
