"""PowerSGD with ranks as threads, compared with the paper's algorithms in float64 and with PyTorch's hook."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.buckets import LAYOUTS, Partition, even_partition, relabel
from deepspeed_compress.collectives.low_rank import LowRank, find_matrices, make_low_rank_layout, orthonormal
from deepspeed_compress.collectives.powersgd import PowerSGDReducer
from deepspeed_compress.collectives.reducer import Run, StepClock
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.segments import Segment, gather
from deepspeed_compress.monitor import Meter
from tests.support.reducers import normal, payload_reducer, raw_bytes
from tests.support.threads import run_threads

SAMPLED = pytest.mark.sampled(4)

FP32 = Cast(torch.float32)
SHAPES: Mapping[str, tuple[int, ...]] = {
    "wide": (6, 20),
    "bias": (6,),
    "tall": (24, 5),
    "tiny": (2, 3),
    "twin": (6, 20),
    "conv": (4, 3, 3, 3),
}
LOW_RANK = ("tall", "wide", "twin", "conv")
"""Parameters that are approximated at rank 2. The others are a vector and a matrix smaller than its factors."""


def layout(ranks: int, names: Sequence[str] = (*SHAPES,)) -> Partition:
    """Return a partition in which the owners' shares end within parameters."""
    return even_partition([(name, math.prod(SHAPES[name])) for name in names], ranks)


def part_of(bucket: Tensor, name: str, partition: Partition) -> Tensor:
    """Return a parameter of the bucket as a matrix."""
    flat = gather(bucket, [segment for segment in partition.segments if segment.parameter == name])
    return flat.view(SHAPES[name][0], -1)


@dataclass
class Built:
    """A reducer with its stores and its meter."""

    reducer: PowerSGDReducer
    residuals: Residuals
    warm: Residuals
    meter: Meter

    def end_step(self, applied: bool = True) -> None:
        for store in (self.residuals, self.warm):
            (store.commit if applied else store.rollback)()


def build(
    group: ProcessGroup,
    rank: int = 2,
    feedback: bool = True,
    factors: Compressor = FP32,
    others: Compressor = FP32,
    factor_feedback: bool = False,
    chosen: Callable[[str], bool] = lambda name: True,
    shapes: Mapping[str, tuple[int, ...]] = SHAPES,
    seed: int = 0,
    min_saving: float = 1.0,
) -> Built:
    residuals, warm, meter = Residuals("fp32", transactional=True), Residuals("fp32", transactional=True), Meter()
    reducer = PowerSGDReducer(
        payload_reducer(group, others, Run(StepClock(), meter)),
        payload_reducer(group, factors, Run(StepClock(), meter, seed), factor_feedback),
        LowRank({name: shape for name, shape in shapes.items() if chosen(name)}, rank, min_saving),
        residuals if feedback else None,
        warm,
    )
    return Built(reducer, residuals, warm, meter)


def train(
    ranks: int,
    steps: int = 1,
    operation: str = "all_reduce",
    inputs: Callable[[int, int], Tensor] | None = None,
    scale: float | None = None,
    partition: Partition | None = None,
    **options: Any,
) -> list[list[Tensor]]:
    """Return every rank's bucket after each applied step; by default, the mean of `inputs(rank, step)`."""
    cut = partition or layout(ranks)
    inputs = inputs or (lambda rank, step: normal(rank, cut.numel, step))

    def work(group: ProcessGroup, rank: int) -> list[Tensor]:
        built, found = build(group, **options), []
        for step in range(steps):
            bucket = inputs(rank, step).clone()
            getattr(built.reducer, operation)(bucket, cut, 1 / ranks if scale is None else scale)
            built.end_step()
            found.append(bucket)
        return found

    return run_threads(ranks, work)


def gram_schmidt(columns: Tensor) -> Tensor:
    basis = columns.clone()
    for index in range(basis.shape[1]):
        for before in range(index):
            basis[:, index] -= (basis[:, before] @ basis[:, index]) * basis[:, before]
        basis[:, index] /= basis[:, index].norm()
    return basis


