"""Compressed messages of activations compared with plain ones, and what an engine says about them."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.backends.activations import crossover as module
from deepspeed_compress.backends.activations.crossover import WIDTH, Crossover, Kind, measure
from deepspeed_compress.config import SECTION
from tests.support import expert_layers
from tests.support.forks import run_forks
from tests.support.split_llama import Job, start
from tests.support.threads import run_threads

KINDS: tuple[Kind, ...] = ("tensor", "pipeline", "experts", "sequence")
NUMEL = 2**12
OF_ENGINES = pytest.mark.sampled(6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bits", [[8], [4], [4, 8]])
def test_bytes_are_counted_and_times_are_those_of_the_slowest_rank(kind: Kind, bits: list[int]) -> None:
    def work(group: object, rank: int) -> Crossover:
        return measure(group, kind, bits, NUMEL, torch.bfloat16, torch.device("cpu"))  # type: ignore[arg-type]  # torch calls it ProcessGroup

    one, two = run_threads(2, work)
    assert one == two
    elements = NUMEL // 2 if kind in ("experts", "sequence") else NUMEL
    assert one.sent == sum(elements * way // 8 + elements // 64 * 2 for way in bits)
    assert one.sent + one.saved == len(bits) * elements * 2
    assert 0 < one.coding < one.compressed
    assert one.plain > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("numel", "rounded"), [(2, 3), (200, 198), (10_000, 3 * 3 * WIDTH)])
def test_all_ranks_get_equal_numbers_of_tokens(kind: Kind, numel: int, rounded: int) -> None:
    def work(group: object, rank: int) -> int:
        return measure(group, kind, [8], numel, torch.float32, torch.device("cpu")).numel  # type: ignore[arg-type]  # torch calls it ProcessGroup

    assert run_threads(3, work) == [rounded] * 3


def crossover(plain: float, compressed: float, coding: float) -> Crossover:
    return Crossover("tensor", [8], 10**6, plain, compressed, coding, sent=1e6, saved=1e6)


def test_the_rate_is_that_at_which_encoding_takes_what_fewer_bytes_save() -> None:
    found = crossover(plain=0.02, compressed=0.014, coding=0.004)
    assert found.rate == pytest.approx(250e6)
    # A link of this rate sends a megabyte in 4 ms.
    assert found.coding + found.sent / found.rate == pytest.approx((found.sent + found.saved) / found.rate)


def test_a_message_that_does_not_shrink_pays_at_no_rate() -> None:
    assert replace(crossover(plain=0.02, compressed=0.03, coding=0.004), saved=-32.0).rate == 0.0


@pytest.mark.parametrize(
    ("compressed", "verdict"),
    [(0.014, "20; it"), (0.03, "20, so bits of activations.tensor cost time on this link; it")],
)
def test_the_text_names_the_key_if_it_costs_time(compressed: float, verdict: str) -> None:
    found = crossover(0.02, compressed, 0.004)
    assert found.pays == ("cost" not in verdict)
    assert str(found) == (
        "a sum of tensor parallelism of 1,000,000 elements in 8 bits sends 1.000 MB, uncompressed 2.000 MB, and takes "
        f"{1e3 * compressed:g} ms, uncompressed {verdict} saves time below about 2 Gbit/s per rank"
    )


def test_the_text_names_the_bits_of_each_way() -> None:
    found = replace(crossover(0.02, 0.01, 0.004), kind="experts", bits=[4, 8])
    assert str(found).startswith("an exchange of tokens of 1,000,000 elements in 4 and 8 bits sends")


def events(rank: int) -> list[list[str]]:
    """Return the kinds of events at the start if bits cost time, if they save time, and without bits.

    The engine measures on its own group. The time of the compressed message is replaced, because it depends on the load
    of this machine.
    """
    found = []
    for activations, compressed in (({"bits": 8}, 0.03), ({"bits": 8}, 0.01), ({}, 0.03)):

        def timed(*args: Any, compressed: float = compressed) -> Crossover:
            return replace(measure(*args), plain=0.02, compressed=compressed)

        with patch.object(module, "measure", timed):
            engine = start(Job({"tensor": activations}, extra={SECTION: {}}))
        found.append([event.kind for event in engine.compression.events])
    return found


@OF_ENGINES
def test_an_engine_records_that_bits_cost_time_on_its_link() -> None:
    assert run_forks(2, events, shared_memory=True) == [[["crossover_tensor"], [], []]] * 2


AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def exchanges(rank: int) -> list[Any]:
    """Return, for each engine with experts, which exchange it has measured on which ranks, and the kinds of events."""
    found = []
    for begin, experts, extra in (
        (expert_layers.start, {"dispatch": {"bits": 4}, "combine": {}}, AUTOCAST),
        (expert_layers.start_mixtral, {"combine": {}}, {}),
    ):
        measured: list[Any] = []

        def timed(*given: Any, measured: list[Any] = measured) -> Crossover:
            group, kind, bits, _, dtype, _ = given
            measured.append((dist.get_process_group_ranks(group), kind, bits, str(dtype)))
            return replace(measure(*given), plain=0.02, compressed=0.03)

        with patch.object(module, "measure", timed):
            engine = begin(expert_layers.Job({"experts": experts}, extra=extra))
        found.append((*measured, [event.kind for event in engine.compression.events]))
        engine.destroy()
    return found


@OF_ENGINES
def test_exchanges_with_experts_are_measured_in_each_group() -> None:
    for rank, (of_deepspeed, auto_ep) in enumerate(run_forks(4, exchanges)):
        group = [0, 1] if rank < 2 else [2, 3]
        assert of_deepspeed == ((group, "experts", [4, 8], "torch.bfloat16"), ["crossover_experts"])
        assert auto_ep == ((group, "experts", [8], "torch.float32"), ["crossover_experts"])
