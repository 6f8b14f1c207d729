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
    """Emulated hosts have names of which a machine has one set, and links whose rates are measured: one at a time."""
    return pytest.mark.skipif(FOUND is not None, reason=str(FOUND))(pytest.mark.serial(test))