def paper(gradients: Sequence[Sequence[Tensor]], q: Tensor) -> list[Tensor]:
    """Return the updates of algorithms 1 and 2 in float64, from `gradients[step][rank]` [m, n] and `q` [n, rank]."""
    errors, updates = [torch.zeros_like(gradients[0][0], dtype=torch.float64) for _ in gradients[0]], []
    q = q.double()
    for rank_gradients in gradients:
        inputs = [gradient.double() + error for gradient, error in zip(rank_gradients, errors, strict=True)]
        p = gram_schmidt(torch.stack([matrix @ q for matrix in inputs]).mean(dim=0))
        q = torch.stack([matrix.T @ p for matrix in inputs]).mean(dim=0)
        updates.append(p @ q.T)
        errors = [matrix - updates[-1] for matrix in inputs]
    return updates


def first_q(name: str, rank: int) -> Tensor:
    """Return the initial Q of a matrix: [n, rank]."""
    n = math.prod(SHAPES[name][1:])
    return normal(len(name), n * rank).view(n, rank)


def start_from(warm: Residuals, name: str, rank: int) -> None:
    q = first_q(name, rank)
    warm.write([Segment(name, 0, q.numel(), 0, 0)], q.T.reshape(-1))


@pytest.mark.parametrize("rank", [1, 2])
def test_ten_steps_agree_with_the_paper(rank: int) -> None:
    ranks, steps, partition = 3, 10, layout(3)

    def work(group: ProcessGroup, index: int) -> list[Tensor]:
        built, found = build(group, rank), []
        for name in LOW_RANK:
            start_from(built.warm, name, rank)
        built.end_step()
        for step in range(steps):
            found.append(normal(index, partition.numel, step))
            built.reducer.all_reduce(found[-1], partition, 1 / ranks)
            built.end_step()
        return found

    found = run_threads(ranks, work)[1]
    for name in LOW_RANK:
        gradients = [
            [part_of(normal(index, partition.numel, step), name, partition) for index in range(ranks)]
            for step in range(steps)
        ]
        for bucket, expected in zip(found, paper(gradients, first_q(name, rank)), strict=True):
            torch.testing.assert_close(part_of(bucket, name, partition).double(), expected, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [[[0.0] * 5] * 3, [[1.0] * 5] * 3, [[1.0] * 5, [0.0] * 5, [1e-38] * 5]])
def test_the_basis_is_complete_even_for_dependent_rows(rows: list[list[float]]) -> None:
    basis = orthonormal(torch.tensor([rows]))
    torch.testing.assert_close(basis @ basis.mT, torch.eye(3)[None], rtol=0, atol=1e-6)


def low_rank_inputs(partition: Partition, ranks: int, rank: int) -> Callable[[int, int], Tensor]:
    """Return gradients of full rank whose mean has rank `rank` in every matrix."""

    def inputs(index: int, step: int) -> Tensor:
        noise = torch.stack([normal(50 + other, partition.numel, step) for other in range(ranks)])
        bucket = (noise - noise.mean(dim=0))[index]
        for name in LOW_RANK:
            m, n = SHAPES[name][0], math.prod(SHAPES[name][1:])
            product = normal(60 + step, m * rank).view(m, rank) @ normal(70 + step, n * rank).view(rank, n)
            offset = next(segment.offset for segment in partition.segments if segment.parameter == name)
            bucket[offset : offset + m * n] += product.view(-1)
        return bucket

    return inputs


def residual_of(built: Built, name: str) -> Tensor:
    numel = math.prod(SHAPES[name])
    return built.residuals.read([Segment(name, 0, numel, 0, 0)], torch.device("cpu")).view(SHAPES[name][0], -1)


