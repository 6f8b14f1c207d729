"""Marks of tests that need emulated hosts."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from deepspeed_compress.tools.bench.links import ClusterError, check_machine


def obstacle() -> str | None:
    """Return the reason why hosts cannot be emulated on this machine, or None if they can."""
    try:
        check_machine()
    except ClusterError as error:
        return str(error)
    return None


FOUND = obstacle()
Test = TypeVar("Test", bound=Callable[..., None])


def needs_hosts(test: Test) -> Test:
    """Mark a test that needs emulated hosts. Several processes may have hosts at the same time."""
    return pytest.mark.skipif(FOUND is not None, reason=str(FOUND))(test)


def measures_links(test: Test) -> Test:
    """Mark a test that measures emulated links, and therefore runs alone."""
    return needs_hosts(pytest.mark.serial(test))
