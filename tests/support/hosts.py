"""Whether hosts can be emulated here."""

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
needs_hosts = pytest.mark.skipif(FOUND is not None, reason=str(FOUND))
