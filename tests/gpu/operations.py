"""Table of comparisons, to which a row adds one. Every operation of the kernels module has at least one row."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial

import torch
from torch import Tensor

from deepspeed_compress.compression.compressors import FP8, BlockTopK, Compressor, Linear, RandomK, TopK
from deepspeed_compress.compression.kernels import reference
from deepspeed_compress.compression.kernels.arguments import (
    BEGIN,
    END,
    FIRST,
    NUMEL,
    TRITS,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    aligned,
)
from tests.gpu.comparisons import Comparison, Kernels, same_bits, within
from tests.support.kernels import dequantize_blocks_add, quantize_blocks

FORMS = {
    "8 bits": BlockFormat("absmax", 127, 8, 256),
    "4 bits": BlockFormat("absmax", 7, 4, 64),
    "4 bits, blocks of 4096": BlockFormat("absmax", 7, 4, 4096),
    "2 bits": BlockFormat("absmax", 1, 2, 32),
    "qsgd, 4 bits": BlockFormat("norm", 7, 4, 64),
    "qsgd, 8 bits": BlockFormat("norm", 127, 8, 1024),
    "sign": BlockFormat("mean", 1, 1, 64),
    "sign, blocks of 4096": BlockFormat("mean", 1, 1, 4096),
    "sign, blocks of 8": BlockFormat("mean", 1, 1, 8),
    "four levels": BlockFormat("lloyd", 4, 2, 64),
    "four levels, blocks of 2048": BlockFormat("lloyd", 4, 2, 2048),
    "eight levels": BlockFormat("eight", 10, 3, 64),
    "3 bits": BlockFormat("absmax", 3, 3, 64),
    "4 bits, blocks of 96": BlockFormat("absmax", 7, 4, 96),
}
"""Block formats by name. No kernel implements the last one; plain torch on the same device does."""
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
NAMES = {FP32: "fp32", BF16: "bf16", FP16: "fp16"}
KEY = 0x9ABC_DEF0_FFFF_F000
"""Key of random numbers, chosen so that the counter of elements exceeds 32 bits."""
DECAY, FACTOR = 0.95, 1 / 3
_RARE = 1e-3
"""Fraction of scales computed from sums that may differ in the last bit of fp32. Fewer differ in 16 bits."""
ONE = Fraction(1)
_ROOM = Fraction(64)
"""Bytes per element, more than any payload has, so that the payload is compared as a whole."""


def quantize(
    form: BlockFormat,
    numbers_type: torch.dtype,
    memory_type: torch.dtype | None,
    random: bool = False,
    decay: float = DECAY,
) -> Comparison:
    """Compare scales, individual codes and, with error feedback, the new residual."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        numbers = torch.full((-(-x.numel() // form.block_size),), 7.0, dtype=numbers_type, device=x.device)
        codes = torch.full((form.code_bytes(x.numel()),), 255, dtype=torch.uint8, device=x.device)
        memory = _memory(x, memory_type, decay)
        quantize_blocks(kernels, x, form, numbers, codes, _key(first) if random else None, memory)
        return (numbers, codes, *((memory.after,) if memory is not None else ()))

    kept = f", memory {NAMES[memory_type]}{_unless(decay, DECAY)}" if memory_type is not None else ""
    return Comparison(
        "quantize_messages",
        f"quantize {form_name(form)}, scales {NAMES[numbers_type]}{kept}{', stochastic' if random else ''}",
        run,
        (Fraction(1, form.block_size), code_rate(form), *((ONE,) if memory_type is not None else ())),
        unit=math.lcm(form.block_size, 8),
        rule=same_bits if form.kind == "absmax" else partial(_given_scales, form),
        large=form in (FORMS["4 bits"], FORMS["sign"]) and memory_type is BF16,
        bytes=22,
    )


def code_rate(form: BlockFormat) -> Fraction:
    """Return the bytes of codes per element. Blocks that do not fill bytes are padded, and compared as a whole."""
    return Fraction(form.bits, 8) if form.block_size % 8 == 0 else _ROOM


def form_name(form: BlockFormat) -> str:
    return next((name for name, one in FORMS.items() if one == form), str(form))


def _key(first: int) -> int:
    """Return the key under which element 0 has the random number of element `first` under `KEY`.

    The lower half of the key is the counter.
    """
    return KEY >> 32 << 32 | (KEY + first) & 0xFFFF_FFFF


def _unless(factor: float, usual: float) -> str:
    """Return how a name shows a `factor` that is not the `usual` one."""
    return "" if factor == usual else f", times {factor:g}"


