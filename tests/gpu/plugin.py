"""Options and fixtures of tests marked `gpu`, and a file of what they found.

A test passes, fails, is skipped ("not run"), or calls `pytest.xfail` if it works but misses its goal ("missed"). It may
record the properties `figure` and `goal`.
"""

import os
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.gpu.findings import Finding, append_finding

if TYPE_CHECKING:
    import torch

_SECONDS = 600.0
"""Time for the tests of a file, if no end is given."""
_SHOWN = 600
"""Characters to keep of an error."""


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("gpu", "tests marked gpu")
    device = "cuda (default), or cpu: at toy sizes, in Triton's interpreter"
    group.addoption("--gpu-device", choices=("cuda", "cpu"), default="cuda", help=device)
    until = "Unix time at which they must have ended (default: ten minutes for each file)"
    group.addoption("--gpu-until", type=float, metavar="TIME", help=until)
    group.addoption("--gpu-findings", type=Path, metavar="FILE", help="add a line of JSON for each of them")


def pytest_configure(config: pytest.Config) -> None:
    """Switch Triton to its interpreter before it is imported, and write findings if there is a file for them."""
    if config.getoption("gpu_device") == "cpu":
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    if file := config.getoption("gpu_findings"):
        config.pluginmanager.register(_Recorder(file))


class _Recorder:
    """Writer of findings."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            append_finding(self._file, finding_of(report))


def finding_of(report: pytest.TestReport) -> Finding:
    """Return the finding of a report. What was tested is the name of the test and of its case."""
    path, _, test = report.nodeid.partition("::")
    name, _, case = test.partition("[")
    words, properties = name.removeprefix("test_").replace("_", " "), dict(report.user_properties)
    figure, goal = (str(properties.get(key, "")) for key in ("figure", "goal"))
    what, part = f"{words}: {case[:-1]}" if case else words, Path(path).stem.removeprefix("test_")
    if report.passed:
        return Finding(what, "pass", figure, goal, part=part)
    if report.failed:
        return Finding(what, "fail", figure, goal, _error(report), part)
    if hasattr(report, "wasxfail"):
        return Finding(what, "missed", figure, goal, report.wasxfail.removeprefix("reason: "), part)
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return Finding(what, "not run", figure, goal, reason.removeprefix("Skipped: "), part)


def _error(report: pytest.TestReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    text = crash.message if crash is not None else report.longreprtext[-_SHOWN:]
    return str(text).removeprefix("Failed: ").strip()[:_SHOWN]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests if one of `packages` is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}, which --wheels may bring")


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> "torch.device":
    """Device of tests marked `gpu`. Skips them if it is missing."""
    import torch

    found = torch.device(pytestconfig.getoption("gpu_device"))
    if found.type == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    return found


@pytest.fixture(scope="module")
def seconds_left(pytestconfig: pytest.Config) -> Callable[[], float]:
    """Function that returns the seconds that are left to the tests of the file."""
    until = pytestconfig.getoption("gpu_until") or time.time() + _SECONDS
    return lambda: until - time.time()
