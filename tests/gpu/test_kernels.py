"""Every kernel against plain torch, at sizes around the borders of its tiles and beyond 2**31."""

from collections.abc import Callable

import pytest
import torch

from tests.gpu.comparisons import Comparison, check
from tests.gpu.operations import COMPARISONS
from tests.gpu.plugin import needs

pytestmark = [pytest.mark.gpu, needs("triton")]
RecordProperty = Callable[[str, object], None]

BORDERS = (0, 1, 2, 63, 65, 2047, 2048, 2049, 4096, 5000, 100_003, (1 << 22) + 7)
"""Sizes around the borders of tiles, which have 2048 elements or are blocks of up to 4096."""
INTERPRETED = (0, 1, 65, 2049, 5000)
HUGE = (1 << 31) + 5
SPARE = 1.3
"""Factor by which a comparison may exceed the memory it states, because chunks of plain torch need memory too."""
RESERVE = 8.0
"""Seconds before the end at which no new comparison is started."""


@pytest.fixture(autouse=True)
def _enough_time(device: torch.device, seconds_left: Callable[[], float]) -> None:
    if seconds_left() < RESERVE:
        pytest.skip("no time was left")


@pytest.mark.parametrize("row", COMPARISONS, ids=lambda row: row.name)
def test_bits(row: Comparison, device: torch.device, record_property: RecordProperty) -> None:
    from deepspeed_compress.compression.kernels import gpu  # must follow the setting of TRITON_INTERPRET

    sizes = BORDERS if device.type == "cuda" else INTERPRETED
    check(row, gpu, device, (*sizes, *row.sizes), record_property)


@pytest.mark.parametrize("row", [row for row in COMPARISONS if row.large], ids=lambda row: row.name)
def test_bits_beyond_31_bits_of_elements(
    row: Comparison, device: torch.device, record_property: RecordProperty
) -> None:
    from deepspeed_compress.compression.kernels import gpu

    if device.type != "cuda":
        pytest.skip("needs CUDA")
    torch.cuda.empty_cache()
    (free, _), needed = torch.cuda.mem_get_info(device), SPARE * row.bytes * HUGE
    if free < needed:
        pytest.skip(f"{free / 2**30:.0f} GiB are free, {needed / 2**30:.0f} are needed")
    check(row, gpu, device, (HUGE,), record_property)
