"""Residuals stored as coefficients: the algorithm is the same as with elements, and conversions lose nothing."""

import json
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from deepspeed_compress.compression import state
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.compression.feedback import ErrorFeedback, MomentumCorrection
from deepspeed_compress.compression.residuals import STORAGE, Residuals
from deepspeed_compress.compression.segments import Layout, Segment, segments_of
from deepspeed_compress.compression.state_description import Description, Moment, Position, read_description
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform, described, transform_of
from deepspeed_compress.errors import StateError
from tests.support.codecs import encode
from tests.support.properties import properties

CPU = torch.device("cpu")
WIDTHS = {"w": 40, "v": 24, "elsewhere": 8}
LAYOUT: Layout = (("w", 0, 1600), ("v", 24, 480), ("b", 0, 30))
SEGMENTS = segments_of(LAYOUT)
NUMEL = 2110
TILE = 16
DCT_16 = DCT(WIDTHS, TILE)
KEPT = TopK(0.05, TILE**2)
QUANTIZED = TopK(0.05, TILE**2, Blockwise(4, 256))
DECAY = 0.9
BASES: tuple[Transform, ...] = (DCT_16, Hadamard(64, 3))
every_basis = pytest.mark.parametrize("basis", BASES, ids=lambda one: type(one).__name__)
every_storage = pytest.mark.parametrize("storage", STORAGE)
ROUNDING = {"fp32": 1e-6, "bf16": 2**-8, "int8": 2**-7}
"""Relative rounding error of a stored number, by storage format."""


def gradient(step: int, numel: int = NUMEL) -> Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(step))


def demo(storage: str = "fp32", transactional: bool = False) -> ErrorFeedback:
    return ErrorFeedback(Residuals(storage, transactional), DECAY, own_exact=False)


def send(
    feedback: ErrorFeedback | MomentumCorrection, codec: Codec, x: Tensor, segments: tuple[Segment, ...] = SEGMENTS
) -> Tensor:
    """Send `x`, and return the decoded coefficients."""
    payload = torch.empty(codec.compressor.payload_bytes(x.numel()), dtype=torch.uint8)
    feedback.encode(codec.coefficients(x, segments), segments, payload, 7, codec)
    decoded = torch.zeros_like(x)
    codec.add_coefficients([payload], decoded, 1.0)
    return decoded


def elements(store: Residuals, names: Iterable[str] = ("w", "v", "b")) -> dict[tuple[str, int], float]:
    """Return every stored element."""
    return {
        (name, begin + place): value
        for (name, begin, _), values in store.items()
        if name in names
        for place, value in enumerate(values.tolist())
    }


def stored(store: Residuals) -> list[list[int]]:
    return [payload.tolist() for _, payload in store.payloads()]


def momentum_of_elements(steps: int, compressor: Compressor) -> tuple[Tensor, list[Tensor]]:
    """Run DeMo with its momentum as fp64 elements, and return the momentum and all messages."""
    momentum, sent = torch.zeros(NUMEL, dtype=torch.float64), []
    for step in range(steps):
        momentum = DECAY * momentum + gradient(step).double()
        coefficients = DCT_16.forward(momentum.float(), SEGMENTS)
        decoded = torch.zeros(NUMEL)
        compressor.decompress_add(encode(compressor, coefficients, 7), decoded, 1.0)
        sent.append(decoded)
        momentum -= DCT_16.inverse(decoded, SEGMENTS).double()
    return momentum, sent


@pytest.mark.parametrize("compressor", [KEPT, QUANTIZED], ids=["fp32", "int4"])
def test_coefficients_give_the_same_result_as_elements(compressor: Compressor) -> None:
    """In twenty steps, the same elements are chosen, and values and momentum differ only by rounding."""
    feedback, codec = demo(), Codec(compressor, DCT_16)
    momentum, expected = momentum_of_elements(20, compressor)
    for step in range(20):
        sent = send(feedback, codec, gradient(step))
        assert torch.equal(sent != 0, expected[step] != 0)
        torch.testing.assert_close(sent, expected[step], rtol=1e-5, atol=2e-5)
    torch.testing.assert_close(feedback.residuals.read(SEGMENTS, CPU).double(), momentum, rtol=1e-5, atol=2e-5)


