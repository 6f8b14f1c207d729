from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from torch import Tensor

from deepspeed_compress.buckets import Segment, even_partition
from deepspeed_compress.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.feedback import Residuals, WithFeedback, WithoutFeedback
from tests.support.codecs import CODECS, decode, transmit
from tests.support.properties import properties

CPU = torch.device("cpu")
NUMEL = 200
SEGMENTS = even_partition([("w", NUMEL - 60), ("b", 60)], 1).segments
BLOCK = 32


def segments_of(ranges: Iterable[tuple[str, int, int]]) -> tuple[Segment, ...]:
    """A message of the given (name, begin, numel); where they lie in the bucket does not matter here."""
    segments, offset = [], 0
    for name, begin, numel in ranges:
        segments.append(Segment(name, begin, numel, offset, 0))
        offset += numel
    return tuple(segments)


def send(feedback: WithFeedback | WithoutFeedback, x: Tensor, key: int = 0) -> Tensor:
    """What the receiver of a message of SEGMENTS decodes."""
    payload = torch.empty(feedback.compressor.payload_bytes(x.numel()), dtype=torch.uint8)
    feedback.encode(x.clone(), SEGMENTS, payload, key)
    return decode(feedback.compressor, payload, x.numel())


def with_feedback(codec: Compressor, dtype: torch.dtype = torch.float32, transactional: bool = False) -> WithFeedback:
    return WithFeedback(codec, Residuals(dtype, transactional))


def residual(feedback: WithFeedback) -> Tensor:
    return feedback.residuals.read(SEGMENTS, CPU).clone()


def integers(levels: int, seed: int) -> Tensor:
    """Integers whose blocks all have the scale 4: the first element of each is the largest, and is sent exactly."""
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("codec", "levels"), EXACT, ids=lambda value: repr(value))
def test_nothing_is_lost_where_arithmetic_is_exact(codec: Compressor, levels: int, dtype: torch.dtype) -> None:
    feedback = with_feedback(codec, dtype)
    for step in range(6):
        x, old = integers(levels, step), residual(feedback)
        assert torch.equal(send(feedback, x, step) + residual(feedback), x + old)


@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float32, 2**-22), (torch.bfloat16, 2**-8)], ids=str)
@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_nothing_is_lost_but_rounding(codec: Compressor, dtype: torch.dtype, rounding: float) -> None:
    """fp32: an ulp of the largest term. A bf16 residual: half an ulp of itself, 2**-9 of it, besides."""
    feedback = with_feedback(codec, dtype)
    generator = torch.Generator().manual_seed(1)
    for step in range(6):
        x, old = torch.randn(NUMEL, generator=generator), residual(feedback).float()
        decoded, new = send(feedback, x, step), residual(feedback).float()
        bound = rounding * new.abs() + 2**-22 * (x.abs() + old.abs() + decoded.abs())
        assert ((decoded.double() + new - x.double() - old).abs() <= bound).all()


def test_what_was_sent_and_what_is_left_add_up_over_the_steps() -> None:
    feedback = with_feedback(TopK(0.05, 64))
    inputs = [integers(7, step) for step in range(20)]
    received = sum(send(feedback, x, step) for step, x in enumerate(inputs))
    assert torch.equal(received + residual(feedback), sum(inputs))


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_the_first_message_has_no_memory(codec: Compressor) -> None:
    x = integers(7, 0)
    assert torch.equal(send(with_feedback(codec), x), transmit(codec, x, 0))


def test_without_feedback_every_message_is_alone() -> None:
    codec, x = Blockwise(4, BLOCK), integers(127, 0)
    payload = torch.empty(codec.payload_bytes(NUMEL), dtype=torch.uint8)
    for _ in range(2):
        WithoutFeedback(codec).encode(x, SEGMENTS, payload, 0)
        assert torch.equal(decode(codec, payload, NUMEL), transmit(codec, x, 0))


def test_micro_steps_build_on_each_other_and_a_rollback_undoes_them_all() -> None:
    feedback = with_feedback(TopK(0.05, 64), transactional=True)
    send(feedback, integers(7, 0))
    feedback.residuals.commit()
    before = residual(feedback)
    for step in (1, 2):
        old, x = residual(feedback), integers(7, step)
        assert torch.equal(send(feedback, x) + residual(feedback), x + old)
    assert not torch.equal(residual(feedback), before)
    feedback.residuals.rollback()
    assert torch.equal(residual(feedback), before)


def test_a_non_finite_step_leaves_no_trace_after_rollback() -> None:
    feedback = with_feedback(Blockwise(8, BLOCK), transactional=True)
    send(feedback, integers(7, 0))
    feedback.residuals.commit()
    before = residual(feedback)
    assert not send(feedback, torch.full((NUMEL,), torch.nan)).isfinite().any()
    feedback.residuals.rollback()
    assert torch.equal(residual(feedback), before)


