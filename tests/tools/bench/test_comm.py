"""`bench comm`: collectives and compressed activations, and the rows and tables of their times."""

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from rich.console import Console

from deepspeed_compress.cli import main
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.tools.bench import comm, step
from deepspeed_compress.tools.bench.comm import crossover_table, table_of, verdicts
from deepspeed_compress.tools.bench.gauges import join
from deepspeed_compress.tools.bench.jobs import EmulatedRanks, LaunchedRanks, Row
from deepspeed_compress.tools.bench.rank import BITS, COLLECTIVES, measure_messages
from tests.support.forks import run_forks
from tests.support.hosts import measures_links

Captured = pytest.CaptureFixture[str]
SIZES = [1000, 4096, 65536]


def measured(rank: int) -> tuple[list[dict[str, Any]], list[str]]:
    join()
    rows: list[dict[str, Any]] = []
    progress: list[str] = []
    measure_messages([None], SIZES, rows.append, progress.append)
    dist.destroy_process_group()
    return rows, progress


def called(rank: int) -> dict[str, list[int]]:
    """Return the buffer of each collective after one call. It was filled with the rank + 1."""
    join()
    found = {}
    for name, collective in COLLECTIVES.items():
        buffer = torch.full((6,), rank + 1, dtype=torch.uint8)
        collective.prepare(buffer, dist.group.WORLD)()
        found[name] = buffer.tolist()
    dist.destroy_process_group()
    return found


def test_collectives_move_the_expected_elements() -> None:
    first, second, _ = run_forks(3, called)
    assert first["all_reduce"] == second["all_reduce"] == [6] * 6
    assert first["all_gather_into_tensor"] == [0] * 6
    for name in ("reduce_scatter_tensor", "all_to_all_single", "exchange"):
        assert second[name] == [2] * 6


@pytest.mark.slow
def test_every_collective_is_fitted() -> None:
    (rows, progress), _ = run_forks(2, measured)
    assert [row["collective"] for row in rows] == progress == list(COLLECTIVES)
    for row in rows:
        assert row["sizes"] == SIZES
        assert min(row["seconds"]) > 0
        rounds = COLLECTIVES[row["collective"]].rounds
        assert row["bus_bytes_per_s"][0] == pytest.approx(rounds * 500 / row["seconds"][0])
        if row["fitted_bus_bytes_per_s"] is not None:
            assert row["fitted_bus_bytes_per_s"] == pytest.approx(rounds * 0.5 / row["fit"]["seconds_per_byte"])


def line(collective: str, rate: str | None) -> dict[str, Any]:
    """Return a row of 2 ranks that use 80 % of a link of 100 Mbit/s."""
    fit = {"latency": 1e-3, "seconds_per_byte": 0.5 / 1e7, "error": 0.02}
    seconds = [fit["latency"] + size * fit["seconds_per_byte"] for size in (4096, 2**20)]
    common = {"collective": collective, "ranks": 2, "rate": rate, "sizes": [4096, 2**20], "seconds": seconds}
    return common | {"fit": fit, "fitted_bus_bytes_per_s": 1e7}


@pytest.mark.parametrize(("rate", "link"), [("100mbit", "0.80"), (None, "-")])
def test_the_table_shows_fits_and_use_of_the_link(rate: str | None, link: str) -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(table_of("two ranks", [line("exchange", rate)]))
    text = capture.get()
    assert "4K ms" in text
    assert "1M ms" in text
    [cells] = [found.split() for found in text.splitlines() if "exchange" in found]
    assert cells == ["exchange", "1.00", "10.0", link, "2", "%", "1.20", "53.43"]


@measures_links
@pytest.mark.slow
def test_the_exchange_fills_an_emulated_link(tmp_path: Path) -> None:
    """Other work on the machine may disturb a measurement, but hardly three."""
    assert any(is_filled(shares_of_link(tmp_path / f"{attempt}.json")) for attempt in range(3))


