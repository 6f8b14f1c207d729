"""The gather of weight differences: equal replicas, vanishing errors, traffic, and non-finite values."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.collectives.gather import EXACT, DifferenceGather
from deepspeed_compress.collectives.messages import Channel, Messages
from deepspeed_compress.collectives.reducer import Run, StepClock, chunk_numel
from deepspeed_compress.compression.codec import Codec
from deepspeed_compress.compression.compressors import Blockwise, Cast, Compressor, TopK
from deepspeed_compress.compression.transforms import Hadamard
from deepspeed_compress.monitor import Meter
from tests.support.codecs import encode
from tests.support.threads import run_threads

SAMPLED = pytest.mark.sampled(8)

SIZES = (("norm", 7), ("matrix", 500), ("bias", 3), ("tied", 90), ("", 8))
NUMEL = sum(numel for _, numel in SIZES)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INT8 = Blockwise(bits=8, block_size=32)


@dataclass(frozen=True)
class Case:
    codec: Codec
    dtype: torch.dtype = torch.float32
    exact: tuple[str, ...] = ()
    chunk_numel: int = 1 << 24
    seed: int = 0

    def gather(self, group: ProcessGroup) -> DifferenceGather:
        channels = (Channel(Codec(Cast(self.dtype))), Channel(self.codec))
        messages = Messages(channels, {name: EXACT if name in self.exact else 1 for name, _ in SIZES})
        return DifferenceGather(group, SIZES, messages, Run(StepClock(), Meter(), self.seed), self.chunk_numel)


@dataclass
class History:
    """The weights of a rank after every step, and its gather."""

    held: list[Tensor] = field(default_factory=list)
    gather: DifferenceGather | None = None


def start(dtype: torch.dtype) -> Tensor:
    """Return the initial weights of all ranks."""
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)).to(dtype)


def walk(steps: int, moves: int | None = None) -> list[Tensor]:
    """Return the master weights after every step. They change by about 1 % in each of the first `moves` steps."""
    generator = torch.Generator().manual_seed(2)
    masters, path = start(torch.float32), []
    for step in range(steps):
        if moves is None or step < moves:
            masters = masters + 0.01 * torch.randn(NUMEL, generator=generator)
        path.append(masters)
    return path


def follow(group: ProcessGroup, case: Case, path: Sequence[Tensor]) -> History:
    """Gather the master weights of every step on one rank, which passes only its own part."""
    gather, held, seen = case.gather(group), start(case.dtype), History()
    for step, masters in enumerate(path):
        gather.run.clock.begin(step)
        gather.gather(held, gather.own(masters).clone())
        seen.held.append(held.clone())
    seen.gather = gather
    return seen


def on_ranks(ranks: int, case: Case, path: Sequence[Tensor]) -> list[History]:
    return run_threads(ranks, lambda group, rank: follow(group, case, path))


def assert_replicas(seen: Sequence[History]) -> None:
    """Check that all ranks have the same bits after every step, including NaN."""
    for other in seen[1:]:
        for mine, theirs in zip(seen[0].held, other.held, strict=True):
            assert mine.view(torch.uint8).tolist() == theirs.view(torch.uint8).tolist()


def error(held: Tensor, masters: Tensor) -> float:
    return float((held.double() - masters.double()).abs().max())


CODECS = (
    Codec(INT8),
    Codec(Blockwise(bits=4, block_size=32, stochastic=True)),
    Codec(TopK(0.1, 64)),
    Codec(Cast(torch.bfloat16)),
    Codec(Blockwise(bits=4, block_size=32), Hadamard(32)),
)


@SAMPLED
@pytest.mark.parametrize("codec", CODECS, ids=lambda codec: type(codec.compressor).__name__)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_replicas_are_equal_and_follow_the_master_weights(ranks: int, dtype: torch.dtype, codec: Codec) -> None:
    """The error stays bounded over thirty steps, although there is no residual."""
    path = walk(30)
    seen = on_ranks(ranks, Case(codec, dtype, exact=("tied",), chunk_numel=96), path)
    assert_replicas(seen)
    moved = error(path[-1], start(dtype))
    errors = [error(held, masters) for held, masters in zip(seen[0].held, path, strict=True)]
    assert moved > 0.15
    assert max(errors) < 0.08


def updated(compressor: Compressor, part: Tensor, wanted: Tensor) -> Tensor:
    values = part.float()
    compressor.decompress_add(encode(compressor, wanted - values), values, 1.0)
    return values.to(part.dtype)


@SAMPLED
@pytest.mark.parametrize("compressor", [INT8, TopK(0.1, 64)], ids=["int8", "topk"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gather_matches_a_recursion_in_one_process(dtype: torch.dtype, compressor: Compressor) -> None:
    """held <- round(held + C(master - held)) for each part, bit for bit."""
    path = walk(30)
    seen = on_ranks(4, Case(Codec(compressor), dtype), path)[0]
    parts = start(dtype).chunk(4)
    for held, masters in zip(seen.held, path, strict=True):
        parts = tuple(updated(compressor, part, wanted) for part, wanted in zip(parts, masters.chunk(4), strict=True))
        assert torch.equal(held, torch.cat(parts))


def cut(flat: Tensor) -> tuple[Tensor, ...]:
    return torch.split(flat, [numel for _, numel in SIZES])


@pytest.mark.parametrize("chunk_numel", [50, 1 << 24])
@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_parameters_equal_the_rounded_master_weights(dtype: torch.dtype, chunk_numel: int) -> None:
    names = ("norm", "tied")
    path = walk(3)
    seen = on_ranks(2, Case(Codec(Blockwise(bits=4, block_size=32)), dtype, names, chunk_numel), path)
    same = {
        name: torch.equal(found, wanted)
        for (name, _), found, wanted in zip(SIZES, cut(seen[1].held[-1]), cut(path[-1].to(dtype)), strict=True)
    }
    assert same["norm"]
    assert same["tied"]
    assert not same["matrix"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_the_meter_counts_the_bytes_of_the_payloads(ranks: int) -> None:
    part = NUMEL // ranks
    for case, payload in (
        (Case(Codec(INT8)), INT8.payload_bytes(part)),
        (Case(Codec(INT8), torch.bfloat16, tuple(name for name, _ in SIZES)), part * 2),
    ):
        for seen in on_ranks(ranks, case, walk(2)):
            assert seen.gather is not None
            assert seen.gather.run.meter.bytes_weights == 2 * payload * (ranks - 1)
            exact = 2 * part * case.dtype.itemsize * (ranks - 1)
            assert seen.gather.run.meter.bytes_weights_saved == exact - seen.gather.run.meter.bytes_weights


def test_the_size_of_a_round_is_bounded() -> None:
    """304 elements per rank in chunks of at most 96 elements give four messages of 76 elements."""
    case = Case(Codec(INT8), chunk_numel=96)
    for seen in on_ranks(2, case, walk(1)):
        assert seen.gather is not None
        assert seen.gather.run.meter.bytes_weights == 4 * INT8.payload_bytes(76)


@pytest.mark.parametrize(
    ("device", "ranks", "rounds"), [("cpu", 2, 32), ("xpu", 2, 32), ("cuda", 2, 1), ("cuda", 8, 2), ("cuda", 256, 32)]
)
def test_a_round_on_a_gpu_is_large_unless_many_ranks_send(device: str, ranks: int, rounds: int) -> None:
    group, run = Mock(), Run(StepClock(), Meter(), chunk_numel=chunk_numel(torch.device(device)))
    group.size.return_value, group.rank.return_value = ranks, 0
    gather = DifferenceGather(group, [("weight", ranks << 25)], Messages((Channel(Codec(INT8)),)), run)
    assert gather.rounds == rounds


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_non_finite_master_weights_spoil_their_block_until_a_synchronization(value: float) -> None:
    where = NUMEL - 40
    masters_with_fault = start(torch.float32)
    masters_with_fault[where] = value

    def work(group: ProcessGroup, rank: int) -> tuple[History, Tensor]:
        gather, held = Case(Codec(INT8), torch.bfloat16).gather(group), start(torch.bfloat16)
        gather.gather(held, gather.own(masters_with_fault))
        seen = History([held.clone()])
        gather.synchronise(held, gather.own(walk(1)[0]))
        return seen, held

    results = run_threads(2, work)
    assert_replicas([seen for seen, _ in results])
    broken = results[0][0].held[0].isfinite().logical_not().nonzero().flatten()
    assert where in broken.tolist()
    assert len(broken) <= 32
    assert all(torch.equal(held, walk(1)[0].to(torch.bfloat16)) for _, held in results)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_synchronization_is_exact(ranks: int, dtype: torch.dtype) -> None:
    masters = walk(1)[0]

    def work(group: ProcessGroup, rank: int) -> tuple[Tensor, int]:
        gather, held = Case(Codec(INT8), dtype).gather(group), start(dtype)
        for _ in range(2):
            gather.synchronise(held, gather.own(masters))
        return held, gather.run.meter.bytes_weights

    for held, sent in run_threads(ranks, work):
        assert torch.equal(held, masters.to(dtype))
        assert sent == 2 * (ranks - 1) * NUMEL // ranks * dtype.itemsize


def test_fp16_master_weights_are_not_changed() -> None:
    """The master weights are fp16 (DeepSpeed's fp16_master_weights_and_grads) and require gradients."""
    masters = start(torch.float16).requires_grad_()

    def work(group: ProcessGroup, rank: int) -> Tensor:
        gather, held = Case(Codec(INT8), torch.float16).gather(group), torch.zeros(NUMEL, dtype=torch.float16)
        for _ in range(4):
            gather.gather(held, gather.own(masters))
        return held

    before = masters.detach().clone()
    for held in run_threads(2, work):
        assert not held.requires_grad
        assert error(held, masters.detach()) <= torch.finfo(torch.float16).eps * float(before.abs().max())
    assert torch.equal(masters.detach(), before)


def test_random_numbers_depend_only_on_seed_step_and_rank() -> None:
    stochastic = Codec(Blockwise(bits=4, block_size=32, stochastic=True))
    first, again, other = (on_ranks(2, Case(stochastic, seed=seed), walk(3))[0].held for seed in (5, 5, 6))
    assert all(torch.equal(one, same) for one, same in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])

    def repeated(steps: Sequence[int]) -> Callable[[ProcessGroup, int], list[Tensor]]:
        def work(group: ProcessGroup, rank: int) -> list[Tensor]:
            gather, results = Case(stochastic).gather(group), []
            for step in steps:
                held = start(torch.float32)
                gather.run.clock.begin(step)
                gather.gather(held, gather.own(walk(1)[0]))
                results.append(held)
            return results

        return work

    one, same, later = run_threads(2, repeated((3, 3, 4)))[0]
    assert torch.equal(one, same)
    assert not torch.equal(one, later)


