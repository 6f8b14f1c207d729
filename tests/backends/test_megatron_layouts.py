"""`deepspeed_compress.megatron` with GPTModel in its layouts: pipelines, tensor parallelism, experts."""

import json
import runpy
import sys
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.support.forks import run_forks
from tests.support.megatron import Gpt, Options, on_cpu, start
from tests.support.methods import NONE
from tests.support.two_branches import bits_of, same_on_all

pytestmark = pytest.mark.sampled(10)

FEEDBACK = {"error_feedback": {"dtype": "fp32"}}
FOUR_BITS = {"gradients": {"method": "blockwise", "bits": 4, "block_size": 64, **FEEDBACK}}
BOTH_WAYS = {**FOUR_BITS, "weights": {"method": "blockwise", "bits": 4, "block_size": 64}}
EXPERTS = {"num_moe_experts": 4, "moe_token_dispatcher_type": "allgather", "add_bias_linear": False}
LAYOUTS: dict[str, tuple[Mapping[str, int], Mapping[str, Any]]] = {
    "pipeline": ({"pipeline_model_parallel_size": 2}, {}),
    "interleaved": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"virtual_pipeline_model_parallel_size": 2, "num_layers": 4},
    ),
    "tensor": ({"tensor_model_parallel_size": 2}, {}),
    "tokens": ({}, {"calculate_per_token_loss": True}),
    "experts": ({"expert_model_parallel_size": 2}, EXPERTS),
}
TEXT = Path(__file__).read_bytes()
STEPS = 8


def options_of(distributed: bool, overlap: bool, dtype: torch.dtype = torch.float32) -> Options:
    gather = overlap and distributed
    return Options(
        distributed,
        overlap,
        dtype,
        4000,
        {"overlap_param_gather": gather},
        {"overlap_param_gather": gather, "lr": 3e-3},
    )


def build(given: Mapping[str, Any] | None, options: Options, layout: Mapping[str, Any]) -> tuple[Gpt, Any]:
    model = Gpt(options, torch.tensor(list(TEXT)), **layout)
    if given is None:
        return model, None
    section = {SECTION: {"monitor": {"announce": False}, **given}}
    return model, deepspeed_compress.megatron.attach(model.chunks, model.optimizer, section)


def drifts(model: Gpt) -> list[str]:
    """Return the parameters whose copies are not equal.

    Copies are held by data-parallel ranks, by ranks of an expert, by two stages for embeddings, and by tensor-parallel
    ranks for parameters that are not split.
    """
    from megatron.core import parallel_state

    wrong = []
    for chunk in model.chunks:
        for name, parameter in chunk.module.named_parameters():
            expert = not getattr(parameter, "allreduce", True)
            groups = [chunk.expt_dp_group if expert else chunk.dp_cp_group]
            if not expert and not getattr(parameter, "tensor_model_parallel", False):
                groups.append(chunk.tp_group)
            if getattr(parameter, "shared_embedding", False):
                groups.append(parallel_state.get_embedding_group())
            wrong += [name for group in groups if not same_on_all(parameter.detach(), group)]
    return wrong


def train(rank: int, name: str, distributed: bool, overlap: bool) -> tuple[bool, list[float], list[float], list[str]]:
    """Return whether "none" equals Megatron, the losses of Megatron and of 4 bits, and the copies that differ."""
    sizes, layout = LAYOUTS[name]
    start(**sizes)
    options = options_of(distributed, overlap)
    losses, weights, wrong = [], [], []
    for given in (None, NONE, FOUR_BITS):
        model, _ = build(given, options, layout)
        losses.append([model.step(step) for step in range(STEPS)])
        weights.append(model.weights())
        wrong += drifts(model)
    same = all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])
    return same and losses[0] == losses[1], losses[0], losses[2], wrong


CASES = [(name, distributed, distributed) for name in LAYOUTS for distributed in (True, False)]


@pytest.mark.parametrize(("name", "distributed", "overlap"), CASES)
def test_layouts(name: str, distributed: bool, overlap: bool) -> None:
    for same, alone, ours, wrong in run_forks(4, train, name, distributed, overlap):
        assert same
        assert wrong == []
        assert alone[-1] < alone[0] or not any(alone)
        assert ours == pytest.approx(alone, rel=0.02)
        assert ours != alone or not any(alone)


def both_ways(rank: int, name: str, overlap: bool) -> tuple[list[float], list[float], list[str], list[float]]:
    """Return the bf16 losses of Megatron and with everything compressed, the copies that differ, and the bytes."""
    sizes, layout = LAYOUTS[name]
    start(**sizes)
    losses, wrong, sent = [], [], []
    for given in (NONE, BOTH_WAYS):
        model, attached = build(given, options_of(True, overlap, torch.bfloat16), layout)
        figures: list[Any] = []
        attached.session.subscribe(figures.append)
        losses.append([model.step(step) for step in range(STEPS)])
        model.gathered()
        wrong += drifts(model)
        attached.synchronise()
        wrong += drifts(model)
        sent += [figures[-1].bytes_weights if figures else 0]
    return losses[0], losses[1], wrong, sent


