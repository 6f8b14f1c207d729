"""Numbers as people read them, and times, rates and addresses as they write them: the rest is refused by name."""

import math
from collections.abc import Callable

import pytest

from deepspeed_compress.config import numbers, parse_section
from deepspeed_compress.config.islands import check_address
from deepspeed_compress.errors import ConfigError


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


@pytest.mark.parametrize("text", ["1 ms", "500 ms", "30 s", "1.5 min", "8760 h"])
def test_times_that_clocks_take(text: str) -> None:
    assert 1e-3 <= numbers.seconds(text) <= 8760 * 3600


@pytest.mark.parametrize("text", ["90000000 h", "9" * 400 + " s", "٣ s", "0 s", "1 d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        numbers.seconds(text)


@pytest.mark.parametrize("read", [numbers.byte_rate, numbers.bit_rate])
@pytest.mark.parametrize("text", ["9" * 400 + " GB/s", "10 mb", "0 GB/s", "0 Gbit/s"])
def test_other_rates_are_refused(read: Callable[[str], float], text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        read(text)


@pytest.mark.parametrize("text", ["head:1", "10.0.0.1:65535", "head.example.org:29400", "a_b-c:080"])
def test_addresses(text: str) -> None:
    assert check_address(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "", "head", ":29400", "head:", "head:0", "head:65536", "head:294000", "head:-1", "head:1e3",
        "head:" + "9" * 5000,
        "::1:29400", "[::1]:29400", "http://head:29400", "user@head:29400", "he ad:29400", "head :29400", " head:29400",
        "head:29400\n", "head:٢٩", "h" * 300 + ":1",
    ],
)  # fmt: skip
def test_malformed_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"allowed: .*; write"):
        check_address(text)


@pytest.mark.parametrize(
    ("key", "value"),
    [("timeout", "90000000 h"), ("give_up", "1000000 h"), ("rendezvous", "head:294000"), ("minimum", 10**9)],
)
def test_settings_of_elastic_islands_are_bounded(key: str, value: object) -> None:
    elastic = {"rendezvous": "head:29400", key: value}
    section = {"gradients": {"method": "none"}, "islands": {"elastic": elastic}}
    with pytest.raises(ConfigError, match=f"/deepspeed_compress/islands/elastic/{key}"):
        parse_section({"deepspeed_compress": section})
