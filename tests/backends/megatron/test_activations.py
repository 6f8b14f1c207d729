"""Compressed activations under Megatron-core: sums of tensor parallelism, and messages between pipeline stages."""

import weakref
from collections.abc import Mapping
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.backends.activations.hooks import CompiledCalls, TrainingPass
from deepspeed_compress.backends.activations.messages import gradient_codec
from deepspeed_compress.backends.activations.sums import compressed_sum
from deepspeed_compress.collectives.reducer import Run as ReducerRun
from deepspeed_compress.collectives.reducer import StepClock
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.monitor import Meter, ring_all_reduce
from tests.support.forks import run_forks
from tests.support.megatron import SEQUENCE, Gpt, Options, start

TEXT = torch.arange(2000).mul(37).remainder(61)
WIDTH, LAYERS, MICRO_BATCHES, SAMPLES = 32, 2, 2, 2
NUMEL = SEQUENCE * SAMPLES * WIDTH
"""Elements of an activation."""
TENSOR: Mapping[int, Any] = {bits: {"tensor": {"bits": bits}} for bits in (8, 4)}
MIXED: Mapping[str, Any] = {"tensor": {"bits": 4, "backward_bits": 8}}
STAGES: Mapping[int, Any] = {bits: {"pipeline": {"bits": bits}} for bits in (8, 4)}
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


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


def same_on_all(values: list[Tensor]) -> bool:
    flat = torch.cat([value.detach().flatten() for value in values])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
    dist.all_gather(every, flat)
    return all(torch.equal(every[0], one) for one in every)


def copies(model: Gpt) -> list[Tensor]:
    """Return the parameters of which each tensor-parallel rank has a copy."""
    every = model.chunks[0].parameters()
    return [one for one in every if not getattr(one, "tensor_model_parallel", False)]


def equal(one: Gpt, two: Gpt) -> bool:
    weights = one.weights(), two.weights()
    return all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def hooks_of(model: Gpt) -> int:
    modules = [module for chunk in model.chunks for module in chunk.modules()]
    return sum(len(one._forward_hooks) + len(one._forward_pre_hooks) for one in modules)


def train_compared(**layout: Any) -> tuple[dict[str, Any], list[Run]]:
    """Train with shared layers, by Megatron alone and compressed.

    Return losses, bytes, and what else must be True, and the compressed runs.
    """
    alone = Run(None, **layout)
    with torch.no_grad():
        before = alone.logits()
    runs = {"8": Run(TENSOR[8], **layout), "4": Run(TENSOR[4], **layout), "4, 8": Run(MIXED, **layout)}
    checks = {}
    with torch.no_grad():
        checks["evaluations are exact"] = all(torch.equal(run.logits(), before) for run in runs.values())
    checks["training is not exact"] = not torch.equal(runs["8"].logits(), before)
    losses = {"alone": alone.losses(), **{bits: run.losses() for bits, run in runs.items()}}
    checks["copies are equal"] = all(same_on_all(copies(run.model)) for run in runs.values())
    again = Run(TENSOR[8], **RECOMPUTED, **layout)
    checks["recomputation changes nothing"] = again.losses() == losses["8"] and equal(again.model, runs["8"].model)
    last = [(one.bytes_tensor, one.bytes_tensor_saved) for run in runs.values() for one in run.figures[-1:]]
    return {"losses": losses, "bytes": last, "checks": checks}, [*runs.values(), again]


def train_layers(rank: int) -> dict[str, Any]:
    start(tensor_model_parallel_size=2)
    return train_compared()[0]


