"""Kernels for all messages of a table: the bits of one message after another, in C++ and in Triton's interpreter."""

import importlib.util
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from deepspeed_compress.compression.kernels import for_device, reference
from deepspeed_compress.compression.kernels.arguments import (
    END,
    FIRST,
    SOURCE,
    BlockFormat,
    Keys,
    MessageTable,
    ResidualBuffers,
    aligned,
    next_key,
    single,
)
from tests.support.triton_interpreter import Runner, gpu_or_interpreter

NUMELS = (4097, 64, 1, 2048, 65, 2047, 130)
FORMS = {
    "8 bits": BlockFormat("absmax", 127, 8, 64),
    "4 bits": BlockFormat("absmax", 7, 4, 64),
    "4 bits, long blocks": BlockFormat("absmax", 7, 4, 2048),
    "four levels": BlockFormat("lloyd", 4, 2, 64),
    "eight levels": BlockFormat("eight", 10, 3, 64),
    "sign": BlockFormat("mean", 1, 1, 64),
    "norm": BlockFormat("norm", 7, 4, 64),
    "blocks of half bytes": BlockFormat("absmax", 7, 4, 33),
}
KEYS = Keys(2**63 + 0x9876543210, 2**40 + 5)


def table_of(sizes: list[int]) -> MessageTable:
    """Return a table of messages of `NUMELS` elements and `sizes` bytes, in descending order in the source."""
    rows, first, begin, source = [], 0, 0, sum(NUMELS) + 3
    for owner, (numel, size) in enumerate(zip(NUMELS, sizes, strict=True)):
        source -= numel
        rows.append((source, first, numel, begin, begin + size, owner, owner % 2))
        first, begin = first + -(-numel // 64) * 64, begin + size
    return MessageTable(torch.tensor(rows))


def block_table(form: BlockFormat) -> MessageTable:
    """Return a table of messages of scales and codes, each padded to whole numbers of fp32."""
    scales = [aligned(-(-numel // form.block_size) * form.scale_dtype.itemsize) for numel in NUMELS]
    return table_of([size + aligned(form.code_bytes(numel)) for size, numel in zip(scales, NUMELS, strict=True)])


def numbers(size: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator) * torch.randn(size, generator=generator).exp()
    x[10:300] = 0.0
    x[300:600] = -0.0
    return x.to(device)


def compare(device: torch.device, name: str, dtype: torch.dtype, residual: str, at: int, random: bool) -> str:
    """Return the results that differ from those of `reference`. Scales from fp64 sums may differ rarely."""
    kernels, form = kernels_of(device), replace(FORMS[name], scale_dtype=dtype)
    table = block_table(form)
    outputs = []
    for module, where in ((kernels, device), (reference, torch.device("cpu"))):
        x, out = numbers(table.ends[FIRST] + 64, 1, where), torch.full((table.ends[2],), 7, dtype=torch.uint8).to(where)
        buffers = None
        if residual:
            before = numbers(len(x), 2, where).to(getattr(torch, residual))
            buffers = ResidualBuffers(before, 0.9, torch.zeros_like(before))
        module.quantize_messages(x, at, form, out, table, KEYS if random else None, buffers)
        total = numbers(len(x), 3, where)
        rows = torch.stack([out] * 11)
        module.dequantize_messages(rows, form, table, total, at, 1 / 3, True)
        alone = torch.full_like(total, 5)
        module.dequantize_messages(rows[:1], form, table, alone, at, 0.5, False)
        outputs.append([one.cpu() for one in (out, total, alone, *((buffers.after,) if buffers else ()))])
    names = ("messages", "sums", "decoded", "residuals")
    pairs = zip(names, *outputs, strict=False)
    return ", ".join(name for name, one, other in pairs if not one.view(torch.uint8).equal(other.view(torch.uint8)))


def kernels_of(device: torch.device) -> ModuleType:
    """Return the C++ kernels in the test's process, else those in Triton."""
    import os

    if device.type == "cpu" and "TRITON_INTERPRET" not in os.environ:
        return for_device(device)
    from deepspeed_compress.compression.kernels import gpu

    return gpu


def compare_others(device: torch.device) -> list[str]:
    """Return which of casts, copies and Hadamard transforms differ from `reference`."""
    kernels, differing, cpu = kernels_of(device), [], torch.device("cpu")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        table = table_of([aligned(numel * dtype.itemsize) for numel in NUMELS])
        for at in (SOURCE, FIRST):
            found = []
            for module, where in ((kernels, device), (reference, cpu)):
                x = numbers(table.ends[FIRST] + 64, 1, where)
                x[5] = 1e38
                out, total = torch.full((table.ends[2],), 7, dtype=torch.uint8, device=where), x.clone()
                module.cast_messages(x, at, dtype, out, table)
                for add in (True, False):
                    module.add_cast_messages(torch.stack([out] * 3), dtype, table, total, at, 1 / 3, add)
                found.append((out.cpu(), total.cpu()))
            if not all(one.view(torch.uint8).equal(other.view(torch.uint8)) for one, other in zip(*found, strict=True)):
                differing.append(f"{dtype} {at}")
        for back in (False, True):
            results = []
            for module, where in ((kernels, device), (reference, cpu)):
                x = numbers(table.ends[FIRST] + 64, 1, where).to(dtype)
                results.append(torch.zeros_like(x))
                module.copy_runs(x, results[-1], table, back)
            if not results[0].cpu().view(torch.uint8).equal(results[1].view(torch.uint8)):
                differing.append(f"copy {dtype} {back}")
    for size in (1, 2, 64, 512):
        places, x = torch.tensor([3 * size, 0, 7 * size]), numbers(8 * size + 600, 1, cpu)
        one, other = torch.zeros_like(x, device=device), torch.zeros_like(x)
        kernels.hadamard_at(x.to(device), one, places.to(device), size)
        reference.hadamard_at(x, other, places, size)
        if not torch.allclose(one.cpu(), other, atol=2e-5, rtol=1e-5):
            differing.append(f"hadamard {size}")
    return differing


CASES = [
    (form, dtype, residual, at, random)
    for form in FORMS
    for dtype, residual, at, random in (
        (torch.float32, "bfloat16", FIRST, False),
        (torch.bfloat16, "float32", SOURCE, FORMS[form].kind in ("absmax", "norm")),
        (torch.float32, "", SOURCE, FORMS[form].kind in ("absmax", "norm")),
    )
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_cpu_kernels_have_the_bits_of_the_reference(case: tuple[str, torch.dtype, str, int, bool]) -> None:
    assert compare(torch.device("cpu"), *case) == ""


def test_other_cpu_kernels() -> None:
    assert compare_others(torch.device("cpu")) == []


@pytest.fixture(scope="module")
def run() -> Iterator[Runner]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    with gpu_or_interpreter() as runner:
        yield runner


@pytest.mark.sampled(8)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_triton_kernels_have_the_bits_of_the_reference(
    run: Runner, case: tuple[str, torch.dtype, str, int, bool]
) -> None:
    assert run(compare, *case) == ""


def test_other_triton_kernels(run: Runner) -> None:
    assert run(compare_others) == []


def test_keys_are_those_of_single_messages() -> None:
    from deepspeed_compress.compression.compressors import message_key, random_key

    keys = Keys(random_key(1, 2, 3, 4), 9)
    assert keys.of(5, 6) == message_key((1, 2, 3, 4, 5, 6), 9)
    assert next_key(0, 1) == random_key(1)
    for key in (0, 1, 2**32, 2**63 + 0x9876543210, 2**64 - 1):
        assert Keys.of_single(key).of(0, 0) == key


def test_sizes_are_checked_before_memory_is_read() -> None:
    form, table = FORMS["4 bits"], block_table(FORMS["4 bits"])
    x, out = torch.zeros(table.ends[FIRST]), torch.zeros(table.ends[2], dtype=torch.uint8)
    wrong = table.rows.clone()
    wrong[0, END] -= 4
    lost = table.rows.clone()
    lost[0, SOURCE] = -1
    for arguments in (
        (x[:-200], FIRST, out, table),
        (x, FIRST, out[:-1], table),
        (x, FIRST, out, MessageTable(wrong)),
        (x, SOURCE, out, MessageTable(lost)),
    ):
        source, at, target, rows = arguments
        with pytest.raises(ValueError, match=r"expected|message of"):
            for_device(x.device).quantize_messages(source, at, form, target, rows, None, None)
    with pytest.raises(ValueError, match="expected"):
        for_device(x.device).dequantize_messages(out[None, :8], form, single(4, 8), torch.zeros(3), FIRST, 1.0, True)
