"""Fixture of the tests that compile Triton kernels without a GPU."""

from collections.abc import Iterator

import pytest

from tests.support.triton_interpreter import Runner, process_with


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    """Start a process in which Triton compiles kernels instead of interpreting them."""
    environment = {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path_factory.mktemp("triton"))}
    with process_with(environment) as runner:
        yield runner
