"""The order of nodes on a network of switches."""

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.cluster import Node, hostfile, read_cluster, read_nodes, ring_order
from deepspeed_compress.planner.layout import Layout

CLUSTER = read_cluster("8xA100", "100gbit", per_node=2)
TWO_SWITCHES = "n1 left\nn2 right\n\nn3 left\nn4 right\n"


def crossings(order: Sequence[Node], switch: tuple[str, ...]) -> int:
    """Return how often a ring crosses the link above a switch."""
    below = [node.switches[: len(switch)] == switch for node in order]
    return sum(here != there for here, there in itertools.pairwise([*below, below[0]]))


def nodes(text: str, directory: Path) -> list[Node]:
    file = directory / "nodes"
    file.write_text(text)
    return read_nodes(file, CLUSTER)


def test_a_ring_crosses_the_trunk_of_two_switches_twice(tmp_path: Path) -> None:
    given = nodes(TWO_SWITCHES, tmp_path)
    assert crossings(given, ("left",)) == 4
    assert crossings(ring_order(given), ("left",)) == crossings(ring_order(given), ("right",)) == 2


def test_no_link_of_a_tree_is_crossed_more_than_twice() -> None:
    paths = list(itertools.product("ab", "xyz", "12")) * 2
    given = [Node(f"n{number}", paths[7 * number % len(paths)]) for number in range(len(paths))]
    order = ring_order(given)
    assert sorted(node.name for node in order) == sorted(node.name for node in given)
    assert {crossings(order, path[:depth]) for path in paths for depth in (1, 2, 3)} == {2}


def test_a_hostfile_names_the_ranks_of_each_node(tmp_path: Path) -> None:
    lines = list(hostfile(nodes(TWO_SWITCHES, tmp_path), CLUSTER, Layout(1, 2, 4, 1, 1, 4)))
    assert lines[1::2] == [f"{name} slots=2" for name in ("n1", "n3", "n2", "n4")]
    assert lines[0] == "# ranks 0 to 1: stage 0, replica 0 to stage 0, replica 1"
    assert lines[-2] == "# ranks 6 to 7: stage 1, replica 2 to stage 1, replica 3"


@pytest.mark.parametrize("text", ["", "n1\nn2\nn3\n", "n1\nn1\nn2\nn3\n", "n1 a b\nn2 a\nn3 a\nn4 a\n"])
def test_a_wrong_list_of_nodes_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--nodes"):
        nodes(text, tmp_path)


def test_a_missing_list_of_nodes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_nodes(tmp_path / "nowhere", CLUSTER)
