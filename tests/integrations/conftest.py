"""The fork server starts with transformers and accelerate, unless it runs already."""

import multiprocessing
from multiprocessing import forkserver

import pytest


@pytest.fixture(scope="session", autouse=True)
def warm_ranks() -> None:
    preload = ["tests.support.preload", "tests.integrations.preload"]
    multiprocessing.get_context("forkserver").set_forkserver_preload(preload)
    forkserver.ensure_running()
