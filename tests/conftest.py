"""Which tests run, when, and as which processor: shares of those that rotate, and turns of those that must be alone.

Marks: `slow` (CI runs these too, a third a day), `rotating(parts, *sources)` (resting but for one part a day, or when a
source has changed), `case_a_stage` (slow but for one case at each ZeRO stage), `serial` (no other test runs beside it).
"""

import os
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from deepspeed_compress.transport.secret import SECRET
from tests.support.forks import warm_up
from tests.support.leftovers import own_port
from tests.support.rotation import environment_of, is_due, processor_features, processor_of, today
from tests.support.turns import Turns

SLOW = pytest.mark.rotating(3).mark
DAY = "TESTS_DAY"
"""In the environment: the day by which tests rotate; the processes that run tests must agree on it."""
PROCESSOR = "TESTS_PROCESSOR"
"""Environment variable: a processor to compute as (`rotation.PROCESSORS`), or a commit, by which one is chosen."""


def pytest_configure(config: pytest.Config) -> None:
    """Set what all processes of the run must agree on, before any of them computes."""
    os.environ.setdefault(DAY, str(today()))
    # Servers and clients of the tests, and not what else this user runs.
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    try:
        chosen = processor_of(os.environ.get(PROCESSOR, "native"), processor_features())
    except ValueError as error:
        raise pytest.UsageError(f"{PROCESSOR}: {error}") from None
    os.environ |= {PROCESSOR: chosen, **environment_of(chosen)}


def pytest_pycollect_makemodule(parent: pytest.Collector) -> None:
    """Ranks write to where the server does, so it starts early, and where pytest captures."""
    if hasattr(parent.config, "workerinput"):
        warm_up()


def pytest_report_header() -> list[str]:
    return [
        "rotating tests: "
        f"the share of day {os.environ[DAY]}, and all whose sources changed in the last commit or since",
        f"processor: {os.environ[PROCESSOR]} (to repeat this run, set {PROCESSOR}={os.environ[PROCESSOR]})",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in cases_beside_one_a_stage(items):
        item.add_marker(pytest.mark.slow)
    for item in out_of_turn(items):
        item.add_marker(pytest.mark.resting)


def out_of_turn(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Slow ones have a share of the day too, where their mark says no other."""
    day = int(os.environ[DAY])
    for item in items:
        mark = item.get_closest_marker("rotating") or (item.get_closest_marker("slow") and SLOW)
        if mark and not is_due(item.nodeid, mark.args[0], mark.args[1:], day):
            yield item


def cases_beside_one_a_stage(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """The first stage keeps its first case, the second its second: together the stages see many."""
    tests: dict[object, dict[int, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("case_a_stage"):
            tests[item.obj][item.callspec.params["stage"]].append(item)
    for stages in tests.values():
        for number, (_, cases) in enumerate(sorted(stages.items())):
            kept = cases[number % len(cases)]
            yield from (case for case in cases if case is not kept)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    if not hasattr(item.config, "workerinput"):
        return (yield)
    shared = Path(item.config._tmp_path_factory.getbasetemp()).parent  # type: ignore[attr-defined]
    with Turns(shared).take(alone=item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.fixture
def port() -> Iterator[str]:
    """For the processes of a job to meet; what DeepSpeed leaves behind for it is removed."""
    with own_port() as chosen:
        yield str(chosen)
