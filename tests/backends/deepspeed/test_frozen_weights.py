"""Weights that are not numbers, or not trained, travel exactly, whatever `weights` says about the trained ones."""

from collections.abc import Mapping, Sequence
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
        # Where fp16 is supported, DeepSpeed refuses models whose first parameter is no number.
        self.frozen = nn.Parameter(torch.randn(17, 31) / 5, requires_grad=False)
        self.trained = nn.Parameter(torch.randn(31, WIDTH) / 5)
        self.codes = PACKED[kind](codes)
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


def of_bitsandbytes(linear: nn.Linear, storage: torch.dtype) -> nn.Module:
    """Return a layer of 4 bits in place of `linear`. `storage` is the dtype that holds two or more codes."""
    from bitsandbytes.nn import Linear4bit, Params4bit

    layer = Linear4bit(linear.in_features, linear.out_features, compute_dtype=torch.float32, quant_storage=storage)
    given = {"requires_grad": False, "quant_type": "nf4", "quant_storage": storage, "module": layer}
    layer.weight, layer.bias = Params4bit(linear.weight.data.clone(), **given), linear.bias
    layer = layer.to("cpu").requires_grad_(False)
    if layer.weight.quant_state is None:
        layer.weight._quantize("cpu")
    return layer


class OfGptq(nn.Module):
    """Layer with eight codes of 4 bits in an int32, and scales in fp16, as GPTQ and AWQ have them."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        codes = torch.randint(-(2**31), 2**31, (linear.out_features, linear.in_features // 8), dtype=torch.int32)
        self.weight = nn.Parameter(codes, requires_grad=False)
        self.scales = nn.Parameter(torch.rand(linear.out_features, 1).half() / 8, requires_grad=False)

    def dequantized(self) -> Tensor:
        codes = (self.weight.unsqueeze(-1) >> torch.arange(0, 32, 4)) & 15
        return (codes.flatten(1) - 8).float() * self.scales.float()

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.dequantized().t()


class BesideGptq(nn.Module):
    """The same with a matrix of low rank, for which PEFT asks for the library that made the codes."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.base_layer = OfGptq(linear)
        self.down, self.up = nn.Linear(linear.in_features, 4), nn.Linear(4, linear.out_features)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.up(self.down(x))


def dequantized(layer: nn.Module) -> Tensor:
    if isinstance(layer, OfGptq):
        return layer.dequantized()
    from bitsandbytes.functional import dequantize_4bit

    return dequantize_4bit(layer.weight.data, layer.weight.quant_state)


def adapted_model(storage: torch.dtype | None) -> nn.Module:
    """Return a model whose second layer has 4 bits and an adapter: of bitsandbytes in `storage`, or of GPTQ."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128), nn.Linear(128, 1)).requires_grad_(False)
    if storage is None:
        model[1] = BesideGptq(model[1])
        return model
    from peft import LoraConfig, inject_adapter_in_model

    model[1] = of_bitsandbytes(model[1], storage)
    model.is_loaded_in_4bit = True
    return inject_adapter_in_model(LoraConfig(r=4, target_modules=["1"]), model)


def train_with_adapter(
    rank: int, storage: torch.dtype | None, settings: Sequence[Mapping[str, Any]]
) -> list[tuple[bool, list[str]]]:
    """Return by setting whether the base is exact in ten steps and after them, and the layers that were trained."""
    found = []
    for weights in settings:
        model = adapted_model(storage)
        given, seen = dequantized(model[1].base_layer), []
        before = {name: bits(parameter) for name, parameter in model.named_parameters()}
        engine = make_engine(model, Job(3, {"gradients": {"bits": 4}, "weights": weights}).config())
        base = model[1].base_layer
        base.register_forward_pre_hook(lambda layer, _, seen=seen: seen.append(dequantized(layer)))
        for _ in range(10):
            x = torch.randn(8, 64)
            train_on(engine, (engine(x) - x[:, :1]).square().mean())
        with deepspeed.zero.GatheredParameters(list(model.parameters())):
            seen.append(dequantized(base))
            trained = {name.split(".")[1] for name, one in model.named_parameters() if not same(one, before[name])}
        engine.destroy()
        found.append((len(seen) == 11 and all(torch.equal(one, given) for one in seen), sorted(trained)))
    return found


def same(parameter: Tensor, given: Tensor) -> bool:
    return torch.equal(bits(parameter), given)


WEIGHTS = [{"method": "none"}, EIGHT, FOUR, {**EIGHT, "frozen": True}, {**FOUR, "frozen": True}]


@pytest.mark.skipif(
    find_spec("bitsandbytes") is None or find_spec("peft") is None, reason='they are in the extra "dev"'
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32])
def test_qlora_keeps_the_base_of_bitsandbytes(storage: torch.dtype) -> None:
    assert run_forks(2, train_with_adapter, storage, WEIGHTS) == [[(True, ["lora_A", "lora_B"])] * len(WEIGHTS)] * 2


def test_integers_of_gptq_and_their_scales_stay() -> None:
    assert run_forks(2, train_with_adapter, None, WEIGHTS) == [[(True, ["down", "up"])] * len(WEIGHTS)] * 2
