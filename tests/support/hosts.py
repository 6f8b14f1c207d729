"""Marks of tests that need emulated hosts."""

from collections.abc import Callable
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
