"""Marks of tests that need emulated hosts or vLLM."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import pytest

from deepspeed_compress.tools.bench.links import ClusterError, check_machine
from tests.support.messages import refusal

OBSTACLE = refusal(ClusterError, check_machine)
"""Reason why hosts cannot be emulated on this machine; empty if they can."""
Test = TypeVar("Test", bound=Callable[..., None])


def needs_hosts(test: Test) -> Test:
    """Mark a test that needs emulated hosts. Several processes may have hosts at the same time."""
    return pytest.mark.skipif(bool(OBSTACLE), reason=OBSTACLE)(test)


def measures_links(test: Test) -> Test:
    """Mark a test that measures emulated links, and therefore runs alone."""
    return needs_hosts(pytest.mark.serial(test))


def needs_vllm(*others: str) -> list[pytest.MarkDecorator]:
    """Return the marks of tests that need vLLM and the packages `others`."""
    missing = [name for name in ("vllm", *others) if find_spec(name) is None]
    reason = f"{', '.join(missing)} not installed: run .ci/vllm.sh"
    return [pytest.mark.slow, pytest.mark.timeout(3600), pytest.mark.skipif(bool(missing), reason=reason)]
