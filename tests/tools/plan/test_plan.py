import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.config import Islands
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.plan import CANDIDATES, Interval, intervals, plans, recommendation

SECTION: dict[str, Any] = {
    "gradients": {"method": "topk", "density": 0.01, "values": {"bits": 4}},
    "schedule": {
        "warmup_steps": 100,
        "ramp": {"steps": 400},
        "phases": [{"until": 0.2, "gradients": {"density": 0.05}}, {"until": 0.8}, {"gradients": {"density": 0.02}}],
    },
}


def test_intervals_cover_training_without_gaps() -> None:
    found = intervals({"bf16": {"enabled": True}, "deepspeed_compress": SECTION | {}}, 10000)
    assert found[0] == Interval(0, 99, "none", 16.0)
    assert found[-1].settings == "topk density=0.02 values=blockwise bits=4"
    assert (found[-1].first, found[-1].last) == (8000, 9999)
    assert all(before.last == after.first - 1 for before, after in itertools.pairwise(found))
    assert all(before.bits > after.bits for before, after in itertools.pairwise(found[:18]))


def test_plan_schedule_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"deepspeed_compress": SECTION}))
    assert main(["plan", "schedule", str(file)]) == 1
    assert "--steps" in capsys.readouterr().err
    assert main(["plan", "schedule", str(file), "--steps", "10000"]) == 0
    assert "topk density=0.02" in capsys.readouterr().out


def islands(**settings: Any) -> Islands:
    return Islands(size=1, exchange={"method": "none"}, **settings)


def test_an_exchange_is_spread_over_its_steps() -> None:
    """Two islands with a million fp32 parameters send 4 MB each per exchange, in 0.32 s at 100 Mbit/s."""
    found = {plan.sync_every: plan for plan in plans(islands(), 2, 1_000_000, 1e8, 1.0)}
    assert found[1].exchange_seconds == pytest.approx(0.32)
    assert found[10].bytes_a_step == pytest.approx(400_000)
    assert found[10].step_ratio == pytest.approx(1.032)
    assert recommendation(list(found.values())) == "sync_every 10 costs 3.2 % of the time"


def test_delay_hides_exchanges_up_to_the_capacity_of_the_link() -> None:
    blocking, delayed = (plans(islands(delay=delay, sync_every=20), 2, 1_000_000, 1e7, 1.0) for delay in (0, 5))
    assert [plan.step_ratio for plan in delayed if plan.sync_every >= 10] == [1.0] * 8
    assert next(plan.step_ratio for plan in delayed if plan.sync_every == 1) == pytest.approx(4.2)
    assert all(one.step_ratio <= other.step_ratio for one, other in zip(delayed, blocking, strict=True))


def test_asynchronous_islands_are_not_planned() -> None:
    elastic = {"rendezvous": "head:1", "parameter_server": {}}
    with pytest.raises(ConfigError, match="/islands/elastic/parameter_server: pushes do not block training"):
        plans(Islands.model_validate({"elastic": elastic}), 2, 1_000_000, 1e8, 0.1)


def test_plan_islands_prints_a_table_or_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "ds.json"
    arguments = ["plan", "islands", str(file), "--model", "124M", "--hosts", "4", "--bandwidth", "100mbit"]
    file.write_text(json.dumps({"deepspeed_compress": {"islands": {"by_host": True, "sync_every": 10}}}))
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert "124,000,000 parameters, 100 Mbit/s" in output
    file.write_text(json.dumps({"deepspeed_compress": {}}))
    assert main(arguments) == 1
    assert "/deepspeed_compress/islands is missing" in capsys.readouterr().err


def planned(file: Path, islands: Any, *options: str, **rest: Any) -> int:
    """Run `plan islands`, and return the exit code. `options` override the usual ones."""
    section = {"islands": islands, **rest.pop("section", {})}
    file.write_text(json.dumps({"deepspeed_compress": section, **rest}))
    usual = ["--model", "1M", "--hosts", "2", "--bandwidth", "100mbit"]
    return main(["plan", "islands", str(file), *usual, *options])


@pytest.mark.parametrize(("sync_every", "steps"), [(7, 7), ("30 s", 60), ("0.1 s", 1)])
def test_the_configured_interval_is_in_the_table(
    sync_every: int | str, steps: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kind = {"size": 1} if isinstance(sync_every, int) else {"elastic": {"rendezvous": "head:29400"}}
    assert planned(tmp_path / "ds.json", {**kind, "sync_every": sync_every}, "--step", "0.5") == 0
    assert re.search(rf"^ +{steps} ", capsys.readouterr().out, re.MULTILINE)


def test_max_rate_limits_the_planned_bandwidth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    section = {"communication": {"max_rate": "10 Mbit/s"}}
    assert planned(tmp_path / "ds.json", {"size": 1, "exchange": {"method": "none"}}, section=section) == 0
    output = capsys.readouterr().out
    assert "10 Mbit/s" in output
    assert re.search(r"^ +1 +4 +3.2 ", output, re.MULTILINE)


def test_an_endless_schedule_has_no_last_step() -> None:
    assert intervals({"deepspeed_compress": {}}, None) == [Interval(0, None, "blockwise bits=8", 8.125)]


def test_bits_that_depend_on_shapes_are_unknown() -> None:
    [interval] = intervals({"deepspeed_compress": {"gradients": {"method": "powersgd"}}}, 5)
    assert (interval.last, interval.bits) == (4, None)


@pytest.mark.parametrize(("half", "bits"), [({"bfloat16": {"enabled": True}}, 16), ({"bf16": "auto"}, 32), ({}, 32)])
def test_uncompressed_gradients_have_the_bits_of_the_precision(half: dict[str, Any], bits: float) -> None:
    """DeepSpeed has two names for bf16. A value that is not an object is left to the linter."""
    [interval] = intervals({**half, "deepspeed_compress": {"gradients": {"method": "none"}}}, 5)
    assert interval.bits == bits


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--hosts", "1"), "argument --hosts: '1' is not an integer from 2 up: a single island exchanges nothing"),
        (("--bandwidth=-5mbit",), "argument --bandwidth: rate '-5mbit': write a number and a unit, such as"),
        (("--step", "0"), "'0' is not a positive number"),
    ],
)
def test_invalid_options_are_usage_errors(
    options: tuple[str, ...], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        planned(tmp_path / "ds.json", {"size": 1}, *options)
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_a_model_without_parameters_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(tmp_path / "ds.json", {"size": 1}, "--model", "0") == 1
    assert "--model: '0' is not a number" in capsys.readouterr().err


def test_intervals_that_the_section_forbids_are_not_planned(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`sync_every` 1 would cost nothing here."""
    for settings, first in (({"fragments": 4}, 5), ({"fragments": 2, "delay": 9}, 10)):
        assert planned(tmp_path / "ds.json", {"size": 1, **settings}, "--bandwidth", "9000000gbit") == 0
        output = capsys.readouterr().out
        assert f"sync_every {first} costs" in output
        rows = re.findall(r"^ +([0-9]+) ", output, re.MULTILINE)
        assert [int(row) for row in rows] == [one for one in CANDIDATES if one >= first]


def test_second_moments_add_four_bytes_per_block() -> None:
    found = (plans(islands(second_moments={"block_size": size}), 2, 1_000_000, 1e8, 1.0)[0] for size in (1, 128))
    assert [plan.bytes_a_step for plan in found] == pytest.approx([8e6, 4e6 * (1 + 1 / 128)])
