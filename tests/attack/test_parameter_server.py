"""Thousands of hostile messages to a parameter server do not change a bit of an honest island's training."""

import random
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from deepspeed_compress.local_sgd.exchange import FramedMessages
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.local_sgd.parameter_server.messages import PARAMETER_SERVER, Terms
from deepspeed_compress.local_sgd.parameter_server.places import make_messages
from deepspeed_compress.local_sgd.parameter_server.server import Service
from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Limits
from deepspeed_compress.transport.credentials import Credentials
from tests.support.hostile import COUNTS, Message, attack_authenticated, attack_unauthenticated
from tests.support.processes import MEGABYTE, join_threads, resident_memory, serve_islands, start_threads

Send = Callable[[Message, bytes], tuple[Message, Any]]
NUMEL = 4096
PUSHES = 40
TERMS = {"exchange": {"method": "topk", "density": 0.1, "block_size": 64}, "outer": {}, "ranks": 1, "max_staleness": 64}
SEED = {"claim": 0, "layout": [["w", 0, NUMEL]], "shapes": {"w": [64, 64]}}


class Island:
    """An honest island of one rank."""

    def __init__(self, send: Send) -> None:
        self._send, self.call = send, 0
        head, _ = send({"kind": "enter", "terms": TERMS}, b"")
        self.own = {name: head[name] for name in ("run", "number", "token")}
        self.messages: FramedMessages = make_messages(Terms.read(TERMS).settings, SEED["layout"], SEED["shapes"])
        self.ask("seed", numbers(0).numpy().tobytes(), **SEED)

    def ask(self, kind: str, body: bytes = b"", **more: object) -> None:
        about = {"kind": kind, **self.own, "place": 0, "call": self.call + 1, "step": self.call}
        answer, _ = self._send({**about, **more}, body)
        assert answer["kind"] in ("exact", "taken"), answer
        self.call += 1

    def push(self, seed: int) -> None:
        payload = self.messages.encode(numbers(seed), self.call + 1, 0, remember=False)
        self.ask("push", payload.numpy().tobytes(), samples=8)


def numbers(seed: int) -> Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def anchor(directory: Path) -> Tensor:
    """Return the anchor in the state of a server."""
    with closing(Snapshot(directory / "state")) as file:
        store = file.read()
    assert store is not None
    return store.places[0].anchor


def templates(island: Island) -> Sequence[Message]:
    """Return messages of nonexistent islands, and of the honest island but without its token."""
    about = {"run": island.own["run"], "number": island.own["number"], "place": 0, "call": 10**6, "token": "0" * 32}
    saved = {"run": island.own["run"], "number": 0, "call": 3, "version": 3}
    return [
        {"kind": "enter", "terms": {**TERMS, "ranks": 2}},
        {"kind": "resume", "number": 0, "token": "", "saved": saved},
        {"kind": "leave", "number": 0, "token": ""},
        {"kind": "fresh", **about},
        {"kind": "seed", **about, **SEED},
        {"kind": "push", **about, "samples": 8},
        {"kind": "status"},
    ]


def hostile_bodies(address: str, island: Island, count: int) -> int:
    """Send every call twice, as an island that has entered, with bodies of noise."""
    rng, limits = random.Random(9), Limits(body=1 << 30, patience=5.0)
    connection = connect(address, PARAMETER_SERVER, Credentials.find(), 5.0, limits)
    connection.send({"kind": "enter", "terms": TERMS})
    head = connection.receive(10)
    assert head is not None
    own = {**{name: head[name] for name in ("run", "number", "token")}, "place": 0}
    size = island.messages.size(1)
    for sent in range(count):
        # Half of the indices are out of range, and numbers are not finite.
        body = rng.choice([b"\xff" * size, b"\x7f" * size, bytes(size - 4), bytes(size + 4)])
        call = {"kind": "push", **own, "call": 1 + sent // 2, "samples": rng.choice([8, -1, 2**63 - 1, True, "8"])}
        connection.send(call, body if len(body) != size or rng.random() < 0.9 else body[:-1])
        answer = connection.receive(10)
        assert answer is not None
        assert answer["kind"] in ("refused", "dropped"), answer
        connection.read_body()
    connection.close()
    return count


class _Connected:
    def has_hung_up(self) -> bool:
        return False


def undisturbed() -> Tensor:
    """Return the anchor after the same pushes to a service without a network."""
    service = Service(None, lambda text: None)
    island = Island(lambda head, body: service.handle(head, bytearray(body), _Connected()))
    for seed in range(PUSHES):
        island.push(seed)
    return service.store.places[0].anchor


@COUNTS
def test_hostile_messages_change_nothing(tmp_path: Path, count: int) -> None:
    with serve_islands(tmp_path, "--parameter-server") as (address, pid):
        client = PushClient(address, 5.0, 60.0)
        island = Island(client.ask)
        island.push(0)
        before, seconds, credentials = resident_memory(pid), [], Credentials.find()
        threads = start_threads(
            lambda: attack_authenticated(
                address, PARAMETER_SERVER, credentials, lambda number: templates(island), count // 2, 2
            ),
            lambda: attack_unauthenticated(address, count // 4, 1),
            lambda: hostile_bodies(address, island, count // 4),
        )
        for seed in range(1, PUSHES):
            begun = time.monotonic()
            island.push(seed)
            seconds.append(time.monotonic() - begun)
            time.sleep(0.05)
        join_threads(threads)
        assert resident_memory(pid) - before < 500 * MEGABYTE
        assert max(seconds) < 20
        client.close()
    assert torch.equal(anchor(tmp_path), undisturbed())
