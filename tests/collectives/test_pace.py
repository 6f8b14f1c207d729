"""A cap on what is sent: the mean rate is the cap, one message is not slowed down, and nothing is saved up."""

import pytest

from deepspeed_compress.collectives.pace import Pace, make_pace
from deepspeed_compress.config import Communication, parse_section
from deepspeed_compress.errors import ConfigError


class Time:
    """A clock that moves when somebody sleeps, `late` seconds longer than asked for."""

    def __init__(self, late: float = 0.0) -> None:
        self.now = 100.0
        self._late = late

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now += seconds + self._late


def paced(rate: float, time: Time) -> Pace:
    return Pace(rate, time.clock, time.sleep)


def test_the_first_message_does_not_wait_and_the_next_waits_for_its_time() -> None:
    time = Time()
    pace = paced(1000.0, time)
    pace.wait(500)
    assert time.now == 100.0
    pace.wait(100)
    assert time.now == 100.5
    pace.wait(1)
    assert time.now == pytest.approx(100.6)


def test_sleeping_too_long_does_not_add_up() -> None:
    time = Time(late=0.05)
    pace = paced(1000.0, time)
    for _ in range(100):
        pace.wait(100)
    assert time.now - 100.0 == pytest.approx(99 * 0.1 + 0.05)


def test_silence_is_not_saved_up() -> None:
    time = Time()
    pace = paced(1000.0, time)
    pace.wait(1000)
    time.now += 60.0
    for _ in range(11):
        pace.wait(100)
    assert time.now - 160.0 == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("environment", "share"), [({"LOCAL_WORLD_SIZE": "4"}, 4), ({"LOCAL_SIZE": "2"}, 2)], ids=["torchrun", "deepspeed"]
)
def test_processes_of_a_host_share_its_rate(environment, share, monkeypatch) -> None:
    for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pace = make_pace(Communication(max_rate="200 Mbit/s"))
    assert pace is not None
    assert pace.rate == 25e6 / share


def test_nothing_is_made_without_a_cap() -> None:
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
def test_what_has_no_effect_is_an_error(section, words) -> None:
    with pytest.raises(ConfigError, match=f"/deepspeed_compress/communication/max_rate: .*{words}"):
        parse_section({"zero_optimization": {"stage": 1}, "deepspeed_compress": section})