@pytest.mark.parametrize("factors", [FP32, Blockwise(4, 32)], ids=repr)
def test_residuals_and_the_mean_add_up_to_the_inputs(factors: Compressor) -> None:
    """The bound allows for fp32 rounding of a dozen operations on values below 20."""
    ranks, partition = 3, layout(3)

    def work(group: ProcessGroup, index: int) -> list[dict[str, tuple[Tensor, Tensor, Tensor]]]:
        built, found = build(group, factors=factors), []
        for step in range(4):
            bucket, before = normal(index, partition.numel, step), {name: residual_of(built, name) for name in LOW_RANK}
            total = {name: part_of(bucket, name, partition) + before[name] for name in LOW_RANK}
            built.reducer.all_reduce(bucket, partition, 1 / ranks)
            built.end_step()
            found.append(
                {name: (total[name], part_of(bucket, name, partition), residual_of(built, name)) for name in LOW_RANK}
            )
        return found

    results = run_threads(ranks, work)
    for steps in zip(*results, strict=True):
        for name in LOW_RANK:
            inputs, means, residuals = (torch.stack([of[name][index] for of in steps]).double() for index in range(3))
            assert (residuals.sum(dim=0) + ranks * means[0] - inputs.sum(dim=0)).abs().max() < 5e-5
            assert residuals.sum(dim=0).abs().max() > 1e-2


@SAMPLED
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("factors", "factor_feedback"),
    [(FP32, False), (Blockwise(4, 32, stochastic=True), False), (Blockwise(4, 32), True)],
)
def test_all_ranks_get_the_same_bits(factors: Compressor, factor_feedback: bool, dtype: torch.dtype) -> None:
    numel = layout(4).numel

    def inputs(index: int, step: int) -> Tensor:
        return normal(index, numel, step).to(dtype)

    found = train(4, 3, inputs=inputs, factors=factors, factor_feedback=factor_feedback, others=Blockwise(8, 32))
    assert len({b"".join(raw_bytes(bucket) for bucket in buckets) for buckets in found}) == 1
    assert found[0][0].dtype == dtype
    assert not torch.equal(found[0][0], inputs(0, 0))


@pytest.mark.parametrize("ranks", [2, 3])
def test_reduce_scatter_equals_all_reduce_on_own_segments(ranks: int) -> None:
    partition = layout(ranks)
    scattered, everywhere = (train(ranks, 3, operation) for operation in ("reduce_scatter", "all_reduce"))
    for rank in range(ranks):
        for step in range(3):
            expected = normal(rank, partition.numel, step)
            for segment in partition.owned_by(rank):
                own = slice(segment.offset, segment.offset + segment.numel)
                expected[own] = everywhere[rank][step][own]
            assert torch.equal(scattered[rank][step], expected)


def test_elements_outside_matrices_use_the_other_reducer() -> None:
    partition = layout(3)
    truth = torch.stack([normal(index, partition.numel) for index in range(3)]).mean(dim=0)
    found = train(3, chosen=lambda name: name != "tall")[0][0]
    for name in SHAPES:
        exact = torch.allclose(part_of(found, name, partition), part_of(truth, name, partition), rtol=0, atol=1e-6)
        assert exact == (name in ("bias", "tiny", "tall"))


@pytest.mark.parametrize("names", [("bias", "tiny"), ("wide", "twin")], ids=["no matrices", "only matrices"])
def test_a_bucket_may_have_no_matrices_or_only_matrices(names: tuple[str, ...]) -> None:
    ranks, partition = 2, layout(2, names)
    found = train(ranks, partition=partition)[0][0]
    truth = torch.stack([normal(index, partition.numel) for index in range(ranks)]).mean(dim=0)
    assert torch.allclose(found, truth, rtol=0, atol=1e-6) == (names == ("bias", "tiny"))
    assert found.isfinite().all()


def test_a_single_rank_keeps_its_gradient() -> None:
    numel = layout(1).numel
    assert torch.equal(train(1, scale=0.5)[0][0], 0.5 * normal(0, numel))


def found_in(
    partition: Partition, shapes: Mapping[str, tuple[int, ...]] = SHAPES, rank: int = 2, min_saving: float = 1.0
) -> list[str]:
    low_rank = LowRank(shapes, rank, min_saving)
    return [matrix.name for matrix in find_matrices(partition, low_rank)]


