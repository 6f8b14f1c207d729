"""Numbers as people read them."""

import math

import pytest

from deepspeed_compress.config import numbers


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (numbers.shown(None, ".2f"), "-"),
        (numbers.shown(math.nan, ".2f"), "-"),
        (numbers.shown(1234.5, ",.3f", 1e-3), "1.234"),
        (numbers.size(99_999), "99,999 bytes"),
        (numbers.size(1_250_000), "1.250 MB"),
        (numbers.size(13_377_724), "13.4 MB"),
        (numbers.size(250e6), "250 MB"),
        (numbers.megabytes(1_234_567_890), "1,234.568 MB"),
        (numbers.gibibytes(3 * 2**29), "1.50 GiB"),
        (numbers.milliseconds(1234.56), "1,234.6 ms"),
        (numbers.shown(2.4, ".2f", suffix="x"), "2.40x"),
        (numbers.shown(math.inf, ".1f", suffix="x"), "-"),
        (numbers.change(-0.875), "-87.50%"),
        (numbers.change(math.nan), "-"),
        (numbers.span(1000, 1000), "1,000"),
        (numbers.span(1, 12_000), "1 to 12,000"),
        (numbers.rounded(1234), "1,234"),
        (numbers.rounded(1234.5), "1,234"),
        (numbers.rounded(0.0123456), "0.01235"),
    ],
)
def test_forms(text: str, expected: str) -> None:
    assert text == expected


def test_values_that_are_not_finite_are_null_in_json() -> None:
    assert numbers.finite({"a": [math.inf, 1.0], "b": {"c": math.nan, "d": "x"}}) == {
        "a": [None, 1.0],
        "b": {"c": None, "d": "x"},
    }
