"""Remedies for what users write who have not read the list of keys."""

from typing import Any

import pytest

from deepspeed_compress.config.section import find_problems


def problems(section: Any) -> dict[str, str]:
    """Return the remedy of each problem of a section, by the last keys of its place."""
    found = find_problems({"deepspeed_compress": section, "zero_optimization": {"stage": 1}})
    return {one.pointer.removeprefix("/deepspeed_compress"): one.remedy for one in found}


@pytest.mark.parametrize(
    ("section", "place", "remedy"),
    [
        ("auto", "", 'Write {"preset": "auto"}.'),
        ({"enabled": True}, "/enabled", "Write nothing: remove the key, since the section is on if it is there."),
        ({"enabled": False}, "/enabled", "Write no section, which turns the package off."),
        ({"gradients": {"enabled": False}}, "/gradients/enabled", 'Write "method": "none", which turns this off.'),
        ({"guard": {"enabled": False}}, "/guard/enabled", "Write no /deepspeed_compress/guard, which turns this off."),
        ({"bits": 4}, "/bits", 'Write "gradients": {"bits": 4}.'),
        ({"density": 0.1}, "/density", 'Write "gradients": {"method": "topk", "density": 0.1}.'),
        ({"method": "topk"}, "/method", 'Write "gradients": {"method": "topk"}.'),
        ({"method": "int4"}, "/method", 'Write "gradients": {"bits": 4}.'),
        ({"gradients": {"method": "int4"}}, "/gradients/method", 'Write "bits": 4, in place of "method".'),
        ({"weights": {"method": "INT8"}}, "/weights/method", 'Write "bits": 8, in place of "method".'),
        ({"gradients": {"method": "2-bit"}}, "/gradients/method", 'Write "bits": 2, in place of "method".'),
        ({"gradients": {"method": "1bit"}}, "/gradients/method", 'Write "sign", if you meant that.'),
        ({"gradients": {"method": "fp8"}}, "/gradients/method", 'Write "fp8_e4m3", if you meant that.'),
        ({"gradients": "int4"}, "/gradients", 'Write {"bits": 4}.'),
        ({"gradients": 4}, "/gradients", 'Write {"bits": 4}.'),
        ({"weights": "topk"}, "/weights", 'Write {"method": "topk"}.'),
        ({"gradients": "none"}, "/gradients", 'Write {"method": "none"}.'),
        ({"gradients": True}, "/gradients", "Write {} for the defaults."),
    ],
)
def test_a_guess_has_a_remedy(section: Any, place: str, remedy: str) -> None:
    assert problems(section) == {place: remedy}


def test_an_unknown_method_hides_only_what_is_next_to_it() -> None:
    """The method decides which keys an object has."""
    section = {"gradients": {"method": "magic", "bogus": 1}, "weights": {"method": "int4"}, "guard": {"x": 1}}
    assert problems(section).keys() == {"/gradients/method", "/weights/method", "/guard/x"}


def test_a_method_of_thousands_of_digits_is_refused_by_name() -> None:
    assert problems({"gradients": {"method": "9" * 5000}}).keys() == {"/gradients/method"}