def shares_of_link(file: Path) -> dict[str, float]:
    """Return the share of an emulated link that each collective uses, by its name."""
    arguments = ["--emulate", "2,100mbit", "--sizes", "256K", "1M", "4M", "--json", str(file)]
    assert main(["bench", "comm", *arguments]) == 0
    rows = json.loads(file.read_text())["rows"]
    assert [row["collective"] for row in rows] == list(COLLECTIVES)
    # A disturbed measurement may have no fit.
    return {row["collective"]: (row["fitted_bus_bytes_per_s"] or 0.0) / (100e6 / 8) for row in rows}


def is_filled(shares: dict[str, float]) -> bool:
    print(shares)
    # gloo implements reduce-scatter with an all-reduce, which sends twice as much.
    return 0.8 < shares["exchange"] < 1.1 and 0.4 < shares["reduce_scatter_tensor"] < 0.6


def test_a_fit_needs_two_sizes(capsys: Captured) -> None:
    assert main(["bench", "comm", "--sizes", "4K", "4096"]) == 1
    text = "--sizes [4096, 4096]: latency and bandwidth need at least two different sizes"
    assert text in capsys.readouterr().err


def message(numel: int, bits: int, compressed: float, rate: float) -> dict[str, Any]:
    return {"numel": numel, "bits": bits, "plain": 0.01, "compressed": compressed, "rate": rate}


ROW = {
    "kind": "tensor",
    "ranks": 2,
    "rate": "1gbit",
    "messages": [
        message(1000, 8, 0.02, 1e6),
        message(1000, 4, 0.03, 1e6),
        message(100_000, 8, 0.006, 2.5e8),
        message(100_000, 4, 0.012, 5e7),
    ],
}


def test_the_table_has_a_line_for_each_size() -> None:
    console = Console(width=120)
    with console.capture() as capture:
        console.print(crossover_table(ROW))
    text = capture.get()
    assert "tensor, 2 ranks at 1gbit" in text
    assert " ".join(text.split("100,000")[1].split()[:5]) == "10.00 6.00 40% 12.00 -20%"


def test_the_largest_message_decides() -> None:
    assert list(verdicts(ROW)) == [
        "8 bits: saves time on this link; pays below about 2 Gbit/s per rank",
        "4 bits: costs time on this link; pays below about 0.4 Gbit/s per rank",
    ]


def measured_activations(rank: int, kind: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows and the output of a rank."""
    printed = io.StringIO()
    with LaunchedRanks() as ranks, contextlib.redirect_stdout(printed):
        job = {"measure": "activations", "kind": kind, "rates": ranks.rates, "sizes": [4096, 8192]}
        rows, _ = ranks.run([job])
    return rows, printed.getvalue()


@pytest.mark.parametrize("kind", [pytest.param("sequence", marks=pytest.mark.slow), "experts"])
def test_rank_0_reports_every_size_and_number_of_bits(kind: str) -> None:
    ([row], progress), (same, nothing) = run_forks(2, measured_activations, kind)
    assert (progress, nothing) == (f"  {kind}\n", "")
    assert same == [row]
    assert [(one["numel"], one["bits"]) for one in row["messages"]] == [(n, b) for n in (2048, 4096) for b in BITS]


class FailingRanks(EmulatedRanks):
    """Ranks whose program fails, and that print when they are closed."""

    def run(self, jobs: Sequence[Row]) -> tuple[list[Row], str | None]:
        raise ConfigError("no such device")

    def __exit__(self, *error: object) -> None:
        print("closed")


@pytest.mark.parametrize(
    ("module", "command"),
    [(comm, ["bench", "comm"]), (step, ["bench", "step", "--config", "configs/zero2_int4.json", "--output", "{}"])],
)
def test_ranks_are_closed_if_their_program_fails(
    module: ModuleType, command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.setattr(module, "find_ranks", lambda emulation, timeout, _: FailingRanks(emulation, timeout))
    assert main([*(one.format(tmp_path / "rows.json") for one in command), "--emulate", "2,1gbit"]) == 1
    out, err = capsys.readouterr()
    assert out.endswith("closed\n")
    assert "no such device" in err