def test_matrices_are_found_by_shape() -> None:
    assert found_in(layout(3)) == ["conv", "wide", "twin", "tall"]
    assert found_in(layout(3), {name: shape for name, shape in SHAPES.items() if name != "twin"}) == [
        "conv",
        "wide",
        "tall",
    ]
    assert found_in(layout(3), rank=1, min_saving=5.0) == []
    # The savings of conv, tall and wide are 108 / 31, 120 / 29 and 120 / 26.
    assert found_in(layout(3), rank=1, min_saving=4.0) == ["wide", "twin", "tall"]
    assert found_in(layout(3), rank=50, min_saving=0.1) == ["tiny", "conv", "wide", "twin", "tall"]
    # The factors must be strictly smaller: (4 + 4) * 2 numbers do not replace 16.
    square = even_partition([("square", 16)], 2)
    assert found_in(square, shapes={"square": (4, 4)}) == []
    assert found_in(square, shapes={"square": (4, 4)}, min_saving=0.99) == ["square"]


@pytest.mark.parametrize(
    "pieces",
    [[(0, 119)], [(1, 119)], [(0, 50), (60, 60)], [(0, 40), (80, 40), (40, 40)]],
    ids=["no end", "no beginning", "a gap", "out of order"],
)
def test_incomplete_matrices_are_not_approximated(pieces: list[tuple[int, int]]) -> None:
    segments, offset = [], 0
    for begin, numel in pieces:
        segments.append(Segment("wide", begin, numel, offset, 0))
        offset += numel
    assert found_in(Partition(tuple(segments), 2)) == []


def test_the_size_of_a_stack_is_bounded_and_does_not_change_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = train(2, 3)
    # The bound fits two matrices of the shape of "wide", or one larger matrix.
    for numel, counts in ((240, [1, 2, 1]), (239, [1, 1, 1, 1]), (1, [1, 1, 1, 1])):
        monkeypatch.setattr("deepspeed_compress.collectives.low_rank.STACK_NUMEL", numel)
        found = make_low_rank_layout(LowRank(SHAPES, 2), 0, layout(2))
        assert [len(stack.matrices) for stack in found.stacks] == counts
        for some, others in zip(train(2, 3), whole, strict=True):
            torch.testing.assert_close(some, others, rtol=1e-4, atol=1e-5)


def test_zero_gradients_stay_zero_and_the_next_step_is_exact() -> None:
    partition = layout(2)
    later = low_rank_inputs(partition, 2, 2)

    def inputs(index: int, step: int) -> Tensor:
        return later(index, step) if step else torch.zeros(partition.numel)

    first, second = train(2, 2, inputs=inputs, feedback=False)[0]
    assert not first.any()
    truth = torch.stack([inputs(index, 1) for index in range(2)]).mean(dim=0)
    torch.testing.assert_close(second, truth, rtol=0, atol=1e-4)


@pytest.mark.parametrize("power", [-80, 80])
def test_huge_and_tiny_gradients_are_scaled_correctly(power: int) -> None:
    """Their squares are beyond the range of fp32."""
    numel, factor = layout(2).numel, 2.0**power
    scaled = train(2, 4, inputs=lambda index, step: normal(index, numel, step) * factor)[0]
    for usual, found in zip(train(2, 4)[0], scaled, strict=True):
        torch.testing.assert_close(found / factor, usual, rtol=1e-3, atol=1e-3)


@SAMPLED
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", LOW_RANK)
@pytest.mark.parametrize("factors", [FP32, Blockwise(4, 32)], ids=repr)
def test_a_non_finite_element_of_one_rank_reaches_all_ranks(factors: Compressor, name: str, bad: float) -> None:
    partition = layout(3)

    def inputs(index: int, step: int) -> Tensor:
        bucket = normal(index, partition.numel)
        if index == 1:
            bucket[next(segment.offset for segment in partition.segments if segment.parameter == name) + 7] = bad
        return bucket

    for (found,) in train(3, inputs=inputs, factors=factors):
        assert not part_of(found, name, partition).isfinite().all()
        if factors == FP32:
            assert all(part_of(found, other, partition).isfinite().all() for other in SHAPES if other != name)
    for index, (found,) in enumerate(train(3, operation="reduce_scatter", inputs=inputs, factors=factors)):
        own = gather(found, [segment for segment in partition.owned_by(index) if segment.parameter == name])
        assert own.isnan().all()