def begin_and_wait(group: ProcessGroup, case: Case, path: Sequence[Tensor]) -> list[Tensor]:
    """Do the same as `follow`, but send all messages first, and with two gathers in progress."""
    gathers, held = [case.gather(group) for _ in range(2)], [start(case.dtype) for _ in range(2)]
    seen = []
    for step, masters in enumerate(path):
        before = held[0].clone()
        pending = []
        for gather, one in zip(gathers, held, strict=True):
            gather.run.clock.begin(step)
            pending.append(gather.begin(one, gather.own(masters).clone(), len(pending) * gather.rounds))
        assert torch.equal(held[0], before), "the weights changed before they were waited for"
        for number in range(gathers[0].rounds):
            pending[0].wait_for(number)
            pending[1].wait_for(number)
        assert torch.equal(*held)
        seen.append(held[0].clone())
    return seen


@pytest.mark.parametrize("chunk_numel", [1 << 24, 64])
def test_a_gather_that_is_waited_for_later_gives_the_same_weights(chunk_numel: int) -> None:
    case, path = Case(Codec(INT8), exact=("tied",), chunk_numel=chunk_numel), walk(3)
    at_once = on_ranks(3, case, path)
    for seen, found in zip(at_once, run_threads(3, lambda group, rank: begin_and_wait(group, case, path)), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(seen.held, found, strict=True))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_vanish_if_the_master_weights_stay_constant(dtype: torch.dtype, ranks: int) -> None:
    """The error of int8 is 1/254 of the largest difference in a block, plus the rounding of the weights."""
    path = walk(10, moves=5)
    seen = on_ranks(ranks, Case(Codec(INT8), dtype), path)
    rounding = torch.finfo(dtype).eps / 2 * float(path[-1].abs().max())
    assert error(seen[0].held[4], path[4]) > rounding * 1.01 or dtype is not torch.float32
    assert error(seen[0].held[-1], path[-1]) <= rounding * 1.01


