from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.compression.codec import Codec, NoSend
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.compression.feedback import ErrorFeedback, MomentumCorrection, NoFeedback
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, segments_of
from deepspeed_compress.compression.transforms import DCT, Hadamard, Identity, Transform
from tests.support.codecs import CODECS, decode, transmit
from tests.support.properties import properties

CPU = torch.device("cpu")
NUMEL = 200
SEGMENTS = even_partition([("w", NUMEL - 60), ("b", 60)], 1).segments
BLOCK = 32


@dataclass(frozen=True)
class Sender:
    """A codec with its error feedback."""

    compressor: Compressor
    feedback: ErrorFeedback | NoFeedback | MomentumCorrection
    transform: Transform = field(default_factory=Identity)

    @property
    def residuals(self) -> Residuals:
        assert isinstance(self.feedback, ErrorFeedback)
        return self.feedback.residuals

    @property
    def codec(self) -> Codec:
        return Codec(self.compressor, self.transform)

    def encode(self, x: Tensor, segments: Sequence[Segment], key: int = 0) -> Tensor:
        payload = torch.empty(self.compressor.payload_bytes(x.numel()), dtype=torch.uint8)
        self.feedback.encode(self.codec.coefficients(x.clone(), segments), segments, payload, key, self.codec)
        return payload


def send(sender: Sender, x: Tensor, key: int = 0) -> Tensor:
    """Send `x` as a message of SEGMENTS, and return the decoded message."""
    decoded = torch.zeros_like(x)
    sender.codec.decode([sender.encode(x, SEGMENTS, key)], SEGMENTS, decoded, 1.0, add=True)
    return decoded


def feedback_sender(codec: Compressor, dtype: str = "fp32", transactional: bool = False, decay: float = 1.0) -> Sender:
    return Sender(codec, ErrorFeedback(Residuals(dtype, transactional), decay))


def residual(sender: Sender) -> Tensor:
    return sender.residuals.read(SEGMENTS, CPU).clone()


def integers(levels: int, seed: int) -> Tensor:
    """Return integers whose blocks all have the scale 4: the first element of each is the largest and sent exactly."""
    x = torch.randint(-2 * levels, 2 * levels, (NUMEL,), generator=torch.Generator().manual_seed(seed)).float()
    x[::BLOCK] = 4 * levels
    return x


EXACT = [
    (Cast(torch.float32), 7),
    (Cast(torch.bfloat16), 7),
    (Blockwise(8, BLOCK), 127),
    (Blockwise(8, BLOCK, stochastic=True), 127),
    (Blockwise(4, BLOCK), 7),
    (Blockwise(4, BLOCK, stochastic=True), 7),
    (TopK(0.1, 64), 7),
]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("codec", "levels"), EXACT, ids=lambda value: repr(value))
def test_message_and_residual_add_up_exactly_if_arithmetic_is_exact(codec: Compressor, levels: int, dtype: str) -> None:
    sender = feedback_sender(codec, dtype)
    for step in range(6):
        x, old = integers(levels, step), residual(sender)
        assert torch.equal(send(sender, x, step) + residual(sender), x + old)


@pytest.mark.parametrize(("dtype", "rounding"), [("fp32", 2**-22), ("bf16", 2**-8)])
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_message_and_residual_add_up_to_rounding(codec: Compressor, dtype: str, rounding: float) -> None:
    """The bound for fp32 is an ulp of the largest term, plus half an ulp of the residual if it is bf16."""
    sender = feedback_sender(codec, dtype)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x, old = torch.randn(NUMEL, generator=generator), residual(sender).float()
        decoded, new = send(sender, x, step), residual(sender).float()
        bound = rounding * new.abs() + 2**-22 * (x.abs() + old.abs() + decoded.abs())
        assert ((decoded.double() + new - x.double() - old).abs() <= bound).all()


def test_without_feedback_messages_are_independent() -> None:
    codec, x = Blockwise(4, BLOCK), integers(127, 0)
    for _ in range(2):
        assert torch.equal(send(Sender(codec, NoFeedback()), x), transmit(codec, x, 0))


def test_a_rollback_undoes_a_non_finite_step() -> None:
    sender = feedback_sender(Blockwise(8, BLOCK), transactional=True)
    send(sender, integers(7, 0))
    sender.residuals.commit()
    before = residual(sender)
    assert not send(sender, torch.full((NUMEL,), torch.nan)).isfinite().any()
    sender.residuals.rollback()
    assert torch.equal(residual(sender), before)


