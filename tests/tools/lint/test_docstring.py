"""The docstring of a check has a fixed form."""

import pytest

from deepspeed_compress.tools.lint.rule import Proof, read_texts

DOCSTRING = """Summary.

    A reason
    on two lines.

    Wrong:
        {
          a: 1
        }
    Right: {"a":
        2}
    Context: {"world_size": 2}
    Proof: raises a
        pattern
    """


def test_all_texts_are_read() -> None:
    texts = read_texts(DOCSTRING)
    assert (texts["summary"], texts["reason"]) == ("Summary.", "A reason on two lines.")
    assert (texts["wrong"], texts["right"]) == ("{\n  a: 1\n}\n", '{\n  "a": 2\n}\n')
    assert (texts["context"], texts["proof"]) == ({"world_size": 2}, Proof("raises", "a pattern"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("Right:", "Good:"), "has no field Right"),
        (("Proof: raises", "Proof: refuses"), "'refuses' is not a kind of proof"),
        (("2}", "2"), "delimiter"),
    ],
)
def test_another_form_is_an_error(change: tuple[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_texts(DOCSTRING.replace(*change))
