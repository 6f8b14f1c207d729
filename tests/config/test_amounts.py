"""Times, rates and addresses: what is accepted works in clocks and sockets, and the rest is refused by name."""

from collections.abc import Callable

import pytest

from deepspeed_compress.config.islands import check_address
from deepspeed_compress.config.numbers import bit_rate, byte_rate, seconds
from deepspeed_compress.config.section import parse_section
from deepspeed_compress.errors import ConfigError


@pytest.mark.parametrize("text", ["1 ms", "500 ms", "30 s", "1.5 min", "8760 h"])
def test_times_that_clocks_take(text: str) -> None:
    assert 1e-3 <= seconds(text) <= 8760 * 3600


@pytest.mark.parametrize("text", ["90000000 h", "9" * 400 + " s", "٣ s", "0 s", "1 d"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="allowed: "):
        seconds(text)


@pytest.mark.parametrize("read", [byte_rate, bit_rate])
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
