"""Compressed activations under Megatron-core: messages between pipeline stages, and tokens for experts."""

from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from tests.support.forks import run_forks
from tests.support.megatron import SEQUENCE, Gpt, Options, start

TEXT = torch.arange(2000).mul(37).remainder(61)
WIDTH, MICRO_BATCHES, SAMPLES = 32, 2, 2
NUMEL = SEQUENCE * SAMPLES * WIDTH
"""Elements of an activation."""
STAGES: Mapping[int, Any] = {bits: {"pipeline": {"bits": bits}} for bits in (8, 4)}


class Run:
    """GPTModel that is trained by Megatron alone, or with `activations` compressed."""

    def __init__(self, activations: Mapping[str, Any] | None, **layout: Any) -> None:
        self.model = Gpt(Options(optimizer={"lr": 3e-3}), TEXT, MICRO_BATCHES, **layout)
        self.figures: list[Any] = []
        self.attached: Any = None
        if activations is not None:
            self.attached = attach(self.model, activations)
            self.attached.session.subscribe(self.figures.append)

    def losses(self, steps: int = 3) -> list[float]:
        return [self.model.step(step) for step in range(steps)]

    def logits(self) -> Tensor:
        """Return what the model computes with the rows of its head that this rank has."""
        [chunk] = self.model.chunks
        output: Tensor = chunk(TEXT[: 2 * SEQUENCE].view(2, SEQUENCE), self.model.positions, self.model.mask)
        return output


def attach(model: Gpt, activations: Mapping[str, Any]) -> Any:
    section = {"gradients": {"method": "none"}, "activations": activations, "monitor": {"announce": False}}
    return deepspeed_compress.megatron.attach(model.chunks, model.optimizer, {SECTION: section})


def equal(one: Gpt, two: Gpt) -> bool:
    weights = one.weights(), two.weights()
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def train_stages(rank: int, layouts: list[Mapping[str, Any]], virtual: int | None) -> list[dict[str, Any]]:
    """Train stages, by Megatron alone and compressed, in each layout; return losses, bytes, and equality."""
    start(pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=virtual)
    found = []
    for layout in layouts:
        alone = Run(None, **layout)
        plain = alone.losses()
        runs = [Run(STAGES[bits], **layout) for bits in STAGES]
        losses = [run.losses() for run in runs]
        # Megatron's class is replaced by the runs together, so the last one leaves first.
        for run in reversed(runs):
            run.attached.detach()
        later = Run(None, **layout)
        last = [(one.bytes_pipeline, one.bytes_pipeline_saved) for run in runs for one in run.figures[-1:]]
        found.append({"alone": plain, "again": later.losses(), "losses": losses, "bytes": last})
    return found


BATCHED: Mapping[str, Any] = {"batch_p2p_comm": True}
SINGLE: Mapping[str, Any] = {"batch_p2p_comm": False}
INTERLEAVED: Mapping[str, Any] = {
    "virtual_pipeline_model_parallel_size": 2,
    "num_layers": 4,
    "overlap_p2p_comm": True,
    **SINGLE,
}


