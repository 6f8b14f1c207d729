"""Command-line options of `ds-compress bench`."""

import argparse

import pytest

from deepspeed_compress.cli import main
from deepspeed_compress.tools.bench.options import PEERS, Emulation, emulation, size
from deepspeed_compress.tools.bench.peers import PEERS as IMPLEMENTED


def test_every_peer_is_implemented() -> None:
    assert {peer for peer in PEERS if not peer.startswith("deepspeed")} == set(IMPLEMENTED)


def test_hosts_and_rates_are_parsed() -> None:
    assert emulation("4,none,1gbit,100mbit") == Emulation(4, ("none", "1gbit", "100mbit"))
    assert emulation("4x2,1gbit") == Emulation(4, ("1gbit",), per_host=2)
    assert emulation("4x2,1gbit").ranks == 8


@pytest.mark.parametrize(
    "text",
    ["2", "2x,y", "2x1.5,1gbit", "2x0,1gbit", "1,1gbit", "x,1gbit", "2,", "2,fast", "2,1gbit,0mbit", "1000,1gbit"],
)
def test_invalid_hosts_are_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as"):
        emulation(text)


@pytest.mark.parametrize("text", ["0", "-1", "1.5M", "1T", ""])
def test_an_invalid_size_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="such as"):
        size(text)


@pytest.mark.parametrize("arguments", [["step", "--config", "a.json", "--output", "x.json"], ["comm"]])
def test_one_process_is_refused(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["bench", *arguments]) == 1
    assert "--emulate 2,1gbit" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["kernels", "--only", "("], ["comm", "--timeout", "nan"]])
def test_wrong_values_are_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["bench", *arguments])
    assert f"error: argument {arguments[1]}: {arguments[2]!r} is not a" in capsys.readouterr().err
