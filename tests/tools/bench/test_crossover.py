"""`bench comm --kind`: rows, table and verdicts of compressed activations."""

import contextlib
import io
from typing import Any

import pytest
from rich.console import Console

from deepspeed_compress.cli import main
from deepspeed_compress.tools.bench.comm import RANK_PROGRAM, crossover_table, verdicts
from deepspeed_compress.tools.bench.comm_rank import BITS
from deepspeed_compress.tools.bench.jobs import LaunchedRanks
from tests.support.forks import run_forks


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


def test_a_picture_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "comm", "--kind", "tensor", "--emulate", "2,1gbit", "--plot", "comm.png"]) == 1
    assert "--plot: draws collectives only" in capsys.readouterr().err


def measured(rank: int, kind: str) -> tuple[list[dict[str, Any]], str]:
    """Return the rows and the output of a rank."""
    printed = io.StringIO()
    with LaunchedRanks() as ranks, contextlib.redirect_stdout(printed):
        rows, _ = ranks.run(RANK_PROGRAM, {"kind": kind, "rates": ranks.rates, "sizes": [4096, 8192]})
    return rows, printed.getvalue()


@pytest.mark.parametrize("kind", [pytest.param("sequence", marks=pytest.mark.slow), "experts"])
def test_rank_0_reports_every_size_and_number_of_bits(kind: str) -> None:
    ([row], progress), (same, nothing) = run_forks(2, measured, kind)
    assert (progress, nothing) == (f"  {kind}\n", "")
    assert same == [row]
    assert [(one["numel"], one["bits"]) for one in row["messages"]] == [(n, b) for n in (2048, 4096) for b in BITS]