def six_steps(compressor: Compressor, storage: str, basis: Transform) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Yield coefficients: of gradient and residual together, of the message, and of the residual that is left."""
    feedback, codec = demo(storage), Codec(compressor, basis)
    for step in range(6):
        x = gradient(step)
        total = basis.forward(x, SEGMENTS) + feedback.residuals.read(SEGMENTS, CPU, basis) * DECAY
        yield total, send(feedback, codec, x), feedback.residuals.read(SEGMENTS, CPU, basis)


@every_basis
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize("compressor", [KEPT, TopK(0.05, 100, min_magnitude=3.0)], ids=["all", "large ones"])
def test_message_and_residual_add_up_and_sent_coefficients_are_cleared(
    compressor: Compressor, storage: str, basis: Transform
) -> None:
    for total, sent, left in six_steps(compressor, storage, basis):
        assert bool((sent != 0).any())
        assert not left[sent != 0].any()
        assert torch.equal(sent + left, total if storage == "fp32" else torch.where(sent != 0, sent, total.bfloat16()))


@every_basis
@every_storage
def test_the_quantization_error_stays_in_the_residual(storage: str, basis: Transform) -> None:
    for total, sent, left in six_steps(QUANTIZED, storage, basis):
        assert bool(left[sent != 0].any())
        assert float((sent + left - total).abs().max()) <= ROUNDING[storage] * float(total.abs().max())


@every_basis
@every_storage
def test_elements_can_be_read_as_coefficients_and_back(storage: str, basis: Transform) -> None:
    """This happens when methods with different bases use the same store in turn."""
    store, values = Residuals(storage, transactional=False), gradient(1)
    bound = 4 * ROUNDING[storage] * float(values.abs().max())
    store.write(SEGMENTS, values)
    assert float((store.read(SEGMENTS, CPU, basis) - basis.forward(values, SEGMENTS)).abs().max()) <= bound
    store.write(SEGMENTS, basis.forward(values, SEGMENTS), basis)
    assert float((store.read(SEGMENTS, CPU) - values).abs().max()) <= bound
    other = DCT({"w": 7}, 8)
    assert float((store.read(SEGMENTS, CPU, other) - other.forward(values, SEGMENTS)).abs().max()) <= bound


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("storage", ["fp32", "bf16", "int8"])
def test_methods_with_different_bases_can_share_a_store(storage: str, transactional: bool) -> None:
    """All messages and the last residual add up to all inputs."""
    store = Residuals(storage, transactional)
    codecs = [
        Codec(KEPT, DCT_16),
        Codec(Blockwise(4, 32)),
        Codec(QUANTIZED, DCT_16),
        Codec(TopK(0.1, 64)),
        Codec(Blockwise(8, 32), Hadamard(64)),
    ]
    balance, step, largest = torch.zeros(NUMEL), 0, 0.0
    for _ in range(2):
        for codec in codecs:
            x = gradient(step)
            largest = max(largest, float((balance + x).abs().max()))
            balance += x - codec.transform.inverse(send(ErrorFeedback(store), codec, x), SEGMENTS)
            store.commit()
            step += 1
    bound = 2 * step * ROUNDING[storage] * largest
    assert float((store.read(SEGMENTS, CPU) - balance).abs().max()) <= bound


def test_a_full_synchronization_sends_the_momentum_as_elements() -> None:
    feedback, codec, exact = demo(), Codec(KEPT, DCT_16), Codec(Cast(torch.float32))
    for step in range(3):
        send(feedback, codec, gradient(step))
    held, x = feedback.residuals.read(SEGMENTS, CPU), gradient(9)
    torch.testing.assert_close(send(feedback, exact, x), x + DECAY * held, rtol=0, atol=1e-6)
    assert not feedback.residuals.read(SEGMENTS, CPU, DCT_16).any()


@every_storage
@pytest.mark.parametrize(
    "codec", [Codec(KEPT, DCT_16), Codec(KEPT), Codec(Blockwise(4, 32))], ids=["dct", "topk", "int4"]
)
def test_a_skipped_step_changes_no_bit(codec: Codec, storage: str) -> None:
    """This also holds if the skipped step was the first one of another method."""
    feedback = demo(storage, transactional=True)
    for step in range(3):
        send(feedback, Codec(KEPT, DCT_16), gradient(step))
        feedback.residuals.commit()
    before, bases = stored(feedback.residuals), feedback.residuals.bases()
    for bad in (1.0, math.nan, math.inf):
        for _ in range(2):
            send(feedback, codec, gradient(5) * bad)
        feedback.residuals.rollback()
        assert stored(feedback.residuals) == before
        assert feedback.residuals.bases() == bases
    send(feedback, codec, gradient(5))
    feedback.residuals.commit()
    assert set(feedback.residuals.bases().values()) == {codec.transform.of(SEGMENTS)}


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_is_sent(bad: float) -> None:
    for place in (0, 700, 1599, NUMEL - 1):
        feedback, x = demo(transactional=True), gradient(1)
        x[place] = bad
        sent = send(feedback, Codec(QUANTIZED, DCT_16), x)
        assert not DCT_16.inverse(sent, SEGMENTS).isfinite().all()


@every_storage
def test_coefficients_follow_the_loss_scale(storage: str) -> None:
    feedback = demo(storage, transactional=True)
    send(feedback, Codec(KEPT, DCT_16), gradient(1))
    feedback.residuals.commit()
    before = feedback.residuals.read(SEGMENTS, CPU)
    feedback.residuals.scale(0.5)
    assert torch.equal(feedback.residuals.read(SEGMENTS, CPU), 0.5 * before)


def test_square_norms_equal_those_of_the_elements() -> None:
    feedback = demo()
    send(feedback, Codec(KEPT, DCT_16), gradient(1))
    norm = float(sum(feedback.residuals.square_norms()))
    assert norm == pytest.approx(float(feedback.residuals.read(SEGMENTS, CPU).square().sum()), rel=1e-5)


CUTS: tuple[Layout, ...] = (
    LAYOUT,
    (("w", 0, 800), ("w", 800, 800), ("b", 0, 30), ("v", 24, 480)),
    (("w", 13, 1500), ("v", 100, 300)),
    (("b", 0, 30),),
    (("v", 24, 480), ("w", 0, 13), ("w", 1513, 87)),
)


@properties
@given(st.lists(st.tuples(st.sampled_from(CUTS), st.booleans()), min_size=1, max_size=5), st.booleans())
def test_new_layouts_lose_nothing(steps: list[tuple[Layout, bool]], transactional: bool) -> None:
    """For every element, all sent values plus the residual equal all inputs, regardless of how messages are cut."""
    store, balance = Residuals("fp32", transactional), dict.fromkeys(elements_of(LAYOUT), 0.0)
    for step, (layout, plain) in enumerate(steps):
        segments = segments_of(layout)
        x = gradient(step, sum(segment.numel for segment in segments))
        codec = Codec(KEPT) if plain else Codec(KEPT, DCT_16)
        lost = x - codec.transform.inverse(send(ErrorFeedback(store), codec, x, segments), segments)
        for element, value in zip(elements_of(layout), lost.tolist(), strict=True):
            balance[element] += value
    store.commit()
    found = {**dict.fromkeys(balance, 0.0), **elements(store)}
    assert max(abs(found[element] - balance[element]) for element in balance) <= 1e-4


def elements_of(layout: Layout) -> list[tuple[str, int]]:
    return [(name, begin + place) for name, begin, numel in layout for place in range(numel)]


def test_bases_that_give_equal_coefficients_are_equal() -> None:
    assert DCT_16.of(SEGMENTS) == DCT({"w": 40, "v": 24}, TILE)
    assert DCT_16.of(SEGMENTS) == DCT({**WIDTHS, "elsewhere": 9, "more": 3}, TILE).of(SEGMENTS)
    assert DCT_16.of(SEGMENTS) != DCT(WIDTHS, 32).of(SEGMENTS)
    assert DCT_16.of(SEGMENTS) != DCT({**WIDTHS, "w": 20}, TILE).of(SEGMENTS)


@pytest.mark.parametrize("transform", [Identity(), *BASES], ids=lambda one: type(one).__name__)
def test_a_transform_survives_its_description_as_json(transform: Transform) -> None:
    assert transform_of(json.loads(json.dumps(described(transform)))) == transform


ONE = Position(0, 1, 0, 1)


def save(store: Residuals, directory: Path, position: Position = ONE, loss_scale: float = 1.0) -> Path:
    file = state.state_file(directory, position.index)
    state.write(state.contents({"gradients": store}, position, Moment(0, 5, loss_scale), {}, {}), file)
    return file


def load(directory: Path, storage: str = "fp32", position: Position = ONE, loss_scale: float = 1.0) -> Residuals:
    store = Residuals(storage, transactional=True)
    found = state.sources(directory, position.index, position)
    state.restore({"gradients": store}, found, position, loss_scale, CPU)
    return store


def trained(storage: str = "fp32", seed: int = 0, codec: Codec | None = None) -> ErrorFeedback:
    feedback = demo(storage, transactional=True)
    for step in range(3):
        send(feedback, codec or Codec(QUANTIZED, DCT_16), gradient(seed + step))
        feedback.residuals.commit()
    return feedback


@every_storage
def test_a_saved_residual_continues_bit_for_bit(storage: str, tmp_path: Path) -> None:
    feedback, codec = trained(storage), Codec(QUANTIZED, DCT_16)
    save(feedback.residuals, tmp_path)
    # A model with more parameters has another transform, but the same coefficients here.
    resumed, widened = ErrorFeedback(load(tmp_path, storage), DECAY, False), DCT({**WIDTHS, "new": 3}, TILE)
    for step in range(3):
        x = gradient(100 + step)
        assert torch.equal(send(resumed, Codec(QUANTIZED, widened), x), send(feedback, codec, x))
        feedback.residuals.commit()
        resumed.residuals.commit()
        assert stored(resumed.residuals) == stored(feedback.residuals)


@pytest.mark.parametrize("loss_scale", [65536, 65536.0])
def test_a_loss_scale_of_either_type_is_loaded(loss_scale: float, tmp_path: Path) -> None:
    """A scaler has the number that it was made with until its first update."""
    residuals = trained().residuals
    save(residuals, tmp_path, loss_scale=loss_scale)
    assert stored(load(tmp_path, loss_scale=loss_scale)) == stored(residuals)


@pytest.mark.parametrize("loss_scale", [True, 0, -1.0, "3", None])
def test_another_loss_scale_is_refused_by_its_key(loss_scale: object, tmp_path: Path) -> None:
    text = save(trained().residuals, tmp_path).with_suffix(".json")
    text.write_text(json.dumps({**json.loads(text.read_text()), "loss_scale": loss_scale}))
    with pytest.raises(StateError, match=r"\(/loss_scale is .*: Input should be .*\)$"):
        load(tmp_path)


def change(key: str, value: object) -> Callable[[dict], None]:
    return lambda plain: plain.update({key: value})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (change("version", 2), "has version 2; this package reads 3"),
        (change("version", 4), "has version 4; this package reads 3"),
        (lambda plain: plain.pop("bases"), "not a state of this package"),
        (change("bases", {"gradients": [{"basis": "identity"}]}), "digest does not match"),
    ],
)
def test_a_state_with_a_wrong_version_or_basis_is_refused(
    damage: Callable[[dict], None], words: str, tmp_path: Path
) -> None:
    file = save(trained().residuals, tmp_path).with_suffix(".json")
    plain = json.loads(file.read_text())
    damage(plain)
    file.write_text(json.dumps(plain))
    with pytest.raises(StateError, match=words):
        load(tmp_path)


@pytest.mark.parametrize("bases", [[{"basis": "wavelet"}], [{"basis": "dct", "side": 3}], []])
def test_an_unknown_basis_is_refused(bases: list[dict], tmp_path: Path) -> None:
    file = save(trained().residuals, tmp_path)
    changed = Description(**{**vars(read_description(file)), "bases": {"gradients": bases}})
    plain = json.loads(file.with_suffix(".json").read_text())
    plain |= {"bases": changed.bases, "sha256": state._digest(file, changed)}
    file.with_suffix(".json").write_text(json.dumps(plain))
    with pytest.raises(StateError, match="damaged"):
        load(tmp_path)


@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 3), (3, 1)])
def test_the_sum_over_ranks_survives_a_change_of_their_number(before: int, after: int, tmp_path: Path) -> None:
    """Some ranks stored coefficients, others elements, and the loss scale has changed."""
    sums: dict[tuple[str, int], float] = {}
    for rank in range(before):
        store = trained(seed=10 * rank, codec=Codec(KEPT) if rank % 2 else None).residuals
        save(store, tmp_path, Position(rank, before, 0, 1), loss_scale=4.0)
        for element, value in elements(store).items():
            sums[element] = sums.get(element, 0.0) + 0.5 * value
    loaded = [load(tmp_path, "fp32", Position(rank, after, 0, 1), loss_scale=2.0) for rank in range(after)]
    found = [elements(store) for store in loaded]
    for element, value in sums.items():
        assert sum(one.get(element, 0.0) for one in found) == pytest.approx(value, abs=1e-5)


def test_values_survive_a_change_of_the_storage_format(tmp_path: Path) -> None:
    store = trained("fp32").residuals
    save(store, tmp_path)
    found = load(tmp_path, "bf16").read(SEGMENTS, CPU, DCT_16)
    expected = store.read(SEGMENTS, CPU, DCT_16)
    assert float((found - expected).norm()) <= 2**-7 * float(expected.norm())


def test_momentum_correction_stores_coefficients() -> None:
    """DGC in a basis equals DGC of the coefficients."""
    inside = MomentumCorrection(Residuals("fp32", False), Residuals("fp32", False), 0.9)
    plain = MomentumCorrection(Residuals("fp32", False), Residuals("fp32", False), 0.9)
    for step in range(4):
        x = gradient(step)
        sent = send(inside, Codec(KEPT, DCT_16), x)
        assert torch.equal(sent, send(plain, Codec(KEPT), DCT_16.forward(x, SEGMENTS)))


class Unfused:
    """A compressor without fused error feedback."""

    def __init__(self, inner: Compressor) -> None:
        self.payload_bytes, self.compress = inner.payload_bytes, inner.compress
        self.decompress_add = inner.decompress_add


@pytest.mark.parametrize("transactional", [False, True])
@pytest.mark.parametrize("storage", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "compressor",
    [
        KEPT,
        QUANTIZED,
        TopK(0.03, 64, Blockwise(8, 32, stochastic=True)),
        TopK(0.05, scope="tensor"),
        TopK(0.05, scope="threshold", values=Cast(torch.bfloat16)),
        TopK(0.2, 128, min_magnitude=1.0),
        TopK(1.0, 64),
    ],
    ids=repr,
)
def test_fused_feedback_gives_the_same_bits(compressor: TopK, storage: str, transactional: bool) -> None:
    fused, unfused = demo(storage, transactional), demo(storage, transactional)
    for step in range(4):
        x = gradient(step)
        given_x = x.clone()
        assert torch.equal(send(fused, Codec(compressor), x), send(unfused, Codec(Unfused(compressor)), x))
        assert torch.equal(x, given_x)
        fused.residuals.commit()
        unfused.residuals.commit()
        assert stored(fused.residuals) == stored(unfused.residuals)