@pytest.mark.parametrize(("dtype", "size", "error"), [("fp32", 800, 0), ("bf16", 400, 2**-9), ("int8", 204, 0.00394)])
def test_residuals_have_the_size_and_precision_of_their_dtype(dtype: str, size: int, error: float) -> None:
    """int8 takes a byte per element and an fp32 scale per 256, with an error of at most 0.5 / 127 of the largest."""
    residuals, values = Residuals(dtype, transactional=True), torch.linspace(-1, 1, NUMEL)
    residuals.write(SEGMENTS, values)
    residuals.commit()
    assert (residuals.read(SEGMENTS, CPU) - values).abs().max() <= error
    [(_, payload)] = residuals.payloads()
    assert payload.nbytes == size


def test_square_norm_includes_the_running_step() -> None:
    residuals = Residuals("fp32", transactional=True)
    assert sum(residuals.square_norms()) == 0
    residuals.write(SEGMENTS, torch.full((NUMEL,), 2.0))
    assert sum(residuals.square_norms()) == pytest.approx(4 * NUMEL, rel=1e-6)
    residuals.rollback()
    assert sum(residuals.square_norms()) == 0


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("on_host", [True, False])
def test_restored_residuals_are_exact_copies(dtype: str, on_host: bool) -> None:
    stored, other = Residuals(dtype, transactional=True), Residuals(dtype, True, on_host)
    stored.write(SEGMENTS, torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)))
    stored.commit()
    expected = stored.read(SEGMENTS, CPU)
    other.write(SEGMENTS, torch.ones(NUMEL))
    other.restore(dict(stored.payloads()), CPU)
    stored.write(SEGMENTS, torch.zeros(NUMEL))
    stored.commit()
    assert torch.equal(other.read(SEGMENTS, CPU), expected)


def test_added_values_can_be_read_in_another_layout() -> None:
    residuals = Residuals("fp32", transactional=True)
    for value in (1.0, 2.0):
        residuals.add([(("w", 3, 2), torch.tensor([value, 2 * value]))], CPU)
    assert residuals.read(segments_of([("w", 2, 4), ("b", 0, 1)]), CPU).tolist() == [0, 3, 6, 0, 0]


def test_pruning_drops_messages_that_the_step_has_not_written() -> None:
    residuals = Residuals("fp32", transactional=True)
    residuals.add([(("w", 0, 4), torch.ones(4)), (("b", 0, 2), torch.ones(2))], CPU)
    residuals.write(segments_of([("w", 0, 2)]), torch.full((2,), 5.0))
    residuals.prune()
    residuals.commit()
    assert {piece: values.tolist() for piece, values in residuals.items()} == {("w", 0, 2): [5, 5]}
    assert not residuals.holds(segments_of([("w", 2, 2), ("b", 0, 2)]))


def test_an_unscaled_store_does_not_follow_the_loss_scale() -> None:
    for scaled, expected in ((True, 2.0), (False, 1.0)):
        residuals = Residuals("fp32", transactional=False, scaled=scaled)
        residuals.write(SEGMENTS, torch.ones(NUMEL))
        residuals.scale(2.0)
        assert residuals.read(SEGMENTS, CPU).tolist() == [expected] * NUMEL


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_follows_the_paper(nesterov: bool) -> None:
    """DGC, algorithm 4 and appendix B, in float64: u and v are cleared where a value was sent."""
    m, kept = 0.9, 20
    correction = MomentumCorrection(Residuals("fp32", False), Residuals("fp32", False), m, nesterov)
    sender = Sender(TopK(kept / NUMEL, 64, scope="tensor"), correction)
    u, v = (torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))
    generator = torch.Generator().manual_seed(3)
    for _ in range(12):
        gradient = torch.randn(NUMEL, generator=generator)
        if nesterov:
            u = m * (u + gradient)
            v = v + u + gradient
        else:
            u = m * u + gradient
            v = v + u
        largest = v.abs().topk(kept).indices
        sent = torch.zeros_like(v)
        sent[largest] = v[largest]
        torch.testing.assert_close(send(sender, gradient).double(), sent, rtol=1e-5, atol=1e-5)
        v[largest] = u[largest] = 0
    for store, expected in ((correction.velocity, u), (correction.accumulated, v)):
        torch.testing.assert_close(store.read(SEGMENTS, CPU).double(), expected, rtol=1e-5, atol=1e-5)


