"""Selection of the tests of a run, and a lock for tests that must run alone.

Marks:
    slow(parts, *sources): not in a default run. CI runs one of `parts` shares, chosen by the commit, and those whose
        sources have changed.
    sampled(parts, *sources): a default run has one of `parts` shares of the cases of every test, and at least one case.
        The others are slow, and CI runs them all if a source has changed.
    case_a_stage: a default run has one case per ZeRO stage. The others are slow.
    serial: no other test runs at the same time.
    gpu: needs a GPU, or --gpu-device cpu.
"""

import gc
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from deepspeed_compress.transport.secret import SECRET
from tests.support.forks import warm_up
from tests.support.leftovers import own_port
from tests.support.machine_lock import MachineLock
from tests.support.selection import changed, environment_of, head, in_share, processor_features, processor_of

pytest_plugins = ["tests.gpu.plugin"]

SHARES = 8
"""Number of shares for slow tests whose mark gives no other number."""
MOST_SHARES = 8
"""Largest number of shares for the cases that the mark `sampled` leaves to other runs."""
COMMIT = "TESTS_COMMIT"
"""Name of the environment variable with the commit that selects slow tests. All processes of a run must agree on it."""
PROCESSOR = "TESTS_PROCESSOR"
"""Environment variable with a processor of `rotation.PROCESSORS` to emulate, or a commit that selects one."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the variables that all processes of a run must agree on, before any test runs."""
    os.environ.setdefault(COMMIT, head())
    # torch's stores look up the names of their peers (`getnameinfo` in c10d/socket.cpp). If the name server loses a
    # query, that takes 5 s, which is longer than islands of the tests wait. With no attempts, only /etc/hosts is read.
    os.environ.setdefault("RES_OPTIONS", "attempts:0")
    # Servers and clients of the tests share this secret, so they do not meet other jobs of this user.
    os.environ.setdefault(SECRET, secrets.token_hex(32))
    try:
        chosen = processor_of(os.environ.get(PROCESSOR, "native"), processor_features())
    except ValueError as error:
        raise pytest.UsageError(f"{PROCESSOR}: {error}") from None
    os.environ |= {PROCESSOR: chosen, **environment_of(chosen)}


def pytest_pycollect_makemodule(parent: pytest.Collector) -> None:
    """Start the fork server while pytest captures output, because ranks write to the server's streams."""
    if hasattr(parent.config, "workerinput"):
        warm_up()


def pytest_report_header() -> list[str]:
    return [
        f"slow tests: the share of commit {os.environ[COMMIT]} is due (to repeat this run, set {COMMIT})",
        f"processor: {os.environ[PROCESSOR]} (to repeat this run, set {PROCESSOR}={os.environ[PROCESSOR]})",
    ]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[object]:
    """Collect without garbage collection, and exclude modules and tests from later ones, which would visit them all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Let the collector find everything again. Otherwise, Triton's bindings print leaked objects at exit."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    commit = int(os.environ[COMMIT], 16)
    for item in cases_beside_one_a_stage(items):
        item.add_marker(pytest.mark.slow)
    for item, (parts, *sources) in cases_beside_a_sample(items):
        item.add_marker(pytest.mark.slow(min(parts, MOST_SHARES), *sources))
    for item in items:
        slow = item.get_closest_marker("slow")
        if slow and is_due(item, commit, *slow.args):
            item.add_marker(pytest.mark.due)


def is_due(item: pytest.Item, commit: int, parts: int = SHARES, *sources: str) -> bool:
    """Return True if a slow test is in the share of `commit`, or one of its sources has changed."""
    return in_share(item.nodeid, parts, commit) or changed(sources)


def cases_beside_a_sample(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, tuple[Any, ...]]]:
    """Yield the cases that the mark `sampled` leaves to other runs, with its arguments."""
    tests: dict[tuple[object, tuple[Any, ...]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        others = item.get_closest_marker("slow") or item.get_closest_marker("case_a_stage")
        if isinstance(item, pytest.Function) and mark and not others:
            tests[item.obj, mark.args].append(item)
    for (_, arguments), cases in tests.items():
        kept = math.ceil(len(cases) / arguments[0])
        for item in sorted(cases, key=lambda case: crc32(case.nodeid.encode()))[kept:]:
            yield item, arguments


def cases_beside_one_a_stage(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield all cases except one per stage: the first case of the first stage, the second of the second, and so on."""
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
    with MachineLock(shared).hold(alone=item.get_closest_marker("serial") is not None):
        return (yield)


@pytest.fixture
def port() -> Iterator[str]:
    """Yield a free port for the rendezvous of a job. Files that DeepSpeed leaves for it are removed."""
    with own_port() as chosen:
        yield str(chosen)
