import numpy as np
import pytest

from deepspeed_compress.errors import DataError
from deepspeed_compress.training.data.tokens import TokenCache, Windows, eval_starts, split_windows, step_starts

CACHE = TokenCache(np.arange(1000, dtype=np.uint16), (0, 600, 605, 1000), 1000)


def windows(length: int = 10) -> tuple[Windows, Windows]:
    return split_windows(CACHE, length, 0.2)


def test_no_held_out_token_is_ever_trained_on() -> None:
    train, held_out = windows()
    trained = train.read(np.concatenate([step_starts(train, 50, 0, step) for step in range(60)]))
    evaluated = held_out.read(eval_starts(held_out, 100, 1).reshape(-1))
    assert np.intersect1d(trained, evaluated).size == 0
    assert np.unique(trained).size > 700
    assert evaluated.size == np.unique(evaluated).size


def test_windows_cover_each_file_and_never_cross_files() -> None:
    train, _ = windows(length=10)
    starts = step_starts(train, 20_000, 3, 1)
    allowed = {*range(480 - 10 + 1), *range(605, 921 - 10 + 1)}
    assert set(starts.tolist()) == allowed


def test_seed_and_step_determine_the_windows() -> None:
    train, _ = windows()
    first = step_starts(train, 16, seed=1, step=7)
    step_starts(train, 16, seed=1, step=8)
    assert np.array_equal(first, step_starts(train, 16, seed=1, step=7))
    assert not np.array_equal(first, step_starts(train, 16, seed=1, step=8))
    assert not np.array_equal(first, step_starts(train, 16, seed=2, step=7))


def test_evaluation_windows_are_fixed_and_limited_by_the_text() -> None:
    _, held_out = windows()
    assert eval_starts(held_out, 2, 4).shape == (2, 4)
    assert eval_starts(held_out, 99, 4).shape == (4, 4)
    assert np.array_equal(eval_starts(held_out, 2, 4), eval_starts(held_out, 2, 4))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(DataError, match=r"no file has 150 held-out tokens \(--seq-len\); all have 200 together"):
        split_windows(CACHE, 150, 0.2)
    with pytest.raises(DataError, match="no file has 500 train tokens"):
        split_windows(CACHE, 500, 0.2)
    with pytest.raises(DataError, match="19 windows, but a batch needs 20"):
        eval_starts(windows()[1], 1, 20)


def test_windows_are_read_as_int64() -> None:
    read = windows()[0].read(np.array([0, 605]))
    assert read.dtype == np.int64
    assert read.tolist() == [list(range(10)), list(range(605, 615))]
