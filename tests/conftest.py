"""Choice of the tests of quick runs and of CI, and a lock for tests that must run alone.

Marks:
    slow: not in CI.
    sampled(parts): CI has one of `parts` shares of the cases of every test, and at least one case. The others are slow.
    case_a_stage: CI has one case per ZeRO stage. The others are slow.
    ci: not in a quick run. Tests get this mark here: those that run alone, and in a file that starts ranks as processes
        all except one case of each of its first tests.
    serial: no other test runs at the same time.
    gpu: needs a GPU, or --gpu-device cpu.
"""

import contextlib
import fcntl
import gc
import math
import os
import secrets
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from zlib import crc32

import pytest

from deepspeed_compress.transport.credentials import SECRET
from tests.support.emulated_processors import environment_of, processor_features, processor_of
from tests.support.forks import warm_up
from tests.support.leftovers import own_port

pytest_plugins = ["tests.gpu.plugin"]

QUICK_TESTS = 2
"""Number of tests that a quick run has of a file that starts ranks as processes."""
PROCESSOR = "TESTS_PROCESSOR"
"""Environment variable with a processor of `emulated_processors.PROCESSORS` to emulate."""


def pytest_configure(config: pytest.Config) -> None:
    """Set the variables that all processes of a run must agree on, before any test runs."""
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


def pytest_report_header() -> str:
    return f"processor: {os.environ[PROCESSOR]} ({PROCESSOR})"


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
    for item in (*cases_beside_one_a_stage(items), *cases_beside_a_sample(items)):
        item.add_marker(pytest.mark.slow)
    for item in tests_beside_quick_ones(item for item in items if not item.get_closest_marker("slow")):
        item.add_marker(pytest.mark.ci)


def tests_beside_quick_ones(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the tests of CI that a quick run leaves out."""
    files: dict[object, dict[object, list[pytest.Item]]] = defaultdict(lambda: defaultdict(list))
    for item in items:
        if item.get_closest_marker("serial"):
            yield item
        elif isinstance(item, pytest.Function) and "run_forks" in vars(item.module):
            files[item.module][item.obj].append(item)
    for tests in files.values():
        for number, cases in enumerate(tests.values()):
            yield from in_fixed_order(cases)[1:] if number < QUICK_TESTS else cases


def in_fixed_order(cases: Iterable[pytest.Item]) -> list[pytest.Item]:
    """Return `cases` in an order that is always the same, and favors no value of a parameter."""
    return sorted(cases, key=lambda case: crc32(case.nodeid.encode()))


def cases_beside_a_sample(items: Sequence[pytest.Item]) -> Iterator[pytest.Item]:
    """Yield the cases that the mark `sampled` leaves to runs of all tests."""
    tests: dict[tuple[object, int], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        others = item.get_closest_marker("slow") or item.get_closest_marker("case_a_stage")
        if isinstance(item, pytest.Function) and mark and not others:
            tests[item.obj, mark.args[0]].append(item)
    for (_, parts), cases in tests.items():
        yield from in_fixed_order(cases)[math.ceil(len(cases) / parts) :]


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
    with machine_lock(shared, alone=item.get_closest_marker("serial") is not None):
        return (yield)


@contextlib.contextmanager
def machine_lock(directory: Path, alone: bool) -> Iterator[None]:
    """Hold a lock in files of a directory that test processes share: together with other tests, or alone.

    A test that needs it alone holds the gate while it waits, so that no other test overtakes.
    """
    kind = fcntl.LOCK_EX if alone else fcntl.LOCK_SH
    with locked(directory / "gate.lock", fcntl.LOCK_EX) as gate, locked(directory / "floor.lock", kind):
        fcntl.flock(gate, fcntl.LOCK_UN)
        yield


@contextlib.contextmanager
def locked(file: Path, kind: int) -> Iterator[int]:
    descriptor = os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield descriptor
    finally:
        os.close(descriptor)


@pytest.fixture
def port() -> Iterator[str]:
    """Yield a free port for the rendezvous of a job. Files that DeepSpeed leaves for it are removed."""
    with own_port() as chosen:
        yield str(chosen)
