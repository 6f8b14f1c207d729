"""Updates that are interrupted while they wait for requests, and changes that do not fit into memory."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.backends.deepspeed.rollout import _open
from deepspeed_compress.errors import ConfigError, RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver, receiver
from deepspeed_compress.rollout.request_lock import RequestLock


def test_an_update_that_is_interrupted_while_it_waits_lets_requests_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C: requests would wait forever, and their threads would keep the process alive."""
    lock, waits = RequestLock(), list[Any]()
    wait_for = lock._changed.wait_for

    def interrupted(predicate: Any) -> Any:
        waits.append(predicate)
        if len(waits) == 2:
            raise KeyboardInterrupt
        return wait_for(predicate, timeout=5)

    with monkeypatch.context() as patched:
        patched.setattr(lock._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), lock.pause():
            pytest.fail("the update does not wait")
    assert not lock._paused
    with lock.request():
        pass


def test_a_request_inside_of_another_one_does_not_wait_for_an_update() -> None:
    lock = RequestLock()

    def updates() -> None:
        with lock.pause():
            pass

    def requests() -> None:
        with lock.request():
            update.start()
            while not lock._paused:
                pass
            with lock.request():
                pass

    request, update = (threading.Thread(target=work, daemon=True) for work in (requests, updates))
    request.start()
    request.join(10)
    assert not request.is_alive()
    update.join(10)
    assert not lock._paused


def test_overlapping_coroutines_let_an_update_run() -> None:
    lock, order = RequestLock(), list[str]()

    def pause() -> None:
        with lock.pause():
            order.append("update")

    async def request() -> None:
        async with lock.request():
            order.append("request")
            await asyncio.sleep(0.05)
            # A request inside of another one does not wait.
            async with lock.request():
                pass

    async def serve() -> None:
        update = threading.Thread(target=pause, daemon=True)
        running = [asyncio.create_task(request())]
        await asyncio.sleep(0)
        update.start()
        while not lock._paused:
            await asyncio.sleep(0)
        # There is always a request that runs or waits.
        for _ in range(20):
            running.append(asyncio.create_task(request()))
            await asyncio.sleep(0.02)
        await asyncio.gather(*running)
        update.join(60)

    asyncio.run(asyncio.wait_for(serve(), 60))
    assert order == ["request", "update", *["request"] * 20]


def test_coroutines_that_could_not_wait_are_refused() -> None:
    lock = RequestLock()

    async def request(seconds: float) -> None:
        with lock.request(), lock.request():
            await asyncio.sleep(seconds)

    async def serve() -> None:
        first = asyncio.create_task(request(0.2))
        await asyncio.sleep(0)
        with pytest.raises(RolloutError, match="async with"):
            await request(0)
        await first
        await request(0)

    asyncio.run(serve())
    assert not lock._requests


def test_a_request_that_ends_in_another_thread_ends() -> None:
    """As with generators that a web framework runs in its pool of threads."""
    lock = RequestLock()
    request = lock.request()
    for step in (request.__enter__, request.__exit__):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join(60)
    with lock.pause():
        pass


class Observed(DirectoryStore):
    """Store that notes for each part of changes whether the module is already being changed."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.receiver: Any = None
        self.changing: list[bool] = []

    def get(self, name: str) -> bytes:
        if "changes" in name:
            self.changing.append(self.receiver.version is None)
        return super().get(name)


@pytest.mark.parametrize(("limit", "changing"), [(1 << 30, [False] * 3), (1, [False, True, True])])
def test_many_changes_are_fetched_part_by_part(
    limit: int, changing: list[bool], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver, "_IN_MEMORY", limit)
    model, store = nn.Linear(100, 100), Observed(tmp_path)
    publisher, module = Publisher(model, store), nn.Linear(100, 100, dtype=torch.bfloat16)
    store.receiver = Receiver(module, store)
    publisher.publish()
    store.receiver.update()
    for row in range(3):
        with torch.no_grad():
            model.weight[row] += 1
        publisher.publish()
    assert store.receiver.update()
    assert store.changing == changing
    assert torch.equal(module.weight, model.weight.bfloat16())


@pytest.mark.parametrize("place", ["/dev/null/policy", "http://"])
def test_a_place_that_cannot_be_used_is_refused_by_its_key(place: str) -> None:
    with pytest.raises(ConfigError, match=rf"/deepspeed_compress/rollout/directory: '{place}' cannot be used: "):
        _open(place)
