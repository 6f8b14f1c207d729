"""States and weights in the memory of hosts: what GPUs save, what a step costs, and which files are understood."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_compress.config import parse_section
from deepspeed_compress.errors import ConfigError
from deepspeed_compress.planner.choices import choices
from deepspeed_compress.planner.files import ds_config
from deepspeed_compress.planner.layout import Layout, Offload
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.search import search
from deepspeed_compress.tools.plan_job import read_setup
from tests.planner.jobs import LLAMA_7B, LLAMA_70B, job, layout

GPT_13B = Model("gpt-13b", "gpt2", 65, 4096, 32, 32, 128, 16384, False, 50257, True, positions=1024)


def test_one_v100_trains_13b_parameters_with_states_on_its_host() -> None:
    """ZeRO-Offload (2101.06840, abstract)."""
    alone = Layout(1, 1, 1, 2, 1, 512, recompute="full")
    found = job("1xV100", "10gbit", GPT_13B, seq=1024).predict(replace(alone, offload="optimizer"))
    assert found.memory.verdict(34.1e9) != "does not fit"
    assert found.memory.states == pytest.approx(2 * GPT_13B.parameters)


@pytest.mark.parametrize(("offload", "of_gpu", "of_host"), [("none", 16, 0), ("optimizer", 2, 16), ("all", 0, 18)])
def test_gpus_keep_what_hosts_do_not(offload: Offload, of_gpu: int, of_host: int) -> None:
    """Weights and gradients have 2 bytes, moments and master weights 12, and gradients on a host 4."""
    found = job().predict(layout(zero=3, offload=offload))
    assert found.memory.states == pytest.approx(of_gpu * LLAMA_7B.parameters / 64)
    assert found.memory.host == pytest.approx(of_host * LLAMA_7B.parameters / 64)
    names = {term.name for term in found.terms}
    assert ("optimizer on the host" in names) == (offload != "none")
    assert ("weights from the host" in names) == (offload == "all")


def test_hosts_are_used_only_if_nothing_else_fits() -> None:
    small, large = search(job("8xA100", "10gbit", LLAMA_7B)), search(job("8xA100", "10gbit", LLAMA_70B))
    assert {one.layout.offload for one in small.fitting} == {"none"}
    assert {one.layout.offload for one in large.fitting} <= {"optimizer", "all"}
    assert large.candidates
    assert not search(job("1xA100", "10gbit", LLAMA_70B)).candidates


@pytest.mark.parametrize("offload", ["none", "optimizer", "all"])
@pytest.mark.parametrize("bits", [0, 4])
def test_a_written_file_is_read_back(offload: Offload, bits: int, tmp_path: Path) -> None:
    plan = job("16xA100", "10gbit", batch=64)
    written = ds_config(layout(data=16, zero=3, accumulation=4, offload=offload, gradient_bits=bits), plan.cluster)
    parse_section(written)
    (tmp_path / "ds_config.json").write_text(json.dumps(written))
    setup = read_setup(tmp_path / "ds_config.json", 8)
    assert (setup.offload, setup.gradient_bits) == (offload, bits)
    assert {one.candidate.layout.offload for one in choices(plan, search(plan), setup)[:1]} == {offload}


def test_files_on_a_disk_are_refused_by_name(tmp_path: Path) -> None:
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}))
    with pytest.raises(ConfigError, match='"offload_optimizer" to nvme with "offload_param" to none is not predicted'):
        read_setup(file, 8)
