"""Which tests run, and when: shares of those that rotate, and turns of those that must be alone.

Marks: `slow` (CI runs these too), `rotating(parts, *sources)` (slow but for one part a day, or when a source has
changed), `serial` (no other test runs beside it).
"""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leftovers import own_port
from tests.support.rotation import is_due, today
from tests.support.turns import Turns

DAY = "TESTS_DAY"
"""In the environment: the day by which tests rotate; the processes that run tests must agree on it."""


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault(DAY, str(today()))


def pytest_report_header() -> str:
    return (
        f"rotating tests: the share of day {os.environ[DAY]}, and all whose sources changed in the last commit or since"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    day = int(os.environ[DAY])
    for item in items:
        mark = item.get_closest_marker("rotating")
        if mark and not is_due(item.nodeid, mark.args[0], mark.args[1:], day):
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    worker = getattr(item.config, "workerinput", None)
    if worker is None:
        return (yield)
    shared = Path(item.config._tmp_path_factory.getbasetemp()).parent  # type: ignore[attr-defined]
    with Turns(shared).take(alone=item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.fixture
def port() -> Iterator[str]:
    """For the processes of a job to meet; what DeepSpeed leaves behind for it is removed."""
    with own_port() as chosen:
        yield str(chosen)