def test_writes_without_transactions_are_final() -> None:
    residuals = Residuals(torch.float32, transactional=False)
    residuals.write(SEGMENTS, torch.ones(NUMEL))
    residuals.rollback()
    assert torch.equal(residuals.read(SEGMENTS, CPU), torch.ones(NUMEL))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_residuals_are_kept_in_their_dtype(dtype: torch.dtype) -> None:
    residuals = Residuals(dtype, transactional=True)
    assert residuals.read(SEGMENTS, CPU).dtype == dtype
    residuals.write(SEGMENTS, torch.full((NUMEL,), 1 / 3))
    residuals.commit()
    assert torch.equal(residuals.read(SEGMENTS, CPU), torch.full((NUMEL,), 1 / 3).to(dtype))
    assert all(values.dtype == dtype for _, values in residuals.items())


def test_square_norm_counts_the_running_step() -> None:
    residuals = Residuals(torch.float32, transactional=True)
    assert residuals.square_norm() == 0
    residuals.write(SEGMENTS, torch.full((NUMEL,), 2.0))
    assert residuals.square_norm() == 4 * NUMEL
    residuals.rollback()
    assert residuals.square_norm() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loaded_residuals_replace_all_and_are_copies(dtype: torch.dtype) -> None:
    residuals = Residuals(dtype, transactional=True)
    residuals.write(SEGMENTS, torch.ones(NUMEL))
    values = torch.tensor([1.0, 2.0])
    residuals.load({("w", 3, 2): values}, CPU)
    values.zero_()
    found = residuals.read(segments_of([("w", 2, 4), ("b", 0, 1)]), CPU)
    assert (found.dtype, found.tolist()) == (dtype, [0, 1, 2, 0, 0])


NUMELS = {"a": 7, "b": 4, "c": 1}
Element = tuple[str, int]
Message = tuple[tuple[str, int, int], ...]


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Some ranges of parameters, cut at random places, in any order."""
    ranges = []
    for name, numel in NUMELS.items():
        cuts = [0, *sorted(draw(st.sets(st.integers(1, numel), max_size=3))), numel]
        ranges += [(name, begin, end - begin) for begin, end in pairwise(cuts) if begin < end]
    chosen = draw(st.lists(st.sampled_from(ranges), min_size=1, unique=True))
    return tuple(chosen)


def elements(message: Iterable[tuple[str, int, int]]) -> list[Element]:
    return [(name, begin + index) for name, begin, numel in message for index in range(numel)]


def test_a_new_layout_in_the_middle_of_a_step_keeps_what_the_step_has_not_written() -> None:
    residuals = Residuals(torch.float32, transactional=True)
    first, second = segments_of([("a", 0, 2)]), segments_of([("b", 0, 2)])
    residuals.write(second, torch.tensor([3.0, 4.0]))
    residuals.commit()
    residuals.write(first, torch.tensor([1.0, 2.0]))
    assert residuals.read(segments_of([("a", 0, 2), ("b", 0, 2)]), CPU).tolist() == [1, 2, 3, 4]


class ResidualsAgainstDictionaries(RuleBasedStateMachine):
    """Any order of messages, of any cut, behaves as two dictionaries by element: the applied and the running step."""

    @initialize(transactional=st.booleans())
    def start(self, transactional: bool) -> None:
        self.residuals = Residuals(torch.float32, transactional)
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
        saved = {piece: values.clone() for piece, values in self.residuals.items()}
        self.residuals = Residuals(torch.float32, self.transactional)
        self.residuals.load(saved, CPU)

    @invariant()
    def every_element_has_one_home(self) -> None:
        items = list(self.residuals.items())
        named = elements(piece for piece, _ in items)
        assert len(set(named)) == len(named)
        values = [value for _, part in items for value in part.tolist()]
        found = {element: value for element, value in zip(named, values, strict=True) if value}
        assert found == {element: value for element, value in self.applied.items() if value}


TestResidualsAgainstDictionaries = ResidualsAgainstDictionaries.TestCase
TestResidualsAgainstDictionaries.settings = properties


@properties
@given(st.lists(messages(), min_size=1, max_size=6), st.integers(0, 2**32 - 1))
def test_changing_buckets_lose_nothing_of_what_is_fed_in(layouts: list[Message], seed: int) -> None:
    """Per element: everything sent plus the residual is everything fed in, however the messages were formed."""
    feedback = WithFeedback(TopK(0.3, 64), Residuals(torch.float32, transactional=True))
    generator = torch.Generator().manual_seed(seed)
    balance = dict.fromkeys(elements((name, 0, numel) for name, numel in NUMELS.items()), 0.0)
    for layout in layouts:
        x = torch.randint(-9, 9, (len(elements(layout)),), generator=generator).float()
        payload = torch.empty(feedback.compressor.payload_bytes(x.numel()), dtype=torch.uint8)
        feedback.encode(x.clone(), segments_of(layout), payload, 0)
        lost = x - decode(feedback.compressor, payload, x.numel())
        for element, value in zip(elements(layout), lost.tolist(), strict=True):
            balance[element] += value
    feedback.residuals.commit()
    whole = [(name, 0, numel) for name, numel in NUMELS.items()]
    assert feedback.residuals.read(segments_of(whole), CPU).tolist() == list(balance.values())
