"""Updates that wait for requests or for a store that is away, and changes that do not fit into memory."""

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.backends.deepspeed.rollout import _open
from deepspeed_compress.errors import ConfigError, RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver, receiver
from deepspeed_compress.rollout.receiver import Updates
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


def test_a_request_inside_of_another_one_is_refused_if_an_update_waits() -> None:
    """A `with` in two coroutines of one thread would wait for the same reason."""
    lock = RequestLock()

    def updates() -> None:
        with lock.pause():
            pass

    update = threading.Thread(target=updates, daemon=True)
    with lock.request():
        with lock.request():
            update.start()
        while not lock._paused:
            pass
        with pytest.raises(RolloutError, match="requests do not nest"), lock.request():
            pass
    update.join(10)
    assert not lock._paused
    with lock.request():
        pass


def test_overlapping_coroutines_let_an_update_run() -> None:
    lock, order = RequestLock(), list[str]()

    def pause() -> None:
        with lock.pause():
            order.append("update")

    async def request() -> None:
        async with lock.coroutine_request():
            order.append("request")
            await asyncio.sleep(0.05)

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


class Away:
    """Weights whose store can be away, and takes as long as told to. If they break, they are incomplete."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.away, self.breaks, self.seconds, self.calls = False, False, 0.0, 0
        self.now = 0.0

    def update(self) -> None:
        self.calls += 1
        self.now += self.seconds
        if self.breaks:
            self.version = None
        if self.away:
            raise ConnectionError("the store is away")
        self.version = (self.version or 0) + 1


def test_the_held_version_stays_in_use_while_the_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    weights = Away()
    updates = Updates(weights)
    with caplog.at_level(logging.WARNING):
        assert updates() == 1
        weights.away = True
        assert [updates() for _ in range(3)] == [1] * 3
        [said] = [record.getMessage() for record in caplog.records]
        assert said.endswith("version 1 goes on answering: the store is away")
        weights.away, updates._next = False, 0.0
        assert updates() == 2
        weights.away = True
        assert updates() == 2
        assert len(caplog.records) == 2
    weights.breaks, updates._next = True, 0.0
    with pytest.raises(ConnectionError):
        updates()


def test_a_store_that_takes_long_to_fail_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Away()
    monkeypatch.setattr(receiver.time, "monotonic", lambda: weights.now)
    updates = Updates(weights)
    assert updates() == 1
    weights.away, weights.seconds = True, 8.0
    for _ in range(100):
        assert updates() == 1
        weights.now += 1.0
    assert weights.calls == 1 + 2
