"""The codec of weight updates is exact, small, and refuses whatever it did not write."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress.rollout.changes import ChangeError, apply, count_changed, encode, encode_lossy
from tests.support.properties import properties

INTEGERS = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}
DTYPES = list(INTEGERS)
SHARES = [0.0, 0.001, 0.02, 0.2, 0.3, 1.0]


def bits(values: Tensor) -> Tensor:
    return values.view(INTEGERS[values.dtype])


def random_bits(numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return random bit patterns, which include NaNs with payloads, infinities and -0.0."""
    generator = torch.Generator().manual_seed(seed)
    limit = torch.iinfo(INTEGERS[dtype])
    return torch.randint(limit.min, limit.max + 1, (numel,), generator=generator).to(INTEGERS[dtype]).view(dtype)


def stepped(old: Tensor, share: float, seed: int = 0) -> Tensor:
    """Return `old` with a random `share` of its values moved to a neighboring number."""
    generator = torch.Generator().manual_seed(seed)
    new = bits(old).clone()
    chosen = torch.rand(old.numel(), generator=generator) < share
    new[chosen] += torch.randint(2, (int(chosen.sum()),), generator=generator).to(new.dtype) * 2 - 1
    return new.view(old.dtype)


def check(old: Tensor, new: Tensor) -> bytes:
    payload, held = encode(old, new), old.clone()
    apply(payload, held)
    assert torch.equal(bits(held), bits(new))
    assert count_changed(payload) == int((bits(old) != bits(new)).sum())
    return payload


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", SHARES)
def test_a_change_is_exact(dtype: torch.dtype, share: float) -> None:
    old = random_bits(10_001, dtype, 1)
    check(old, stepped(old, share))


@given(data=st.data(), dtype=st.sampled_from(DTYPES), numel=st.integers(0, 300))
@properties
def test_any_change_is_exact(data: st.DataObject, dtype: torch.dtype, numel: int) -> None:
    old = random_bits(numel, dtype, data.draw(st.integers(0, 99)))
    new = random_bits(numel, dtype, data.draw(st.integers(100, 199)))
    chosen = data.draw(st.lists(st.booleans(), min_size=numel, max_size=numel))
    mixed = torch.where(torch.tensor(chosen, dtype=torch.bool), bits(new), bits(old)).view(dtype)
    check(old, mixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_are_compared_by_their_bits(dtype: torch.dtype) -> None:
    zeros = torch.zeros(100, dtype=dtype)
    check(zeros, -zeros)
    nan = torch.full((100,), torch.nan, dtype=dtype)
    other = (bits(nan) + 1).view(dtype)
    assert len(check(nan, nan)) < 20
    check(nan, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 1000])
def test_a_full_copy_needs_no_held_values(dtype: torch.dtype, numel: int) -> None:
    new, held = random_bits(numel, dtype, 1), random_bits(numel, dtype, 2)
    payload = encode(None, new)
    apply(payload, held)
    assert torch.equal(bits(held), bits(new))
    assert count_changed(payload) == numel


@pytest.mark.parametrize("position", [0, 7, 999_999])
def test_a_single_value_changes_at_any_place(position: int) -> None:
    old = torch.zeros(1_000_000, dtype=torch.bfloat16)
    new = old.clone()
    new[position] = 1.0
    assert len(check(old, new)) < 60


