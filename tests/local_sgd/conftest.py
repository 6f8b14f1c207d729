"""A coordinator in a thread, for the tests of exchanges."""

from collections.abc import Iterator

import pytest

from tests.support.coordinators import coordinator


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address of a coordinator that keeps no state file."""
    with coordinator() as found:
        yield found
