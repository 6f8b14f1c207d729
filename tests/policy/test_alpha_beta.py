"""The fit of latency and bandwidth, against data whose parameters are known."""

import numpy as np
import pytest

from deepspeed_compress.policy.measurement import AlphaBeta, fit

SIZES = [2.0**power for power in range(12, 25, 2)]


@pytest.mark.parametrize("latency", [0.0, 1e-5, 3e-3])
@pytest.mark.parametrize("bandwidth", [1.25e7, 1.25e9])
def test_exact_times_give_their_parameters(latency: float, bandwidth: float) -> None:
    found = fit(SIZES, [latency + size / bandwidth for size in SIZES])
    assert found.latency == pytest.approx(latency, abs=1e-9)
    assert found.bandwidth == pytest.approx(bandwidth, rel=1e-6)
    assert found.error < 1e-6
    assert found.seconds(1e6) == pytest.approx(latency + 1e6 / bandwidth)


def test_ten_percent_noise_is_averaged_out() -> None:
    noise = np.random.default_rng(0).uniform(0.9, 1.1, len(SIZES))
    truth = AlphaBeta(1e-3, 1e-8)
    found = fit(SIZES, [truth.seconds(size) * factor for size, factor in zip(SIZES, noise, strict=True)])
    assert found.latency == pytest.approx(truth.latency, rel=0.1)
    assert found.bandwidth == pytest.approx(truth.bandwidth, rel=0.1)
    assert 0.01 < found.error < 0.1


def test_latency_and_time_per_byte_are_never_negative() -> None:
    """The data have a negative intercept, or times that fall with the size."""
    steep = fit([1e3, 1e6], [1e-6, 1e-2])
    assert steep.latency == 0
    assert steep.bandwidth == pytest.approx(1e8, rel=0.01)
    falling = fit([1e3, 1e6], [2e-3, 1e-3])
    assert falling.seconds_per_byte == 0
    assert falling.bandwidth == float("inf")
    assert 1e-3 < falling.latency < 2e-3


@pytest.mark.parametrize(
    ("sizes", "seconds"), [([1, 1], [1, 1]), ([1], [1]), ([1, 2], [1]), ([1, 2], [0, 1]), ([1, 2], [float("nan"), 1])]
)
def test_insufficient_or_invalid_data_raise(sizes: list[float], seconds: list[float]) -> None:
    with pytest.raises(ValueError, match="at least two different sizes"):
        fit(sizes, seconds)