def test_own_elements_are_exact_and_include_the_residual_of_a_former_owner() -> None:
    sender, x = feedback_sender(Blockwise(4, BLOCK), transactional=True), integers(7, 0) / 3
    assert torch.equal(sender.feedback.keep(x.clone(), SEGMENTS, sender.codec), x)
    sender.residuals.add([(("w", 0, 2), torch.tensor([1.0, 2.0]))], CPU)
    expected = x.clone()
    expected[:2] += torch.tensor([1.0, 2.0])
    for _ in range(2):
        assert torch.equal(sender.feedback.keep(x.clone(), SEGMENTS, sender.codec), expected)
        sender.residuals.rollback()
    sender.feedback.keep(x.clone(), SEGMENTS, sender.codec)
    sender.residuals.commit()
    assert torch.equal(sender.feedback.keep(x.clone(), SEGMENTS, sender.codec), x)


def test_no_send_holds_back_all_elements_including_own_ones() -> None:
    sender, x = feedback_sender(NoSend()), integers(7, 0)
    for step in (1, 2):
        assert sender.encode(x, SEGMENTS).tolist() == [0, 0, 0, 0]
        assert torch.equal(residual(sender), step * x)
    own = Sender(NoSend(), ErrorFeedback(Residuals("fp32", False)))
    assert own.feedback.keep(x.clone(), SEGMENTS, own.codec) is None
    assert own.encode(x, SEGMENTS).tolist() == [0, 0, 0, 0]
    exact = Codec(Cast(torch.float32))
    assert torch.equal(own.feedback.keep(x.clone(), SEGMENTS, exact), 2 * x)