def bits_of_steps(bad_at: int | None) -> list[bytes]:
    """Return the bits of four applied steps of both operations, with a discarded NaN step before step `bad_at`."""
    partition = layout(2)

    def work(group: ProcessGroup, index: int) -> bytes:
        built, bits = build(group, factors=FP32), b""
        for step in range(4):
            if step == bad_at:
                bucket = normal(index, partition.numel, 9)
                bucket[3] = math.nan if index else 1.0
                built.reducer.all_reduce(bucket, partition, 0.5)
                built.end_step(applied=False)
            for operation in (built.reducer.all_reduce, built.reducer.reduce_scatter):
                bucket = normal(index, partition.numel, step)
                operation(bucket, partition, 0.5)
                bits += raw_bytes(bucket)
            built.end_step()
        return bits

    return run_threads(2, work)


def test_a_discarded_step_changes_nothing() -> None:
    usual = bits_of_steps(None)
    assert bits_of_steps(None) == usual
    assert bits_of_steps(0) == usual
    assert bits_of_steps(2) == usual


def names(partition: Partition) -> list[str]:
    return list(dict.fromkeys(segment.parameter for segment in partition.segments))


def test_the_result_does_not_depend_on_the_buckets() -> None:
    """The same gradients give the same means in one bucket and in two."""
    ranks, parts = 2, [layout(2, ["twin", "bias"]), layout(2, ["conv", "tall", "wide", "tiny"])]
    whole = layout(ranks)

    def work(group: ProcessGroup, index: int) -> list[tuple[Tensor, Tensor]]:
        steady, changing, pairs = build(group), build(group), []
        for step in range(4):
            bucket = normal(index, whole.numel, step)
            cuts = [parts, [whole]][step % 2]
            pieces = [torch.cat([part_of(bucket, name, whole).view(-1) for name in names(cut)]) for cut in cuts]
            steady.reducer.all_reduce(bucket, whole, 0.5)
            for piece, cut in zip(pieces, cuts, strict=True):
                changing.reducer.all_reduce(piece, cut, 0.5)
                pairs += [(part_of(piece, name, cut), part_of(bucket, name, whole)) for name in names(cut)]
            steady.end_step()
            changing.end_step()
        return pairs

    for mine, expected in run_threads(ranks, work)[0]:
        torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-4)


def owner_bytes(segments: Sequence[Segment], ranks: int) -> list[int]:
    """Return the number of bytes of each owner's elements in fp32."""
    return [sum(4 * segment.numel for segment in segments if segment.owner == rank) for rank in range(ranks)]