@pytest.mark.parametrize(("name", "overlap"), [("pipeline", True), ("tensor", False), ("experts", True)])
def test_weights_in_layouts(name: str, overlap: bool) -> None:
    found = run_forks(4, both_ways, name, overlap)
    for alone, ours, wrong, _ in found:
        assert wrong == []
        assert ours == pytest.approx(alone, rel=0.03)
        assert ours != alone or not any(alone)
    plain, compressed = found[0][3]
    assert plain > 3 * compressed > 0


def resume(rank: int, name: str, directory: str) -> list[bool]:
    """Return whether the loaded residuals equal the saved ones, of dense parameters and of experts."""
    sizes, layout = LAYOUTS[name]
    start(**sizes)
    found = []
    model, attached = build(FOUR_BITS, options_of(True, True), layout)
    for step in range(2):
        model.step(step)
    attached.save(directory)
    _, other = build(FOUR_BITS, options_of(True, True), layout)
    other.load(directory)
    assert (other.experts is not None) == (name == "experts")
    for part in ("dense", "experts"):
        one, two = getattr(attached, part), getattr(other, part)
        found.append((one is None) == (two is None))
        found.append(one is None or bits_of(one) == bits_of(two) != {})
    return [*found, other.dense.steps.count == 2]


@pytest.mark.parametrize("name", ["experts", "interleaved"])
def test_memories_of_all_ranks_are_saved(tmp_path: Path, name: str) -> None:
    assert run_forks(4, resume, name, str(tmp_path)) == [[True] * 5] * 4


def half(rank: int, directory: str) -> tuple[bool, list[str], list[bool]]:
    """Train experts on the second stage only; return if this rank has some, which copies differ, and what is loaded."""
    start(pipeline_model_parallel_size=2, expert_model_parallel_size=2)
    from megatron.core import parallel_state
    from megatron.core.models.gpt import gpt_layer_specs

    if parallel_state.get_pipeline_model_parallel_rank() == 0:
        dense = partial(gpt_layer_specs.get_gpt_layer_local_spec, num_experts=None)
        gpt_layer_specs.get_gpt_layer_local_spec = lambda **options: dense()
    model, attached = build(FOUR_BITS, options_of(True, True), EXPERTS)
    for step in range(2):
        model.step(step)
    model.gathered()
    wrong = drifts(model)
    attached.save(directory)
    _, other = build(FOUR_BITS, options_of(True, True), EXPERTS)
    other.load(directory)
    pairs = [(getattr(attached, part), getattr(other, part)) for part in ("dense", "experts")]
    same = [bits_of(one) == bits_of(two) != {} for one, two in pairs if one is not None]
    return attached.experts is not None, wrong, same


@pytest.mark.slow
def test_stages_without_experts(tmp_path: Path) -> None:
    found = run_forks(8, half, str(tmp_path))
    assert found == [(False, [], [True])] * 4 + [(True, [], [True, True])] * 4


PROGRAM = Path(__file__).parents[2] / "launch" / "train_megatron.py"
TOY = "--layers 2 --hidden 32 --heads 2 --vocab 300 --seq-len 16 --steps 12 --log-every 1 --lr 3e-3"
WAYS = {
    "distributed": (2, "--distributed-optimizer --overlap --bf16"),
    "pipeline": (4, "--pipeline 2 --micro-batches 2 --distributed-optimizer --overlap"),
    "interleaved": (2, "--pipeline 2 --virtual 2 --layers 4 --micro-batches 2"),
    "tensor": (2, "--tensor 2"),
}


def launch(rank: int, arguments: list[str]) -> None:
    on_cpu()
    warnings.simplefilter("ignore")
    sys.argv = [str(PROGRAM), *arguments]
    runpy.run_path(str(PROGRAM), run_name="__main__")


@pytest.mark.parametrize("name", WAYS)
def test_the_program_trains(name: str, tmp_path: Path) -> None:
    ranks, way = WAYS[name]
    (tmp_path / "text.txt").write_text("the king said nothing, for who would answer him?\n" * 400)
    (tmp_path / "section.json").write_text(json.dumps({SECTION: FOUR_BITS}))
    files = {"config": "section.json", "data": "text.txt", "output-dir": "run"}
    options = [part for key, file in files.items() for part in (f"--{key}", str(tmp_path / file))]
    run_forks(ranks, launch, [*options, *f"{TOY} {way}".split()])
    lines = metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [*range(1, 13), 12]
    assert lines[-1]["eval_loss"] < lines[0]["loss"] < 7


def metrics(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
