"""Selection of the tests of a run, and a lock for tests that must run alone.

Marks:
    slow(*sources): not in a default run. CI runs those whose sources have changed since all tests passed. Sources are
        `sources`, the file and what it imports, and the package directory of its directory.
    sampled(parts, *sources): a default run has one of `parts` shares of the cases of every test, and at least one case.
        The others are slow.
    case_a_stage: a default run has one case per ZeRO stage. The others are slow.
    due: set here for slow tests that CI runs.
    serial: no other test runs at the same time.
    gpu: needs a GPU, or --gpu-device cpu.
"""

import contextlib
import fcntl
import gc
import math
import os
import secrets
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from deepspeed_compress.transport.credentials import SECRET
from tests.support.forks import warm_up
from tests.support.leftovers import own_port
from tests.support.selection import (
    ALL_PASSED,
    Selection,
    SlowTest,
    changed_paths,
    environment_of,
    last_pass,
    processor_features,
    processor_of,
    select,
    sources_of,
)

pytest_plugins = ["tests.gpu.plugin"]

SLOW_SECONDS, CASE_SECONDS = 10, 1
"""Estimated seconds of a core for a slow test, and for a slow case of a test of which a default run has other cases."""
LEFT_OUT = pytest.StashKey[Sequence[str]]()
"""Slow tests whose sources have changed, but for which a run of CI has no time."""
PROCESSOR = "TESTS_PROCESSOR"
"""Environment variable with a processor of `selection.PROCESSORS` to emulate."""


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


def pytest_report_header() -> list[str]:
    since = f"sources that changed since {last_pass()}" if changed_paths() is not None else "any sources"
    return [
        f"slow tests: those with {since} are due ({ALL_PASSED})",
        f"processor: {os.environ[PROCESSOR]} ({PROCESSOR})",
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
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in cases_beside_one_a_stage(items):
        item.add_marker(pytest.mark.slow)
    for item, sources in cases_beside_a_sample(items):
        item.add_marker(pytest.mark.slow(*sources))
    selection = select_slow(items)
    for item in items:
        if item.nodeid in selection.due:
            item.add_marker(pytest.mark.due)
    config.stash[LEFT_OUT] = selection.left_out if "due" in config.option.markexpr else ()


def select_slow(items: Sequence[pytest.Item]) -> Selection:
    """Choose from the slow tests the ones that CI runs."""
    in_default = {function_of(item) for item in items if not item.get_closest_marker("slow")}
    tests = []
    for item in items:
        if mark := item.get_closest_marker("slow"):
            try:
                sources = sources_of(item.path, mark.args)
            except ValueError as error:
                raise pytest.UsageError(f"mark of {item.nodeid}: {error}") from None
            seconds = CASE_SECONDS if function_of(item) in in_default else estimated_seconds(item)
            tests.append(SlowTest(item.nodeid, sources, seconds))
    return select(tests, changed_paths())


def function_of(item: pytest.Item) -> str:
    """Return the id of a test without its parameters."""
    return item.nodeid.partition("[")[0]


def estimated_seconds(item: pytest.Item) -> int:
    """Return the estimated seconds of a core of a test that no default run has. A test of minutes has a timeout."""
    timeout = item.get_closest_marker("timeout")
    return int(timeout.args[0]) // 10 if timeout else SLOW_SECONDS


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Tell the process that prints, if it is another one, what was left out."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = list(session.config.stash.get(LEFT_OUT, ()))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Keep what a process has left out. All leave the same out; one that died tells nothing."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out") or node.config.stash.get(
        LEFT_OUT, ()
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    left_out = Counter(name.partition("[")[0] for name in config.stash.get(LEFT_OUT, ()))
    if left_out:
        terminalreporter.section("slow tests left out")
        terminalreporter.line(
            f"{left_out.total()} slow tests with changed sources did not run, since CI has no time for them. "
            f"bash tests/run.sh --all runs all tests, and records in {ALL_PASSED} that they passed."
        )
        for function, cases in sorted(left_out.items()):
            terminalreporter.line(f"{cases:4} {function}")


def cases_beside_a_sample(items: Sequence[pytest.Item]) -> Iterator[tuple[pytest.Item, Sequence[str]]]:
    """Yield the cases that the mark `sampled` leaves to other runs, with its sources."""
    tests: dict[tuple[object, int, Sequence[str]], list[pytest.Item]] = defaultdict(list)
    for item in items:
        mark = item.get_closest_marker("sampled")
        others = item.get_closest_marker("slow") or item.get_closest_marker("case_a_stage")
        if isinstance(item, pytest.Function) and mark and not others:
            tests[item.obj, mark.args[0], mark.args[1:]].append(item)
    for (_, parts, sources), cases in tests.items():
        for item in sorted(cases, key=lambda case: crc32(case.nodeid.encode()))[math.ceil(len(cases) / parts) :]:
            yield item, sources


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
