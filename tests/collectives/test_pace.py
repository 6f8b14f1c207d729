"""The rate limit: the mean rate equals the cap, one message is not delayed, and idle time earns no credit."""

import pytest

from deepspeed_compress.collectives.pace import Pace, make_pace
from deepspeed_compress.config import parse_section
from deepspeed_compress.config.models import Communication
from deepspeed_compress.errors import ConfigError


class FakeTime:
    """A clock that advances only when `sleep` is called, by `late` seconds more than requested."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self._late = late

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self._late


def make_limiter(rate: float, time: FakeTime) -> Pace:
    return Pace(rate, time.clock, time.sleep)


def test_only_messages_after_the_first_one_wait() -> None:
    time = FakeTime()
    pace = make_limiter(1000.0, time)
    pace.wait(500)
    assert time.now == 100.0
    pace.wait(100)
    assert time.now == 100.5
    pace.wait(1)
    assert time.now == pytest.approx(100.6)


def test_late_wakeups_do_not_accumulate() -> None:
    time = FakeTime(late=0.05)
    pace = make_limiter(1000.0, time)
    for _ in range(100):
        pace.wait(100)
    assert time.now - 100.0 == pytest.approx(99 * 0.1 + 0.05)


def test_idle_time_earns_no_credit() -> None:
    time = FakeTime()
    pace = make_limiter(1000.0, time)
    pace.wait(1000)
    time.now += 60.0
    for _ in range(11):
        pace.wait(100)
    assert time.now - 160.0 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("environment", "share"), [({"LOCAL_WORLD_SIZE": "4"}, 4), ({"LOCAL_SIZE": "2"}, 2)], ids=["torchrun", "deepspeed"]
)
def test_the_processes_of_a_host_share_its_rate(environment, share, monkeypatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pace = make_pace(Communication(max_rate="200 Mbit/s"))
    assert pace is not None
    assert pace.rate == 25e6 / share


def test_no_limiter_without_a_maximum_rate() -> None:
    assert make_pace(Communication()) is None


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"communication": {"max_rate": "fast"}}, '"fast" is not a rate in bits'),
        ({"communication": {"max_rate": "25 MB/s"}}, "is not a rate in bits"),
        ({"communication": {"max_rate": "1 Gbit/s"}, "gradients": {"method": "none"}}, "has no effect"),
        ({"communication": {"max_rate": "1 Gbit/s"}, "adaptive": {}}, "cannot be combined with adaptive"),
    ],
)
def test_an_invalid_or_ineffective_rate_is_an_error(section, words) -> None:
    with pytest.raises(ConfigError, match=f"/deepspeed_compress/communication/max_rate: .*{words}"):
        parse_section({"zero_optimization": {"stage": 1}, "deepspeed_compress": section})