def _memory(x: Tensor, kept: torch.dtype | None, decay: float = DECAY) -> ResidualBuffers | None:
    if kept is None:
        return None
    before = torch.where(x.abs() < 1e30, x * 0.37, 0.0).to(kept)
    return ResidualBuffers(before, decay, torch.full_like(before, 9.0))


def _given_scales(form: BlockFormat, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Compare results while allowing a few scales of sums to be one number apart.

    All results must have equal bits in the blocks whose scales are equal.
    """
    apart = _apart(actual[0], expected[0])
    far, near = int((apart > 1).sum()), int((apart == 1).sum())
    if far or near > max(1.0, _RARE * apart.numel()):
        return f"of {apart.numel():,} scales {near:,} are one number away, {far:,} more than that"
    return same_bits(*(_where_equal(form, apart == 0, *results[1:]) for results in (actual, expected)))


def _apart(some: Tensor, others: Tensor) -> Tensor:
    """Return how many representable numbers two tensors of scales, which are >= 0 or NaN, are apart."""
    integers = {2: torch.int16, 4: torch.int32}[some.itemsize]
    some, others = (one.nan_to_num(nan=-1.0, posinf=math.inf).view(integers).long() for one in (some, others))
    return (some - others).abs()


def _where_equal(form: BlockFormat, equal: Tensor, codes: Tensor, *after: Tensor) -> list[Tensor]:
    """Return individual codes and the residual, with 0 in the blocks that are not `equal`."""
    numel = after[0].numel() if after else codes.numel() * 8 // form.bits
    kept = equal.repeat_interleave(form.block_size)
    kept = torch.cat((kept, kept.new_ones(max(0, numel - kept.numel()))))[:numel]
    return [torch.where(kept, one, torch.zeros_like(one)) for one in (_unpacked(form, codes, numel), *after)]


def _unpacked(form: BlockFormat, codes: Tensor, numel: int) -> Tensor:
    return reference.unpack_codes(codes, form.bits, numel)


def dequantize(form: BlockFormat, numbers_type: torch.dtype, factor: float = FACTOR) -> Comparison:
    """Compare a sum to which a message of arbitrary bytes, times `factor`, was added."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        numbers = x[:: form.block_size].abs().to(numbers_type)
        codes = _codes(x, form)
        out = x * 0.5
        dequantize_blocks_add(kernels, numbers, codes, form, out, factor)
        return (out,)

    return Comparison(
        "dequantize_messages",
        f"decode {form_name(form)}, scales {NAMES[numbers_type]}{_unless(factor, FACTOR)}",
        run,
        (ONE,),
        unit=math.lcm(form.block_size, 8),
        large=form in (FORMS["4 bits"], FORMS["sign"]) and numbers_type is FP32 and factor == FACTOR,
        bytes=20,
    )


def _codes(x: Tensor, form: BlockFormat) -> Tensor:
    """Return arbitrary packed codes for as many elements as `x` has."""
    if form.kind != "ternary":
        return _bytes(x, form.bits)
    used = (block[: -(-block.numel() // TRITS)] for block in x.split(form.block_size))
    return _low_bits(torch.cat(tuple(used))).to(torch.uint8)


def _bytes(x: Tensor, bits: int) -> Tensor:
    """Return one byte per 8 / `bits` elements of `x`, from the low bits of the mantissas.

    Of eight elements, the first `bits` are used. A slice of `x` that starts at a multiple of eight elements gives the
    corresponding slice of the result.
    """
    whole = torch.cat((_low_bits(x), torch.zeros(-x.numel() % 8, dtype=torch.int32, device=x.device))).to(torch.uint8)
    return whole.view(-1, 8)[:, :bits].flatten()[: -(-x.numel() * bits // 8)].contiguous()


def _low_bits(x: Tensor) -> Tensor:
    return x.view(torch.int32) & 0xFFFF


def pack_bits(width: int) -> Comparison:
    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        values = (_low_bits(x) & (1 << width) - 1).long()
        packed = torch.full((-(-x.numel() * width // 8),), 255, dtype=torch.uint8, device=x.device)
        kernels.pack_bits(values, width, packed)
        return packed, kernels.unpack_bits(packed, width, x.numel())

    rates = (Fraction(width, 8), ONE)
    return Comparison("pack_bits", f"pack and unpack {width} bits", run, rates, unit=8, large=width == 11, bytes=26)


def pack_codes(width: int) -> Comparison:
    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        packed = torch.full((-(-x.numel() * width // 8),), 255, dtype=torch.uint8, device=x.device)
        kernels.pack_codes(_low_bits(x).to(torch.uint8), width, packed)
        return packed, kernels.unpack_codes(packed, width, x.numel())

    return Comparison("pack_codes", f"pack and unpack codes of {width} bits", run, (Fraction(width, 8), ONE), unit=8)


def _cast(out_type: torch.dtype, kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    out = torch.full_like(x, 9.0, dtype=out_type)
    kernels.cast(x, out)
    return (out,)


def _add_cast(out_type: torch.dtype, kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    values, out = x.clamp(-6e4, 6e4).to(out_type), x * 0.5
    kernels.add_cast(values, out, FACTOR)
    return (out,)


def _square_norm(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    return (kernels.square_norm(x).view(1),)


def _uniform(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    return (kernels.uniform(x.numel(), _key(first), x.device),)


def top_k(width: int, k: int) -> Comparison:
    """Compare the indices of the largest elements per row. The last elements, which do not fill a row, are left out."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        rows = x[: x.numel() // width * width].view(-1, width)
        return (kernels.top_k_rows(rows, k),)

    return Comparison(
        "top_k_rows", f"top {k} of rows of {width}", run, (Fraction(1, width),), unit=width,
        sizes=(3 * width,), large=width == 4096, bytes=6,
    )  # fmt: skip


def top_k_of_sum(width: int, k: int, kept: torch.dtype) -> Comparison:
    """Compare the same for the sum of input and residual."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        x = x[: x.numel() // width * width]
        memory = _memory(x, kept)
        assert memory is not None
        columns, values = kernels.top_k_rows_of_sum(x.view(-1, width), k, memory)
        return columns, values, memory.after.view(-1, width)

    return Comparison(
        "top_k_rows_of_sum", f"top {k} of rows of {width}, memory {NAMES[kept]}", run, (Fraction(1, width),) * 3,
        unit=width, sizes=(3 * width,), large=width == 4096, bytes=22,
    )  # fmt: skip


def _rows(x: Tensor, width: int = 64) -> Tensor:
    return x[: x.numel() // width * width].view(-1, width)


def _quantize_rows(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    rows = _rows(x)
    return (kernels.quantize_rows(rows, rows.abs().amax(dim=1), 7, None),)


def _quantize_rows_between(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    rows = _rows(x)
    return (kernels.quantize_rows_between(rows, rows.amin(dim=1), rows.amax(dim=1), 7, None),)


def _dequantize_rows_add(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    rows = _rows(x)
    out = rows * 0.5
    kernels.dequantize_rows_add(rows[:, 0].abs(), _low_bits(rows).to(torch.int8), out, FACTOR)
    return (out,)


def tiles(operation: str, height: int, width: int) -> Comparison:
    """Compare the change of basis and its inverse."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        given = x[: x.numel() // (height * width) * height * width].view(-1, 1, height, width)
        there, back = torch.empty_like(given), torch.empty_like(given)
        getattr(kernels, operation)(given, there, False)
        getattr(kernels, operation)(there, back, True)
        return there, back

    rates = (Fraction(1, height * width),) * 2
    return Comparison(
        operation, f"{operation} {height} x {width}", run, rates, unit=height * width, rule=within(2e-6), plain=True,
        sizes=(3 * height * width,),
    )  # fmt: skip


_MESSAGE = 4096
"""Number of elements of each message of a table, except the last one."""


def _table(numel: int, first: int, size: Callable[[int], int]) -> MessageTable:
    """Return a table of the messages of `numel` elements, of which `size` gives the bytes.

    Keys are those of the messages of a longer vector, in which these are the elements from `first` on.
    """
    rows, end = [], 0
    for begin in range(0, numel, _MESSAGE):
        count = min(_MESSAGE, numel - begin)
        rows.append((begin, begin, count, end, end + size(count), (first + begin) // _MESSAGE, 1))
        end += size(count)
    return MessageTable(torch.tensor(rows, dtype=torch.int64).view(-1, 7))


def _fields(messages: Tensor, form: BlockFormat, table: MessageTable) -> tuple[Tensor, Tensor]:
    """Return all scales and all codes of messages, with the padding of each."""
    rows = [(row[BEGIN], row[END], aligned(form.scale_bytes(row[NUMEL]))) for row in table.values]
    scales = [messages[begin : begin + size] for begin, _, size in rows]
    codes = [messages[begin + size : end] for begin, end, size in rows]
    return torch.cat([messages[:0], *scales]).view(form.scale_dtype), torch.cat([messages[:0], *codes])


def _new_messages(x: Tensor, table: MessageTable) -> Tensor:
    return torch.full((table.ends[2],), 255, dtype=torch.uint8, device=x.device)


def quantize_messages(form: BlockFormat, numbers_type: torch.dtype, kept: torch.dtype | None) -> Comparison:
    """Compare scales and codes, padded as they are; with error feedback, rounding is stochastic."""
    sent = replace(form, scale_dtype=numbers_type)

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        table, memory = _table(x.numel(), first, sent.message_bytes), _memory(x, kept)
        out, keys = _new_messages(x, table), Keys(KEY, 5) if memory is not None else None
        kernels.quantize_messages(x, FIRST, sent, out, table, keys, memory)
        return (*_fields(out, sent, table), *((memory.after,) if memory is not None else ()))

    name = f"quantize messages {form_name(form)}, scales {NAMES[numbers_type]}"
    rates = (Fraction(1, form.block_size), code_rate(form), *((ONE,) if kept is not None else ()))
    more = f", memory {NAMES[kept]}, stochastic" if kept is not None else ""
    return Comparison("quantize_messages", name + more, run, rates, unit=_MESSAGE)


def dequantize_messages(form: BlockFormat, numbers_type: torch.dtype, count: int) -> Comparison:
    """Compare sums to which the messages of `count` ranks were added, and those that they overwrite."""
    sent = replace(form, scale_dtype=numbers_type)

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        table, outs = _table(x.numel(), first, sent.message_bytes), (x * 0.5, x * 0.5)
        payloads = torch.stack([_new_messages(x, table) for _ in range(count)])
        for number, payload in enumerate(payloads):
            given = x * (1.0 + 0.25 * number)
            reference.quantize_messages(given, FIRST, sent, payload, table, None, None)
        for out, add in zip(outs, (True, False), strict=True):
            kernels.dequantize_messages(payloads, sent, table, out, FIRST, FACTOR, add)
        return outs

    name = f"decode messages of {count} ranks {form_name(form)}, scales {NAMES[numbers_type]}"
    return Comparison("dequantize_messages", name, run, (ONE, ONE), unit=_MESSAGE)


def cast_messages(kind: torch.dtype) -> Comparison:
    """Compare uncompressed messages, with their padding."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        table = _table(x.numel(), first, lambda numel: aligned(numel * kind.itemsize))
        out = _new_messages(x, table)
        kernels.cast_messages(x, FIRST, kind, out, table)
        return (out.view(kind),)

    return Comparison("cast_messages", f"cast messages to {NAMES[kind]}", run, (ONE,), unit=_MESSAGE)


def add_cast_messages(kind: torch.dtype) -> Comparison:
    """Compare sums to which uncompressed messages of two ranks were added, and those that they overwrite."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        table = _table(x.numel(), first, lambda numel: aligned(numel * kind.itemsize))
        payloads, outs = torch.stack([_new_messages(x, table) for _ in range(2)]), (x * 0.5, x * 0.5)
        for payload in payloads:
            reference.cast_messages(x.clamp(-6e4, 6e4), FIRST, kind, payload, table)
        for out, add in zip(outs, (True, False), strict=True):
            kernels.add_cast_messages(payloads, kind, table, out, FIRST, FACTOR, add)
        return outs

    return Comparison("add_cast_messages", f"add messages in {NAMES[kind]}", run, (ONE, ONE), unit=_MESSAGE)


def _copy_runs(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
    table, there, back = _table(x.numel(), first, int), torch.zeros_like(x), torch.zeros_like(x)
    kernels.copy_runs(x, there, table, False)
    kernels.copy_runs(x, back, table, True)
    return there, back


def hadamard_at(size: int) -> Comparison:
    """Compare the change of basis of whole blocks."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        out, places = torch.zeros_like(x), torch.arange(0, x.numel() // size * size, size)
        kernels.hadamard_at(x, out, places.to(x.device), size)
        return (out,)

    name = f"hadamard_at of blocks of {size}"
    return Comparison("hadamard_at", name, run, (ONE,), unit=size, rule=within(2e-6), plain=True)


def compressor(name: str, one: Compressor) -> Comparison:
    """Compare the payload of a compressor and its decoded values, whichever kernels it uses."""

    def run(kernels: Kernels, x: Tensor, first: int) -> tuple[Tensor, ...]:
        payload = torch.full((one.payload_bytes(x.numel()),), 255, dtype=torch.uint8, device=x.device)
        one.compress(x, payload, KEY)
        out = torch.zeros_like(x)
        one.decompress_add(payload, out, FACTOR)
        return (payload, out)

    return Comparison("compressor", f"{name}, payload and decoded", run, (_ROOM, ONE), promised=False)


_KINDS = ("8 bits", "4 bits", "qsgd, 4 bits", "sign", "four levels", "eight levels")
"""Names of a form of each kind."""


def _quantizations() -> Iterator[Comparison]:
    """Yield every form with and without error feedback, and all dtypes and roundings for one form of each kind."""
    for form in FORMS.values():
        yield quantize(form, FP32, None)
        yield quantize(form, BF16, BF16, random=form.kind in ("absmax", "norm"))
    for name in _KINDS:
        yield quantize(FORMS[name], FP16, FP32)
        yield quantize(FORMS[name], FP32, FP32, decay=1.0)
    yield quantize(FORMS["4 bits"], FP32, None, random=True)
    yield quantize(FORMS["4 bits"], BF16, BF16)


COMPARISONS: Sequence[Comparison] = (
    *_quantizations(),
    *(dequantize(form, FP32) for form in FORMS.values()),
    *(dequantize(FORMS[name], FP32, factor) for name in _KINDS for factor in (1.0, -1.0)),
    *(dequantize(FORMS[name], kind) for name in ("4 bits", "sign", "four levels") for kind in (BF16, FP16)),
    *(top_k(*shape) for shape in ((1, 1), (7, 1), (64, 3), (64, 64), (256, 3), (1000, 10), (4096, 41), (8192, 82))),
    *(
        Comparison("cast", f"cast to {NAMES[kind]}", partial(_cast, kind), (ONE,), large=kind is BF16, bytes=7)
        for kind in (FP32, BF16, FP16)
    ),
    *(
        Comparison("add_cast", f"add {NAMES[kind]}", partial(_add_cast, kind), (ONE,), large=kind is BF16, bytes=15)
        for kind in (FP32, BF16, FP16)
    ),
    Comparison("square_norm", "sum of squares", _square_norm, (_ROOM,), rule=within(1e-5), plain=True, promised=False),
    Comparison("uniform", "uniform numbers", _uniform, (ONE,), large=True, bytes=9),
    *(pack_bits(width) for width in (3, 11)),
    pack_codes(4),
    *(top_k_of_sum(width, k, kept) for width, k in ((64, 7), (4096, 30)) for kept in (FP32, BF16)),
    Comparison("quantize_rows", "rows to 4 bits", _quantize_rows, (Fraction(1, 64),), unit=64),
    Comparison("quantize_rows_between", "rows between bounds", _quantize_rows_between, (Fraction(1, 64),), unit=64),
    Comparison("dequantize_rows_add", "rows added", _dequantize_rows_add, (Fraction(1, 64),), unit=64),
    *(tiles("dct_tiles", height, width) for height, width in ((1, 64), (64, 64), (12, 40))),
    *(tiles("hadamard_tiles", height, width) for height, width in ((1, 64), (32, 64), (64, 64))),
    quantize_messages(FORMS["8 bits"], FP32, None),
    quantize_messages(FORMS["4 bits"], BF16, BF16),
    dequantize_messages(FORMS["8 bits"], FP32, 1),
    dequantize_messages(FORMS["4 bits"], BF16, 9),
    *(cast_messages(kind) for kind in (FP32, BF16, FP16)),
    *(add_cast_messages(kind) for kind in (FP32, BF16, FP16)),
    Comparison("copy_runs", "runs copied", _copy_runs, (ONE, ONE), unit=_MESSAGE),
    *(hadamard_at(size) for size in (64, 512)),
    compressor("fp8 e4m3", FP8("e4m3")),
    compressor("fp8 e5m2", FP8("e5m2", 32)),
    compressor("linear, 4 bits", Linear(bits=4, block_size=32)),
    compressor("top-k", TopK(0.05, 64)),
    compressor("top-k of all", TopK(0.05, scope="tensor")),
    compressor("random-k", RandomK(0.1, 64)),
    compressor("block top-k", BlockTopK(0.25, 64, 8)),
)
"""All comparisons in the order of the table."""


def few() -> list[Comparison]:
    """Return the first and the last row of every operation."""
    first, last = ({row.operation: row for row in rows} for rows in (reversed(COMPARISONS), COMPARISONS))
    return [row for operation in last for row in dict.fromkeys((first[operation], last[operation]))]