@pytest.mark.parametrize("operation", ["all_reduce", "reduce_scatter"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_meter_counts_factors_and_other_elements(ranks: int, operation: str) -> None:
    partition = layout(ranks)

    def work(group: ProcessGroup, index: int) -> int:
        built = build(group)
        getattr(built.reducer, operation)(normal(index, partition.numel), partition, 1.0)
        return built.meter.bytes_sent

    messages = [
        (owner_bytes(even_partition([("P", 2 * (4 + 6 + 6 + 24))], ranks).segments, ranks), True),
        (owner_bytes(even_partition([("Q", 2 * (27 + 20 + 20 + 5))], ranks).segments, ranks), True),
        (owner_bytes([s for s in partition.segments if s.parameter in ("bias", "tiny")], ranks), operation[0] == "a"),
    ]
    for index, sent in enumerate(run_threads(ranks, work)):
        there = sum(sum(sizes) - sizes[index] for sizes, _ in messages)
        back = sum((ranks - 1) * sizes[index] for sizes, returned in messages if returned)
        assert sent == (there + back if ranks > 1 else 0)


def test_the_first_basis_depends_on_the_seed_and_the_name() -> None:
    first, again, other = (train(2, seed=seed)[0][0] for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)

    def work(group: ProcessGroup, index: int) -> list[Tensor]:
        reducer = build(group).reducer
        return [reducer._start(Segment(name, 0, 40_000, 0, 0), torch.device("cpu")) for name in ("a", "b")]

    a, b = run_threads(1, work)[0]
    for sample in (a, b):
        assert abs(sample.mean()) < 0.03
        assert abs(sample.std() - 1) < 0.03
        assert abs((sample.abs() < 1).float().mean() - 0.6827) < 0.02
    assert abs(a @ b) / 40_000 < 0.03


@pytest.mark.slow
def test_state_does_not_grow_with_the_number_of_layouts() -> None:
    """Rarely used layers lead to buckets with any subset of the parameters."""
    names = list(SHAPES)
    layouts = [layout(1, [name for bit, name in enumerate(names) if number >> bit & 1]) for number in range(1, 64)]

    def work(group: ProcessGroup, rank: int) -> tuple[int, int, int | None]:
        built = build(group)
        for _ in range(2):
            for cut in [relabel(one, lambda owner: owner, 2) for one in layouts]:
                built.reducer.all_reduce(normal(rank, cut.numel), cut, 0.5)
                built.end_step()
        held = sum(numel for (_, _, numel), _ in built.warm.items())
        return len(built.reducer._starts), held, built.reducer.layout.cache_parameters()["maxsize"]

    for starts, held, bound in run_threads(2, work):
        assert starts == len(LOW_RANK)
        assert held == sum(2 * math.prod(SHAPES[name][1:]) for name in LOW_RANK)
        assert bound == LAYOUTS


def test_a_mean_of_low_rank_is_reconstructed_exactly() -> None:
    partition = layout(3)
    inputs = low_rank_inputs(partition, 3, 2)
    for step, found in enumerate(train(3, 3, inputs=inputs, feedback=False)[2]):
        truth = torch.stack([inputs(index, step) for index in range(3)]).mean(dim=0)
        torch.testing.assert_close(found, truth, rtol=0, atol=1e-4)


def test_a_rank_above_the_smaller_side_is_exact() -> None:
    partition = layout(2)
    truth = torch.stack([normal(index, partition.numel) for index in range(2)]).mean(dim=0)
    for found in train(2, rank=50, min_saving=0.1):
        torch.testing.assert_close(found[0], truth, rtol=0, atol=1e-5)


def test_error_feedback_reduces_the_accumulated_error() -> None:
    ranks, steps, partition = 2, 12, layout(2)

    def constant(index: int, step: int) -> Tensor:
        return normal(index, partition.numel)

    truth = torch.stack([constant(index, 0) for index in range(ranks)]).mean(dim=0)
    errors = {
        feedback: float((sum(train(ranks, steps, inputs=constant, feedback=feedback)[0]) - steps * truth).norm())
        for feedback in (True, False)
    }
    assert errors[True] < 0.5 * errors[False]


def test_the_scale_applies_to_the_sum() -> None:
    for mean, total in zip(train(3)[0], train(3, scale=1.0)[0], strict=True):
        torch.testing.assert_close(total, 3 * mean, rtol=1e-5, atol=1e-5)


def test_zero_rows_and_columns_stay_zero() -> None:
    partition = layout(2, ["wide"])

    def inputs(index: int, step: int) -> Tensor:
        matrix = normal(index, 120, step).view(6, 20)
        matrix[2], matrix[:, 5:] = 0, 0
        return matrix.view(-1)

    for found in train(2, 3, inputs=inputs, partition=partition)[0]:
        matrix = found.view(6, 20)
        assert matrix[:, :5].norm() > 0.1
        assert matrix[2].abs().max() < 1e-6
        assert matrix[:, 5:].abs().max() < 1e-6