@pytest.mark.parametrize(("share", "bits_per_value"), [(0.001, 0.015), (0.01, 0.105), (0.03, 0.27), (0.3, 2.2)])
def test_a_change_is_close_to_its_entropy(share: float, bits_per_value: float) -> None:
    """At 1 %, random positions have an entropy of 0.081 bits per value, and their directions 0.010."""
    old = torch.randn(1_000_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert 8 * len(check(old, stepped(old, share))) / 1_000_000 < bits_per_value


def test_a_full_copy_of_weights_is_smaller_than_they_are() -> None:
    weights = 0.02 * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    assert len(encode(None, weights.bfloat16())) < 0.7 * 200_000


def lossy(old: Tensor, new: Tensor, width: int) -> tuple[bytes, Tensor]:
    """Return the payload of a lossy change, and what a receiver holds then, which is what the sender expects."""
    expected, held = new.clone(), old.clone()
    payload = encode_lossy(old, expected, width)
    apply(payload, held)
    assert torch.equal(bits(held), bits(expected))
    return payload, held


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [4, 8])
def test_a_lossy_change_is_short_and_off_by_at_most_half_a_level(dtype: torch.dtype, width: int) -> None:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(10_001, generator=generator).to(dtype)
    new = (old + torch.randn(10_001, generator=generator)).to(dtype)
    payload, held = lossy(old, new, width)
    assert 8 * len(payload) / 10_001 < width + 0.25
    level = (new.float() - old.float()).abs().max() / (2 ** (width - 1) - 1)
    rounding = 2 * torch.finfo(dtype).eps * new.float().abs().max()
    assert (held.float() - new.float()).abs().max() <= level / 2 + rounding


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_repeated_lossy_changes_end_at_the_exact_values(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    held, new = (torch.randn(1000, generator=generator).to(dtype) for _ in range(2))
    for _ in range(30):
        _, held = lossy(held, new, 4)
    assert torch.equal(held, new)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_change_that_is_not_finite_is_exact(value: float) -> None:
    old = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    new = 2 * old
    new[7] = value
    _, held = lossy(old, new, 4)
    assert torch.equal(bits(held), bits(new))
    _, back = lossy(held, old, 4)
    assert torch.equal(back, old)


def test_an_exact_change_that_is_shorter_is_sent() -> None:
    old = torch.randn(10_000, generator=torch.Generator().manual_seed(0)).bfloat16()
    new = stepped(old, 0.01)
    payload, held = lossy(old, new, 4)
    assert payload == encode(old, new)
    assert torch.equal(held, new)
    assert lossy(old[:0], new[:0], 8)[0] == encode(old[:0], new[:0])


PAYLOADS = {
    "blockwise": encode_lossy(torch.zeros(5000), torch.randn(5000, generator=torch.Generator().manual_seed(0)), 4),
    "sparse": encode(torch.zeros(5000), stepped(torch.zeros(5000), 0.05)),
    "dense": encode(torch.zeros(5000), stepped(torch.zeros(5000), 0.5)),
    "whole": encode(None, random_bits(5000, torch.float32, 0)),
}


@pytest.mark.parametrize("layout", PAYLOADS)
def test_every_shorter_payload_is_refused_and_changes_nothing(layout: str) -> None:
    payload, held = PAYLOADS[layout], torch.ones(5000)
    for length in range(0, len(payload), max(1, len(payload) // 97)):
        with pytest.raises(ChangeError):
            apply(payload[:length], held)
    with pytest.raises(ChangeError):
        apply(payload + b"\0", held)
    assert torch.equal(held, torch.ones(5000))


@given(data=st.data(), layout=st.sampled_from(sorted(PAYLOADS)))
@properties
def test_a_damaged_payload_raises_nothing_but_its_error(data: st.DataObject, layout: str) -> None:
    """A digest finds damage. Without one, damage must neither crash nor write outside of the tensor."""
    payload = bytearray(PAYLOADS[layout])
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    held = torch.zeros(5000)
    try:
        apply(bytes(payload), held)
    except ChangeError:
        assert not held.any()


@pytest.mark.parametrize(
    "held", [torch.zeros(4999), torch.zeros(5000, dtype=torch.bfloat16), torch.zeros(0)], ids=["size", "width", "empty"]
)
def test_a_change_of_another_tensor_is_refused(held: Tensor) -> None:
    with pytest.raises(ChangeError, match="the change is for 5000 values of 4 bytes"):
        apply(PAYLOADS["sparse"], held)


def test_a_section_that_would_unpack_to_more_is_refused_before_it_is_unpacked(monkeypatch: Any) -> None:
    whole = encode(None, torch.zeros(1 << 20))
    header = encode(None, torch.zeros(5000))[:14]

    def refuse() -> None:
        raise AssertionError("memory is allocated")

    monkeypatch.setattr("zstandard.ZstdDecompressor", refuse)
    with pytest.raises(ChangeError, match="would have 1048576 bytes instead of 5000"):
        apply(header + whole[14:], torch.zeros(5000))


def test_random_bytes_are_refused() -> None:
    generator = np.random.default_rng(0)
    for length in range(200):
        with pytest.raises(ChangeError):
            apply(generator.bytes(length), torch.zeros(5000))
