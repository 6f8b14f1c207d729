import pytest

from deepspeed_compress.policy import DenseWarmUp


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_first_steps_are_dense_and_no_later_one(steps: int) -> None:
    warmup = DenseWarmUp(steps)
    assert [warmup.dense(step) for step in range(8)] == [True] * steps + [False] * (8 - steps)


def test_without_a_number_nothing_is_dense() -> None:
    assert not DenseWarmUp().dense(0)