def test_top_k_sends_all_differences_within_a_few_steps() -> None:
    """Each step sends the quarter of the elements with the largest differences, so four steps send all."""
    path = walk(5, moves=1)
    seen = on_ranks(2, Case(Codec(TopK(0.25, 64))), path)
    left = [int((held - masters).abs().gt(1e-6).sum()) for held, masters in zip(seen[0].held, path, strict=True)]
    assert left[0] > NUMEL * 0.7
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_error_of_a_step_is_at_most_half_a_level_of_the_difference(dtype: torch.dtype) -> None:
    """The difference is taken to the previous weights, block by block, in float64."""
    path = walk(20)
    held = [start(dtype), *on_ranks(2, Case(Codec(INT8), dtype), path)[0].held]
    for (before, after), masters in zip(pairwise(held), path, strict=True):
        for first in range(0, NUMEL, NUMEL // 2):
            part = slice(first, first + NUMEL // 2)
            wanted, old, new = (tensor[part].double() for tensor in (masters, before, after))
            for block in range(0, NUMEL // 2, 32):
                rows = slice(block, block + 32)
                half_level = float((wanted - old)[rows].abs().max()) / 127 / 2
                rounding = torch.finfo(dtype).eps * float(wanted[rows].abs().max())
                assert error(new[rows], wanted[rows]) <= half_level * 1.0001 + rounding


def test_exact_parameters_beyond_fp16_become_infinite() -> None:
    masters = start(torch.float32)
    masters[2] = 1e6
    seen = on_ranks(2, Case(Codec(INT8), torch.float16, ("norm",)), [masters])
    assert_replicas(seen)
    assert seen[1].held[0].isfinite().logical_not().nonzero().tolist() == [[2]]
