"""The contract of `Compressor`, tested for all compressors."""

import math
from typing import Any, get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress import config
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import QSGD, BlockTopK, Compressor, Linear, RandomK, TopK
from deepspeed_compress.compression.kernels.arguments import ALIGNMENT
from tests.support.codecs import CODECS, SETTINGS, decode, encode, is_random, noise, transmit
from tests.support.properties import properties

SAMPLED = pytest.mark.sampled(6)

SPARSE = (TopK, RandomK, BlockTopK)
LARGEST = torch.finfo(torch.float32).max
TINY = 2.0**-149

# Each codec has its own examples, so the number per codec is small.
examples = settings(properties, max_examples=20)
every_codec = pytest.mark.parametrize("codec", CODECS, ids=repr)


def block_of(codec: Compressor) -> int:
    return int(getattr(codec, "block_size", ALIGNMENT))


def sizes(codec: Compressor) -> st.SearchStrategy[int]:
    block = block_of(codec)
    return st.sampled_from([0, 1, 2, 3, block - 1, block, block + 1, 3 * block + 7]) | st.integers(0, 2 * block)


def tensors(codec: Compressor, values: st.SearchStrategy[float]) -> st.SearchStrategy[Tensor]:
    """Generate vectors of special sizes, filled with a repeated short pattern of `values`."""

    def tile(numel: int, pattern: list[float]) -> Tensor:
        return torch.tensor(pattern).repeat(-(-numel // len(pattern)))[:numel]

    return st.builds(tile, sizes(codec), st.lists(values, min_size=1, max_size=9))


def floats(limit: float) -> st.SearchStrategy[float]:
    return st.floats(-limit, limit, width=32)


def kept(codec: Compressor, numel: int) -> int:
    return codec.kept(numel) if isinstance(codec, SPARSE) else numel


def innermost(codec: Compressor) -> Compressor:
    """Return the compressor that encodes the values."""
    return codec.values if isinstance(codec, SPARSE) else codec


def signs_survive(codec: Compressor, x: Tensor, decoded: Tensor) -> bool:
    """Return True if no sign has changed. `Linear` is excluded, because zero is not one of its levels."""
    return isinstance(innermost(codec), Linear) or bool((decoded.sign() * x.sign() >= 0).all())


def methods_of_config() -> dict[str, Any]:
    """Return the settings of every `method` of the configuration."""
    models = get_args(get_args(config.GradientsConfig)[0])
    named = {name: model for model in models for name in get_args(model.model_fields["method"].annotation)}
    return {name: model(method=name) for name, model in named.items()}


def test_the_suite_covers_all_methods_of_the_configuration() -> None:
    """PowerSGD is a reducer and has no compressor of its own. Method "none" is a cast."""
    assert set(SETTINGS) | {"powersgd"} == set(methods_of_config())


@pytest.mark.parametrize("method", sorted(set(SETTINGS) - {"none"}))
def test_settings_build_the_class_that_the_suite_covers(method: str) -> None:
    assert {type(codec) for codec in SETTINGS[method]} == {type(methods_of_config()[method].compressor())}


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_compress_writes_exactly_the_payload(codec: Compressor, data: st.DataObject) -> None:
    x = data.draw(tensors(codec, floats(100)))
    size = codec.payload_bytes(x.numel())
    assert size % ALIGNMENT == 0
    guarded = [torch.full((size + 8,), fill, dtype=torch.uint8) for fill in (0x00, 0xA5)]
    for buffer in guarded:
        codec.compress(x, buffer[4 : 4 + size], 1)
    assert torch.equal(guarded[0][4:-4], guarded[1][4:-4])
    assert guarded[1][:4].tolist() == guarded[1][-4:].tolist() == [0xA5] * 4


@every_codec
def test_an_empty_tensor_has_an_empty_payload(codec: Compressor) -> None:
    assert codec.payload_bytes(0) == 0
    assert transmit(codec, torch.empty(0)).numel() == 0


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_neither_input_nor_payload_is_modified(codec: Compressor, data: st.DataObject) -> None:
    x = data.draw(tensors(codec, floats(100)))
    before = x.clone()
    payload = encode(codec, x)
    assert torch.equal(x, before)
    sent = payload.clone()
    decode(codec, payload, x.numel())
    assert torch.equal(payload, sent)


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_zeros_stay_zeros(codec: Compressor, data: st.DataObject) -> None:
    numel = data.draw(sizes(codec))
    assert torch.equal(transmit(codec, torch.zeros(numel)), torch.zeros(numel))


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_equal_elements_stay_equal(codec: Compressor, data: st.DataObject) -> None:
    """They are equal to the precision of bf16. Sparsifiers send exactly the number of elements that `kept` returns."""
    # QSGD draws the level of every element. A single element is its own norm.
    numel = data.draw(st.just(1) | (st.nothing() if isinstance(innermost(codec), QSGD) else sizes(codec)))
    value = data.draw(floats(60000).filter(lambda number: abs(number) > 1e-3))
    decoded = transmit(codec, torch.full((numel,), value))
    sent = decoded[decoded != 0]
    assert sent.numel() == kept(codec, numel)
    # Rescaling multiplies by n / k.
    assert getattr(codec, "rescale", False) or ((sent - value).abs() <= 2**-8 * abs(value)).all()


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_signs_and_magnitudes_survive_denormals(codec: Compressor, data: st.DataObject) -> None:
    x = data.draw(tensors(codec, st.integers(-(2**22), 2**22).map(lambda units: units * TINY)))
    decoded = transmit(codec, x)
    assert signs_survive(codec, x, decoded)
    bound = 2 * x.abs().amax() if x.numel() else torch.zeros(())
    assert (decoded.abs() <= bound).all()


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_huge_elements_stay_finite(codec: Compressor, data: st.DataObject) -> None:
    """The largest number of fp32 may become infinite if its scale is rounded up, but never NaN."""
    nearly = LARGEST * (1 - 2**-20)
    huge = st.sampled_from([LARGEST, nearly, -nearly, 0.75 * LARGEST, -0.75 * LARGEST, 1.0, 0.0])
    x = data.draw(tensors(codec, huge))
    decoded = transmit(codec, x)
    assert signs_survive(codec, x, decoded)
    assert not decoded.isnan().any()
    assert LARGEST in x or decoded.isfinite().all()


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_a_non_finite_element_decodes_as_non_finite(codec: Compressor, data: st.DataObject) -> None:
    x = data.draw(tensors(codec, floats(100)).filter(Tensor.numel)).clone()
    places = data.draw(st.lists(st.integers(0, x.numel() - 1), min_size=1, max_size=5))
    for place in places:
        x[place] = data.draw(st.sampled_from([math.nan, math.inf, -math.inf]))
    assert not transmit(codec, x).isfinite().all()


@SAMPLED
@every_codec
@examples
@given(st.data())
def test_the_same_key_gives_the_same_bits(codec: Compressor, data: st.DataObject) -> None:
    x = data.draw(tensors(codec, floats(100)))
    key = data.draw(st.integers(0, 2**64 - 1))
    torch.manual_seed(data.draw(st.integers(0, 9)))
    assert torch.equal(encode(codec, x, key), encode(codec, x.clone(), key))


@every_codec
def test_the_key_matters_only_to_random_methods(codec: Compressor) -> None:
    x = noise(3 * block_of(codec) + 7)
    one, other = (number << 32 | number for number in (1, 2))
    assert torch.equal(encode(codec, x, one), encode(codec, x, other)) != is_random(codec)


@every_codec
@pytest.mark.parametrize("scale", [1.0, 0.25, -1.0, 1 / 3])
def test_decoding_adds_the_scaled_payload_to_the_output(codec: Compressor, scale: float) -> None:
    x, base = noise(3 * block_of(codec) + 7), noise(3 * block_of(codec) + 7, seed=1)
    payload, out = encode(codec, x), base.clone()
    decoded = decode(codec, payload, x.numel())
    for times in (1, 2):
        codec.decompress_add(payload, out, scale)
        expected = base.double() + times * scale * decoded.double()
        assert ((out - expected).abs() <= 2**-21 * (base.abs() + 2 * decoded.abs())).all()
    assert not torch.equal(out, base)


@every_codec
def test_messages_are_added_one_after_the_other(codec: Compressor) -> None:
    numel = 3 * block_of(codec) + 7
    payloads = [encode(codec, noise(numel, seed)) for seed in range(3)]
    together, one_by_one = noise(numel, 9), noise(numel, 9)
    Codec(codec).decode(payloads, (), together, 1 / 3, add=True)
    for payload in payloads:
        codec.decompress_add(payload, one_by_one, 1 / 3)
    assert torch.equal(together, one_by_one)