def test_sums_inside_layers_are_compressed() -> None:
    found = run_forks(2, train_layers)
    for one in found:
        assert all(one["checks"].values()), one["checks"]
        assert one["losses"]["8"] == pytest.approx(one["losses"]["alone"], rel=5e-3)
        assert one["losses"]["4"] == pytest.approx(one["losses"]["alone"], rel=5e-2)
        assert one["losses"]["alone"][-1] < one["losses"]["alone"][0]
    assert found[0]["losses"] == found[1]["losses"]
    sums, alone = 4 * LAYERS * MICRO_BATCHES, ring_all_reduce(4 * NUMEL, 2)
    sent = [2 * (NUMEL // 2 * bits // 8 + NUMEL // 2 // 64 * 2) for bits in (8, 4, 6)]
    assert found[0]["bytes"] == [(sums * one, sums * (alone - one)) for one in sent]


def norm_of_parts(kind: type, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> torch.nn.LayerNorm:
    """Return a norm for parts of sequences, which Megatron takes from Apex, in place of its `WrappedTorchNorm`."""
    norm = torch.nn.LayerNorm(hidden_size, eps)
    for parameter in norm.parameters():
        parameter.sequence_parallel = True  # type: ignore[attr-defined]  # read by Megatron, which sums its gradients
    return norm


def train_sequences(rank: int, ranks: int) -> dict[str, Any]:
    """Train with parts of sequences, by Megatron alone and compressed; return losses, bytes, and what must be True."""
    start(tensor_model_parallel_size=ranks)
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    WrappedTorchNorm.__new__ = norm_of_parts  # type: ignore[assignment]  # for the rest of this process
    layout = {"sequence_parallel": True, "num_attention_heads": ranks}
    found, runs = train_compared(**layout)
    checks, again = found["checks"], runs[-1]
    again.model.chunks[0].module.decoder.layers[0].mlp.linear_fc2.weight.data.mul_(1 if rank == 0 else float("nan"))
    checks["a NaN of one rank reaches all"] = bool(again.logits().isnan().all())
    for run in runs:
        run.attached.detach()
    checks["training is Megatron's"] = Run(None, **layout).losses() == found["losses"]["alone"]
    return found


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_parts_of_sequences_are_compressed(ranks: int) -> None:
    found = run_forks(ranks, train_sequences, ranks)
    for one in found:
        assert all(one["checks"].values()), one["checks"]
        assert one["losses"]["8"] == pytest.approx(one["losses"]["alone"], rel=5e-3)
        assert one["losses"]["4"] == pytest.approx(one["losses"]["alone"], rel=5e-2)
        assert one["losses"] == found[0]["losses"]
    # Two gathers and two sums of each layer, in both passes, of a part for each other rank.
    times, part = 8 * LAYERS * MICRO_BATCHES * (ranks - 1), NUMEL // ranks
    sent = [part * bits // 8 + part // 64 * 2 for bits in (8, 4, 6)]
    assert found[0]["bytes"] == [(times * one, times * (4 * part - one)) for one in sent]


def leave(rank: int) -> dict[str, bool]:
    """Detach, and fail to attach; return what must be True."""
    start(tensor_model_parallel_size=2)
    from megatron.core.pipeline_parallel import p2p_communication

    from deepspeed_compress.backends.megatron.activations.attach import find_changed_seams

    alone, run = Run(None), Run(TENSOR[8])
    hooks = hooks_of(alone.model)
    checks = {"layers have hooks": hooks_of(run.model) > hooks}
    run.model.chunks[0].module.decoder.layers[0].mlp.linear_fc2.weight.data.mul_(1 if rank == 0 else float("nan"))
    checks["a NaN of one rank reaches all"] = bool(run.logits().isnan().all())
    run = Run(TENSOR[8])
    run.logits()
    run.attached.detach()
    with (
        patch("deepspeed_compress.backends.megatron.attach.measure_activations", side_effect=RuntimeError),
        pytest.raises(RuntimeError),
    ):
        attach(run.model, TENSOR[8])
    with patch.object(p2p_communication, "_p2p_ops", print):
        checks["other arguments are seen"] = list(find_changed_seams()) == ["p2p_communication._p2p_ops"]
    checks["no hook is left"] = hooks_of(run.model) == hooks
    checks["training is Megatron's"] = run.losses() == alone.losses() and equal(run.model, alone.model)
    attach(run.model, TENSOR[4])
    return checks


def biased(rank: int) -> tuple[Tensor, Tensor]:
    """Return the outputs of a layer that adds its bias itself, by Megatron alone and with a compressed sum."""
    start(tensor_model_parallel_size=2)
    from megatron.core.tensor_parallel import RowParallelLinear

    from deepspeed_compress.backends.megatron.activations.tensor import RowHooks

    options = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
    layer = RowParallelLinear(WIDTH, WIDTH, config=Options().config(), init_method=torch.nn.init.normal_, **options)
    torch.nn.init.constant_(layer.bias, 100.0)
    x = torch.randn(4, WIDTH // 2, generator=torch.Generator().manual_seed(rank))
    alone, _ = layer(x)
    total = compressed_sum(layer.tp_group, gradient_codec(8), ReducerRun(StepClock(), Meter()))
    compiled = CompiledCalls(weakref.ref(layer), "/key", "sums")
    RowHooks(layer, total, TrainingPass(layer), compiled).attach(layer)
    ours, _ = layer(x)
    assert not layer.skip_bias_add
    return alone.detach(), ours.detach()


def test_a_layer_adds_its_bias_once() -> None:
    for alone, ours in run_forks(2, biased):
        assert torch.allclose(ours, alone, atol=0.2)
        assert not torch.equal(ours, alone)


def test_leaving_restores_the_layers() -> None:
    for checks in run_forks(2, leave):
        assert all(checks.values()), checks


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
    "without bits": ({"tensor": {}}, "/deepspeed_compress/activations/tensor: {} has no effect"),
    "merge": ({"tensor": {"bits": 8, "merge": False}}, "/deepspeed_compress/activations/tensor/merge: false"),
    "one rank": ({"tensor": {"bits": 8}}, "/deepspeed_compress/activations/tensor has no effect, because no ranks"),
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