@pytest.mark.parametrize(
    "layouts",
    [
        pytest.param([BATCHED, SINGLE], id="plain"),
        pytest.param([INTERLEAVED], id="interleaved", marks=pytest.mark.slow),
    ],
)
def test_messages_between_stages_are_compressed(layouts: list[Mapping[str, Any]]) -> None:
    virtual = layouts[0].get("virtual_pipeline_model_parallel_size")
    first, last = run_forks(2, train_stages, layouts, virtual)
    for one in last:
        assert one["again"] == one["alone"]
        eight, four = one["losses"]
        assert eight == pytest.approx(one["alone"], rel=5e-3)
        assert four == pytest.approx(one["alone"], rel=5e-2)
        assert eight != one["alone"] != four
    sent = [MICRO_BATCHES * (NUMEL * bits // 8 + NUMEL // 64 * 2) for bits in STAGES]
    if virtual is None:
        expected = [(size, MICRO_BATCHES * 4 * NUMEL - size) for size in sent]
        assert [one["bytes"] for one in first] == [expected] * 2


def evaluate(rank: int) -> list[list[float]]:
    """Return the losses of evaluations, by Megatron alone and with compressed messages."""
    start(pipeline_model_parallel_size=2)
    from megatron.core.pipeline_parallel import get_forward_backward_func

    found = []
    for run in (Run(None), Run(STAGES[8])):
        model = run.model
        with torch.no_grad():
            losses = get_forward_backward_func()(
                forward_step_func=model._forward,
                data_iterator=model._batches(0),
                model=model.chunks[0],
                num_microbatches=MICRO_BATCHES,
                seq_length=SEQUENCE,
                micro_batch_size=SAMPLES,
                forward_only=True,
            )
        found.append([float(loss["loss"]) for loss in losses])
    with pytest.raises(UnsupportedError, match="activations/pipeline has no effect: no message"):
        run.model.optimizer.step()
    return found


def test_an_evaluation_of_stages_is_exact() -> None:
    _, (alone, ours) = run_forks(2, evaluate)
    assert alone == ours != []


EXPERTS: Mapping[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
}


def train_experts(rank: int) -> dict[str, Any]:
    """Train with experts on both ranks; return losses, figures of the last step, and what else must be True."""
    start(expert_model_parallel_size=2)
    alone = Run(None, **EXPERTS)
    with torch.no_grad():
        before = alone.logits()
    runs = {name: Run({"experts": legs}, **EXPERTS) for name, legs in LEGS.items()}
    checks = {}
    with torch.no_grad():
        checks["evaluations are exact"] = all(torch.equal(run.logits(), before) for run in runs.values())
    checks["training is not exact"] = all(not torch.equal(run.logits(), before) for run in runs.values())
    losses = {"alone": alone.losses(), **{name: run.losses() for name, run in runs.items()}}
    again = Run({"experts": LEGS["8"]}, recompute_granularity="selective", recompute_modules=["moe"], **EXPERTS)
    checks["recomputation changes nothing"] = again.losses() == losses["8"] and equal(again.model, runs["8"].model)
    figures = {name: run.figures[-1] for name, run in runs.items() if rank == 0}
    for run in (again, *runs.values()):
        run.attached.detach()
    checks["training is Megatron's"] = Run(None, **EXPERTS).losses() == losses["alone"]
    return {
        "losses": losses,
        "bytes": {name: figure.bytes_experts for name, figure in figures.items()},
        "checks": checks,
    }


LEGS: Mapping[str, Any] = {
    "8": {"dispatch": {}, "combine": {}},
    "4": {"dispatch": {"bits": 4}, "combine": {"bits": 4}},
    "dispatch": {"dispatch": {}},
    "combine": {"combine": {}},
}


def test_exchanges_of_experts_are_compressed() -> None:
    found = run_forks(2, train_experts)
    for one in found:
        assert all(one["checks"].values()), one["checks"]
        losses = one["losses"]
        for name in LEGS:
            assert losses[name] == pytest.approx(losses["alone"], rel=5e-2 if name == "4" else 5e-3)
            assert losses[name] != losses["alone"]
    sent = found[0]["bytes"]
    assert 0.5 < sent["4"] / sent["8"] < 0.6
    assert 0.4 < sent["dispatch"] / sent["8"] < 0.6
    assert 0.4 < sent["combine"] / sent["8"] < 0.6


def hooks_of(model: Gpt) -> int:
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)


def leave(rank: int) -> dict[str, bool]:
    """Detach, and fail to attach; return what must be True."""
    start(expert_model_parallel_size=2)
    from megatron.core.pipeline_parallel import p2p_communication

    from deepspeed_compress.backends.megatron.activations import find_changed_seams

    activations = {"experts": LEGS["8"]}
    alone, run = Run(None, **EXPERTS), Run(activations, **EXPERTS)
    hooks = hooks_of(alone.model)
    checks = {"the model has hooks": hooks_of(run.model) > hooks}
    run.attached.detach()
    with (
        patch("deepspeed_compress.backends.megatron.attach.measure_activations", side_effect=RuntimeError),
        pytest.raises(RuntimeError),
    ):
        attach(run.model, activations)
    with patch.object(p2p_communication, "_p2p_ops", print):
        checks["other arguments are seen"] = list(find_changed_seams()) == ["p2p_communication._p2p_ops"]
    checks["no hook is left"] = hooks_of(run.model) == hooks
    checks["training is Megatron's"] = run.losses() == alone.losses() and equal(run.model, alone.model)
    attach(run.model, activations)
    return checks


def test_leaving_restores_the_layers() -> None:
    for checks in run_forks(2, leave):
        assert all(checks.values()), checks


def refused_dispatcher(rank: int) -> str:
    start(expert_model_parallel_size=2)
    run = Run(None, **{**EXPERTS, "moe_token_dispatcher_type": "allgather"})
    with pytest.raises(UnsupportedError) as caught:
        attach(run.model, {"experts": {"dispatch": {}}})
    return str(caught.value)


def test_another_dispatcher_is_refused_by_name() -> None:
    for message in run_forks(2, refused_dispatcher):
        assert "experts: MoEAllGatherTokenDispatcher exchanges tokens by other means" in message


REFUSED: Mapping[str, tuple[Mapping[str, Any], str]] = {
    "no experts": ({"experts": {"dispatch": {}}}, "/deepspeed_compress/activations/experts has no effect, because no"),
    "sequence": ({"sequence": {}}, "/deepspeed_compress/activations/sequence works only with DeepSpeed"),
    "tensor": ({"tensor": {"bits": 8}}, "/deepspeed_compress/activations/tensor works only with DeepSpeed"),
    "one stage": ({"pipeline": {}}, "/deepspeed_compress/activations/pipeline has no effect, because there is one"),
}


def refused(rank: int, activations: list[Mapping[str, Any]], sizes: Mapping[str, int], options: Any) -> list[str]:
    """Return the messages for `activations`, of a model whose configuration has `options` on top."""
    start(**sizes)
    found = []
    for activation in activations:
        run = Run(None)
        vars(run.model.chunks[0].config).update(options)
        with pytest.raises(UnsupportedError) as caught:
            attach(run.model, activation)
        found.append(str(caught.value))
    return found


def test_what_has_no_effect_is_refused_by_name() -> None:
    [found] = run_forks(1, refused, [given for given, _ in REFUSED.values()], {}, {})
    for (_, expected), message in zip(REFUSED.values(), found, strict=True):
        assert expected in message