NUMELS = {"a": 7, "b": 4, "c": 1}
Element = tuple[str, int]
Message = tuple[tuple[str, int, int], ...]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Generate ranges of parameters, cut at random places, in any order."""
    ranges = []
    for name, numel in NUMELS.items():
        cuts = [0, *sorted(draw(st.sets(st.integers(1, numel), max_size=3))), numel]
        ranges += [(name, begin, end - begin) for begin, end in pairwise(cuts) if begin < end]
    chosen = draw(st.lists(st.sampled_from(ranges), min_size=1, unique=True))
    return tuple(chosen)


def elements(message: Iterable[tuple[str, int, int]]) -> list[Element]:
    return [(name, begin + index) for name, begin, numel in message for index in range(numel)]


def test_a_new_layout_within_a_step_keeps_values_that_the_step_has_not_written() -> None:
    residuals = Residuals("fp32", transactional=True)
    first, second = segments_of([("a", 0, 2)]), segments_of([("b", 0, 2)])
    residuals.write(second, torch.tensor([3.0, 4.0]))
    residuals.commit()
    residuals.write(first, torch.tensor([1.0, 2.0]))
    assert residuals.read(segments_of([("a", 0, 2), ("b", 0, 2)]), CPU).tolist() == [1, 2, 3, 4]


class ResidualsAgainstDictionaries(RuleBasedStateMachine):
    """Model of `Residuals` as two dictionaries by element: the applied and the running step."""

    @initialize(transactional=st.booleans())
    def start(self, transactional: bool) -> None:
        self.residuals = Residuals("fp32", transactional)
        self.transactional = transactional
        self.applied: dict[Element, float] = {}
        self.running: dict[Element, float] = {}

    @rule(message=messages())
    def read(self, message: Message) -> None:
        current = {**self.applied, **self.running}
        expected = [current.get(element, 0.0) for element in elements(message)]
        assert self.residuals.read(segments_of(message), CPU).tolist() == expected

    @rule(message=messages(), seed=st.integers(1, 1000))
    def write(self, message: Message, seed: int) -> None:
        named = elements(message)
        values = [float(seed + index) for index in range(len(named))]
        self.residuals.write(segments_of(message), torch.tensor(values))
        target = self.running if self.transactional else self.applied
        target.update(zip(named, values, strict=True))

    @rule()
    def commit(self) -> None:
        self.residuals.commit()
        self.applied.update(self.running)
        self.running.clear()

    @rule()
    def rollback(self) -> None:
        self.residuals.rollback()
        self.running.clear()

    @precondition(lambda self: not self.running)
    @rule(factor=st.sampled_from([0.5, 2.0]))
    def scale(self, factor: float) -> None:
        self.residuals.scale(factor)
        self.applied = {element: value * factor for element, value in self.applied.items()}

    @precondition(lambda self: not self.running)
    @rule()
    def save_and_load(self) -> None:
        saved = {layout: payload.clone() for layout, payload in self.residuals.payloads()}
        self.residuals = Residuals("fp32", self.transactional)
        self.residuals.restore(saved, CPU)

    @invariant()
    def every_element_is_stored_once(self) -> None:
        items = list(self.residuals.items())
        named = elements(piece for piece, _ in items)
        assert len(set(named)) == len(named)
        values = [value for _, part in items for value in part.tolist()]
        found = {element: value for element, value in zip(named, values, strict=True) if value}
        assert found == {element: value for element, value in self.applied.items() if value}


TestResidualsAgainstDictionaries = ResidualsAgainstDictionaries.TestCase
TestResidualsAgainstDictionaries.settings = properties


@pytest.mark.parametrize("basis", [Identity(), Hadamard(BLOCK)])
def test_the_host_waits_for_values_that_it_reads(basis: Transform, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from a GPU that does not block would be read before it has arrived."""
    residuals, copies, move = Residuals("fp32", transactional=False), [], Tensor.to

    def to(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        copies.append(options.get("non_blocking"))
        return move(tensor, *args, **options)

    residuals.write(SEGMENTS, torch.ones(NUMEL))
    monkeypatch.setattr(Tensor, "to", to)
    residuals.read(SEGMENTS, CPU, basis)
    assert copies
    assert not any(copies)


def test_messages_and_the_last_residual_add_up_to_all_inputs() -> None:
    sender = feedback_sender(TopK(0.05, 64))
    inputs = [integers(7, step) for step in range(20)]
    received = sum(send(sender, x, step) for step, x in enumerate(inputs))
    assert torch.equal(received + residual(sender), sum(inputs))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_first_message_has_no_residual(codec: Compressor) -> None:
    x = integers(7, 0)
    assert torch.equal(send(feedback_sender(codec), x), transmit(codec, x, 0))


def test_a_rollback_undoes_all_micro_steps() -> None:
    sender = feedback_sender(TopK(0.05, 64), transactional=True)
    send(sender, integers(7, 0))
    sender.residuals.commit()
    before = residual(sender)
    for step in (1, 2):
        old, x = residual(sender), integers(7, step)
        assert torch.equal(send(sender, x) + residual(sender), x + old)
    assert not torch.equal(residual(sender), before)
    sender.residuals.rollback()
    assert torch.equal(residual(sender), before)


@pytest.mark.parametrize("transform", [Identity(), Hadamard(64), DCT({"w": 20}, 4)], ids=lambda one: type(one).__name__)
def test_message_and_residual_add_up_in_a_transformed_basis(transform: Transform) -> None:
    sender = Sender(TopK(0.1, 64), ErrorFeedback(Residuals("fp32", False)), transform)
    for step in range(6):
        x, old = integers(7, step), residual(sender)
        torch.testing.assert_close(send(sender, x) + residual(sender), x + old, rtol=1e-5, atol=1e-4)


def test_a_decayed_residual_is_decoupled_momentum() -> None:
    """DeMo, algorithm 1: m = beta m + g; q is the largest coefficients of m; m = m - q; q is sent."""
    beta, codec, transform = 0.9, TopK(0.05, 64), Hadamard(64)
    sender = Sender(codec, ErrorFeedback(Residuals("fp32", False), beta), transform)
    momentum = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(10):
        gradient = integers(7, step)
        momentum = beta * momentum + gradient
        chosen = transmit(codec, transform.forward(momentum.float(), SEGMENTS))
        sent = transform.inverse(chosen, SEGMENTS)
        momentum -= sent
        torch.testing.assert_close(send(sender, gradient), sent, rtol=1e-4, atol=1e-3)
        torch.testing.assert_close(residual(sender).double(), momentum, rtol=1e-4, atol=1e-3)


@properties
@given(st.lists(messages(), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_changing_buckets_lose_nothing(layouts: list[Message], seed: int) -> None:
    """For every element, all sent values plus the residual equal all inputs, regardless of the layouts of messages."""
    sender = feedback_sender(TopK(0.3, 64), transactional=True)
    generator = torch.Generator().manual_seed(seed)
    balance = dict.fromkeys(elements((name, 0, numel) for name, numel in NUMELS.items()), 0.0)
    for layout in layouts:
        x = torch.randint(-9, 9, (len(elements(layout)),), generator=generator).float()
        payload = sender.encode(x, segments_of(layout))
        lost = x - decode(sender.compressor, payload, x.numel())
        for element, value in zip(elements(layout), lost.tolist(), strict=True):
            balance[element] += value
    sender.residuals.commit()
    whole = [(name, 0, numel) for name, numel in NUMELS.items()]
    assert sender.residuals.read(segments_of(whole), CPU).tolist() == list(balance.values())
