"""Weights that are not numbers, or not trained, travel exactly, whatever `weights` says about the trained ones."""

from collections.abc import Mapping
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from torch import Tensor, nn

from tests.support.forks import run_forks
from tests.support.jobs import WIDTH, Job, data, make_engine, train_on, warned

AGAIN = {"stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}
ONE_BY_ONE = {"stage3_allgather_sequential": True}
EIGHT, FOUR = {"bits": 8, "block_size": 32}, {"bits": 4, "block_size": 32}


class Codes(nn.Parameter):
    """A subclass that gives its elements another meaning, as those of bitsandbytes do."""


def in_bytes(codes: Tensor) -> nn.Parameter:
    return nn.Parameter(codes, requires_grad=False)


def as_numbers(codes: Tensor) -> nn.Parameter:
    """Return the bits in the dtype of what is trained, as `quant_storage` of bitsandbytes does; some are NaN."""
    return nn.Parameter(codes.view(torch.float32), requires_grad=False)


def described(codes: Tensor) -> nn.Parameter:
    found = as_numbers(codes)
    found.quant_state = SimpleNamespace(shape=codes.shape)
    return found


def as_subclass(codes: Tensor) -> Codes:
    return Codes(codes.view(torch.float32), requires_grad=False)


PACKED = {"bytes": in_bytes, "storage": as_numbers, "described": described, "subclass": as_subclass}
NAMED = ("bytes", "described", "subclass")
"""Packed codes that are known as such, which `frozen` does not round either."""


class Adapted(nn.Module):
    """Layer with packed codes, a frozen matrix, and a trained matrix, which ZeRO 3 gathers in one call."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        codes = torch.randint(0, 256, (31, WIDTH), dtype=torch.uint8)
        codes[0, 3::4] = 255
        self.codes = PACKED[kind](codes)
        self.frozen = nn.Parameter(torch.randn(17, 31) / 5, requires_grad=False)
        self.trained = nn.Parameter(torch.randn(31, WIDTH) / 5)
        self.seen: list[dict[str, Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        codes = self.codes.detach().view(torch.uint8).view(31, WIDTH).float()
        y = torch.tanh(x @ ((codes - 128) / 512 + self.trained).t()) @ self.frozen.t()
        self.note()
        y.register_hook(self.note)
        return 1.0 * y

    def note(self, gradient: Tensor | None = None) -> None:
        self.seen.append({name: bits(parameter) for name, parameter in self.named_parameters()})


def bits(parameter: Tensor) -> Tensor:
    return parameter.detach().view(torch.uint8).flatten().clone()


def changed(rank: int, weights: Mapping[str, Any], zero: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return the parameters whose bits forward or backward of the first step sees changed, by kind of the codes."""
    found = {}
    for kind in PACKED:
        torch.manual_seed(0)
        layer = Adapted(kind)
        given = {name: bits(parameter) for name, parameter in layer.named_parameters()}
        job = Job(3, {"gradients": {"method": "none"}, "weights": weights}, zero=zero)
        engine = make_engine(nn.Sequential(layer, nn.Linear(17, 1)), job.config())
        for x, y in data(rank, job):
            assert torch.isfinite(torch.tensor(train_on(engine, (engine(x) - y).square().mean())))
        found[kind] = {name for one in layer.seen[:2] for name in one if not torch.equal(one[name], given[name])}
        found[kind] |= {name for one in layer.seen for name in ("codes",) if not torch.equal(one[name], given[name])}
        engine.destroy()
    return found


@pytest.mark.parametrize("weights", [EIGHT, FOUR], ids=["8 bits", "4 bits"])
@pytest.mark.parametrize("zero", [{}, AGAIN, ONE_BY_ONE], ids=["kept", "gathered again", "one by one"])
def test_only_trained_weights_are_rounded(weights: Mapping[str, Any], zero: Mapping[str, Any]) -> None:
    assert run_forks(2, changed, weights, zero) == [{kind: {"trained"} for kind in PACKED}] * 2


def test_frozen_numbers_are_rounded_if_they_are_named() -> None:
    for found in run_forks(2, changed, {**EIGHT, "frozen": True}, {}):
        assert {kind: found[kind] for kind in NAMED} == {kind: {"trained", "frozen"} for kind in NAMED}


def bytes_of_weights(rank: int, *weights: Mapping[str, Any]) -> list[int]:
    """Return the bytes of the last step that rank 0 reports, by settings of weights."""
    found: list[int] = []
    for given in weights:
        job = Job(3, {"gradients": {"method": "none"}, "weights": given})
        engine, sent = make_engine(nn.Sequential(Adapted("bytes"), nn.Linear(17, 1)), job.config()), []
        engine.compression.subscribe(lambda figures, sent=sent: sent.append(figures.bytes_weights))
        for x, y in data(rank, job):
            train_on(engine, (engine(x) - y).square().mean())
        found += sent[-1:]
        engine.destroy()
    return found


def test_exact_and_rounded_bytes_are_counted() -> None:
    settings = {"method": "none"}, EIGHT, {**EIGHT, "frozen": True}
    exact, rounded, named = run_forks(2, bytes_of_weights, *settings)[0]
    shares = {"codes": 186, "frozen": 264, "trained": 186, "weight": 9, "bias": 1}
    message = {name: -(-share // 4) * 4 + 4 * -(-share // 32) for name, share in shares.items()}
    trained = sum(message[name] for name in ("trained", "weight", "bias"))
    assert exact == 186 + 4 * sum(share for name, share in shares.items() if name != "codes")
    assert rounded == 186 + 4 * 264 + trained
    assert named == 186 + message["frozen"] + trained


def test_naming_frozen_parameters_that_do_not_exist_is_told() -> None:
    job = Job(3, {"gradients": {"method": "none"}, "weights": {**EIGHT, "frozen": True}})
    for texts in run_forks(2, warned, job):
        assert any("weights/frozen: true has no effect, because none of the 0 frozen" in text for text in texts)


def quantize_by_bitsandbytes(model: nn.Module, storage: torch.dtype) -> Tensor:
    """Replace the first linear layer of `model` by one of 4 bits, and return the bits of its packed codes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    linear = model[0]
    layer = Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.float32, quant_storage=storage)
    given = {"requires_grad": False, "quant_type": "nf4", "quant_storage": storage, "module": layer}
    layer.weight, layer.bias = Params4bit(linear.weight.data.clone(), **given), linear.bias
    model[0] = layer.to("cpu").requires_grad_(False)
    if layer.weight.quant_state is None:
        layer.weight._quantize("cpu")
    return bits(layer.weight)


def train_with_lora(rank: int, storage: torch.dtype, weights: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Return whether the packed codes are exact in all forward passes, and the parameters that were trained."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 1))
    codes = quantize_by_bitsandbytes(model, storage)
    model.is_loaded_in_4bit = True
    model = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0"]), model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    engine = make_engine(model, Job(3, {"gradients": {"bits": 4}, "weights": weights}).config())
    quantized, seen = model[0].base_layer, []
    quantized.register_forward_pre_hook(lambda module, inputs: seen.append(torch.equal(bits(module.weight), codes)))
    for _ in range(3):
        x = torch.randn(8, 64)
        train_on(engine, (engine(x) - x[:, :1]).square().mean())
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        trained = [name for name, one in model.named_parameters() if not torch.equal(bits(one), bits(before[name]))]
    engine.destroy()
    return len(seen) == 3 and all(seen), sorted(trained)


@pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("peft") is None, reason='they are in the extra "dev"'
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("weights", [EIGHT, {**FOUR, "frozen": True}], ids=["8 bits", "4 bits, frozen ones too"])
def test_qlora_keeps_the_codes_of_bitsandbytes(storage: torch.dtype, weights: Mapping[str, Any]) -> None:
    trained = ["0.lora_A.default.weight", "0.lora_B.default.weight"]
    assert run_forks(2, train_with_lora, storage, weights) == [(True, trained)] * 2
