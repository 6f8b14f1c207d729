"""Whether hosts can be emulated here."""

from collections.abc import Callable
from typing import TypeVar

import pytest

from deepspeed_compress.tools.bench.links import ClusterError, check_machine


def obstacle() -> str | None:
    """Why there can be no hosts here."""
    try:
        check_machine()
    except ClusterError as error:
        return str(error)
    return None


FOUND = obstacle()
Test = TypeVar("Test", bound=Callable[..., None])


def needs_hosts(test: Test) -> Test:
    """Others may have hosts at the same time: their names hold the process that made them."""
    return pytest.mark.skipif(FOUND is not None, reason=str(FOUND))(test)


def measures_links(test: Test) -> Test:
    """On emulated hosts, with nothing beside it that slows what it measures."""
    return needs_hosts(pytest.mark.serial(test))
