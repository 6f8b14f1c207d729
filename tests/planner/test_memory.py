"""Memory beside states: what an optimizer makes for a moment, copies of logits, and what recomputation keeps."""

from dataclasses import replace
from typing import Any

import pytest

from deepspeed_compress.planner.layout import Layout, largest_stage
from deepspeed_compress.planner.predict import FULL, OUTSIDE, Memory
from deepspeed_compress.planner.search import Job
from deepspeed_compress.planner.software import SOFTWARE
from deepspeed_compress.planner.traffic import DataParallel, Traffic
from tests.planner.jobs import LLAMA_7B, TOY, job, layout

OWNED = LLAMA_7B.parameters / 64


def with_program(name: str, **changed: Any) -> Job:
    """Return a job with short sequences, whose activations are smaller than what the optimizer needs."""
    return job(software=replace(SOFTWARE[name], **changed), seq=64)


def of_step(name: str, one: Layout) -> float:
    """Return what the optimizer needs beyond activations and logits, per parameter of a rank."""
    kept, without = (with_program(name, update=update).memory(one) for update in (SOFTWARE[name].update, 0))
    return (kept.buffers - without.buffers + kept.activations + kept.logits) / OWNED


@pytest.mark.parametrize(("name", "needed"), [("deepspeed", 4), ("hf", 12), ("fsdp", 4)])
def test_the_optimizer_makes_gradients_and_denominators(name: str, needed: int) -> None:
    """LLaMA-Factory issue 1221: 7B on eight ranks fails to allocate 3.14 GiB, four bytes for each own element."""
    one = replace(layout(zero=2), micro=1, recompute="full")
    assert of_step(name, one) == pytest.approx(needed)


def test_megatron_updates_in_place() -> None:
    one = replace(layout(zero=1), engine="megatron")
    assert with_program("megatron").memory(one) == with_program("megatron", update=0).memory(one)


def test_states_in_two_bytes_need_no_fp32_gradients() -> None:
    mixed, pure = (with_program("deepspeed", states=states).memory(layout(zero=0)).states for states in (12, 4))
    assert (mixed - pure) / LLAMA_7B.parameters == pytest.approx(8 + FULL)


def test_selective_recomputation_keeps_every_second_product() -> None:
    """torchtitan keeps the input, the result of the attention, and half of what the matrix products write."""
    cuts = ("full", "selective", "none")
    full, half, none = (with_program("fsdp").memory(layout(zero=3, recompute=cut)).activations for cut in cuts)
    products = LLAMA_7B.qkv + 2 * 4096 + 2 * 11008
    # One layer is computed again.
    once = full - 64 * 32 * 2 * 4096
    assert half == pytest.approx(64 * 32 * 2 * (4096 + 4096 + products / 2) + once)
    assert full < half < none


def test_checkpoints_on_the_host_leave_one_layer() -> None:
    one = layout(zero=3, recompute="full")
    kept, moved = (with_program("deepspeed", checkpoints=share).memory(one).activations for share in (1.0, 0.0))
    assert kept - moved == pytest.approx(64 * 32 * 2 * 4096)


def test_logits_are_counted_with_their_copies() -> None:
    one = layout(zero=3, recompute="full")
    found = {name: replace(with_program(name), seq=4096).memory(one) for name in ("deepspeed", "hf", "fsdp")}
    sizes = {name: memory.logits / (4096 * 32000) for name, memory in found.items()}
    assert sizes == pytest.approx({"deepspeed": 10, "hf": 14, "fsdp": 14})


def test_gpt2_of_transformers_has_half_precision_logits_and_many_activations() -> None:
    usual, gelu = (job(model=TOY, software=SOFTWARE[name]) for name in ("deepspeed", "hf"))
    one = layout(zero=3)
    assert gelu.memory(one).logits == pytest.approx(0.8 * usual.memory(one).logits)
    assert gelu.memory(one).activations - usual.memory(one).activations == pytest.approx(4096 * 3 * 2 * 3 * 512)


def test_verdicts_leave_the_margin() -> None:
    memory = Memory(states=30e9, activations=6e9, logits=3e9, buffers=1e9)
    assert memory.total == pytest.approx(40e9 * 1.08 + OUTSIDE)
    sizes = (40e9 * 1.23 + OUTSIDE + 1, memory.total + 1, memory.total - 1)
    assert [memory.verdict(size) for size in sizes] == ["fits", "tight", "does not fit"]


@pytest.mark.parametrize(("hides", "windows"), [(True, {"backward", "all", "nothing"}), (False, {"nothing"})])
def test_early_zero_3_hides_nothing(hides: bool, windows: set[str]) -> None:
    assert {one.window for one in _messages("deepspeed", layout(zero=3), hides=hides)} == windows


@pytest.mark.parametrize(("name", "window"), [("fsdp", "last backward"), ("deepspeed", "nothing")])
def test_hybrid_sharding_of_fsdp_sends_between_nodes_during_backward(name: str, window: str) -> None:
    [between] = [one for one in _messages(name, layout(zero=3, shard_within=8)) if "between nodes" in one.name]
    assert between.window == window


def _messages(name: str, one: Layout, **changed: Any) -> list[Traffic]:
    found = with_program(name, **changed)
    return list(DataParallel(found.links, found.device, found.model, one, largest_stage(found.model, one)).all())
