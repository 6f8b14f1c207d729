"""What `plan cluster` finds by itself: GPUs of a launcher, a hostfile or Slurm, and network cards."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.gpus import Gpu
from deepspeed_compress.tools import plan_job
from deepspeed_compress.tools.plan_job import find_machine, find_network

LAUNCHED = {"RANK": "3", "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"}


def sizes(machine: tuple[Gpu, int, int]) -> tuple[str, int, int]:
    gpu, count, per_node = machine
    return gpu.name, count, per_node


@pytest.fixture
def with_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    here = SimpleNamespace(
        is_available=lambda: True, get_device_name=lambda _: "NVIDIA A100-SXM4-80GB", device_count=lambda: 4
    )
    monkeypatch.setattr(torch, "cuda", here)


@pytest.mark.usefixtures("with_gpus")
@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, ("A100-80", 4, 4)),
        (LAUNCHED, ("A100-80", 32, 8)),
        ({"RANK": "0", "WORLD_SIZE": "8", "LOCAL_SIZE": "4"}, ("A100-80", 8, 4)),
        ({"SLURM_JOB_NUM_NODES": "16"}, ("A100-80", 64, 4)),
    ],
)
def test_gpus_are_those_of_a_launcher_or_slurm_or_this_machine(
    environment: dict[str, str], expected: tuple[str, int, int]
) -> None:
    assert sizes(find_machine(None, environment)) == expected


@pytest.mark.usefixtures("with_gpus")
def test_a_hostfile_names_the_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "hostfile"
    file.write_text("# two nodes\nnode1 slots=8\nnode2 slots=8  # rack 2\n")
    assert sizes(find_machine(file, {})) == ("A100-80", 16, 8)
    monkeypatch.setattr(plan_job, "HOSTFILE", file)
    assert sizes(find_machine(None, {})) == ("A100-80", 16, 8)
    for text, problem in (("node1 slots=8\nnode2 slots=4\n", "different numbers"), ("node1\n", "has no line")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=problem):
            find_machine(file, {})
    with pytest.raises(ConfigError, match="cannot be read"):
        find_machine(tmp_path / "nothing", {})


def test_without_gpus_ranks_compute_on_cpus() -> None:
    assert sizes(find_machine(None, LAUNCHED)) == ("CPU", 32, 8)
    with pytest.raises(ConfigError, match="there is no GPU here"):
        find_machine(None, {})


def card(cards: Path, name: str, text: str) -> None:
    (cards / name).parent.mkdir(parents=True)
    (cards / name).write_text(text)


def test_the_rate_is_that_of_all_infiniband_ports_or_of_the_fastest_ethernet_card(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no card of this machine says its rate"):
        find_network(tmp_path)
    card(tmp_path, "net/lo/speed", "")
    card(tmp_path, "net/veth0/speed", "-1\n")
    with pytest.raises(ConfigError, match="no card of this machine says its rate"):
        find_network(tmp_path)
    card(tmp_path, "net/eth0/speed", "1000\n")
    card(tmp_path, "net/eth1/speed", "25000\n")
    assert find_network(tmp_path) == 25e9 / 8
    card(tmp_path, "infiniband/mlx5_0/ports/1/rate", "200 Gb/sec (4X HDR)\n")
    card(tmp_path, "infiniband/mlx5_1/ports/1/rate", "200 Gb/sec (4X HDR)\n")
    assert find_network(tmp_path) == 400e9 / 8
