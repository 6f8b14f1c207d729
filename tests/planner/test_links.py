import pytest

from deepspeed_compress.planner.cluster import NOTHING, Links, read_cluster
from deepspeed_compress.planner.gpus import Constants


def links(gpus: str = "16xA100", network: str = "100gbit/node") -> Links:
    return Links(read_cluster(gpus, network), Constants())


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("100gbit", 12.5e9),
        ("100 Gbit/s", 12.5e9),
        ("2.5gbit", 312.5e6),
        ("800mbit", 1e8),
        ("100gbit/node", 12.5e9),
        ("8x200gbit", 200e9),
        ("200gbit/gpu", 200e9),
    ],
)
def test_a_rate_per_card_is_no_rate_per_node(text: str, rate: float) -> None:
    assert read_cluster("16xA100", text).network == rate


def test_a_node_sends_a_reduced_buffer_once() -> None:
    """All ranks of a node in one group use all cards; groups of one rank per node share them."""
    together = links().gather(1e9, links().group(16, 1))
    assert together.seconds == pytest.approx(1e9 * 15 / 16 / (12.5e9 * Constants().network), rel=0.01)
    apart = links().gather(1e9, links().group(2, 8))
    assert apart.seconds == pytest.approx(1e9 / 2 / (12.5e9 * Constants().network / 8), rel=0.01)
    assert (together.link, apart.link) == ("network", "network")
    assert (8 * together.outside, apart.outside) == pytest.approx((1e9 * 15 / 16, 1e9 / 2))


def test_an_exchange_sends_each_ranks_own_part() -> None:
    """Unlike a ring, an all-to-all sends the parts of all ranks of a node over its cards."""
    all_ranks = links().group(16, 1)
    assert links().exchange(1e9, all_ranks).seconds > 4 * links().gather(1e9, all_ranks).seconds


def test_gloo_reduces_everything_to_everyone_by_rings() -> None:
    cores, gpus = links("64xCPU"), links("64xA100")
    group = cores.group(64, 1)
    assert cores.scatter(1e9, group) == cores.reduce(1e9, group) == cores.gather(1e9, group).times(2)
    assert gpus.scatter(1e9, group) == gpus.gather(1e9, group)
    assert gpus.reduce(1e3, group).seconds < 2 * gpus.gather(1e3, group).seconds


def test_one_rank_sends_nothing() -> None:
    alone = links().group(1, 8)
    assert links().gather(1e9, alone) == links().exchange(1e9, alone) == NOTHING
    assert links().reduce(1e9, alone).seconds == 0.0


def test_stages_that_share_a_node_leave_its_cards_to_the_last() -> None:
    alone, whole = (links().send(1e9, together) for together in (2, 8))
    assert 8 * alone.outside == 2 * whole.outside == 2e9
    assert alone.inside == 0.75e9
    assert 4 * alone.seconds == pytest.approx(whole.seconds, rel=1e-3)


def test_rings_of_many_ranks_wait_for_hops_and_trees_for_few() -> None:
    large = links("10240xA100", "8x200gbit")
    group = large.group(10240, 1)
    assert large.gather(1e6, group).seconds > 0.02
    assert large.reduce(1e6, group).seconds < 0.1 * large.gather(1e6, group).seconds


def test_inside_a_node_the_network_is_not_used() -> None:
    message = links("8xA100").reduce(1e9, links().group(8, 1))
    assert message.link == "NVLink"
    assert message.seconds == pytest.approx(2 * 7 / 8 * 1e9 / (300e9 * Constants().link), rel=0.02)
