"""A coordinator in a thread, for the tests of exchanges."""

import threading
from collections.abc import Iterator

import pytest

from deepspeed_compress.local_sgd.coordinator.server import island_server


@pytest.fixture
def address() -> Iterator[str]:
    """Yield the address of a coordinator that keeps no state file."""
    server, ready = island_server(None, "127.0.0.1", 0), threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(120), "the server does not start"
    yield f"127.0.0.1:{server.port}"
    server.stop()
    thread.join(60)
