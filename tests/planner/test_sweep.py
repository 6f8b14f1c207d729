from deepspeed_compress.planner.layout import Layout
from deepspeed_compress.planner.sweep import BITS, best, over_network
from tests.planner.jobs import LLAMA_1B, job, layout

SMALL = job("16xA100", "10gbit", LLAMA_1B, batch=64)


def names(one: Layout) -> list[str]:
    return [name for name, has in BITS.items() if has(one)]


def test_a_layout_has_the_bits_of_both_directions() -> None:
    assert names(layout()) == ["uncompressed"]
    assert names(layout(gradient_bits=4, weight_bits=4)) == ["4 bits"]
    assert names(layout(gradient_bits=4, shard_within=8)) == ["4 bits"]
    assert names(layout(gradient_bits=3, weight_bits=4)) == ["3 bits, weights 4"]
    assert names(layout(gradient_bits=8)) == []
    assert names(layout(islands=2, sync_every=30)) == ["islands"]


def test_fewer_bits_pay_on_a_slow_network() -> None:
    slow, fast = 1e8, 1e11
    sweep = over_network(SMALL, [slow, fast])
    seconds = {name: {rate: one.prediction.seconds for rate, one in found.items()} for name, found in sweep.items()}
    assert seconds["uncompressed"][slow] > 1.5 * seconds["8 bits"][slow] > 1.5 * seconds["4 bits"][slow]
    assert abs(seconds["4 bits"][fast] / seconds["uncompressed"][fast] - 1) < 0.1


def test_nothing_is_best_if_nothing_is_found() -> None:
    assert best([]) == {}
