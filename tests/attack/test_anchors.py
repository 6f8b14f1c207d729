"""Ten thousand hostile messages for a rank that hands out anchors, and for the process that takes copies in memory."""

import contextlib
import os
import random
import threading
from collections.abc import Callable
from pathlib import Path

import torch

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.completeness import read_list
from deepspeed_compress.checkpointing.memory_copies import COPIES, Destination, Receiver, send_copies
from deepspeed_compress.checkpointing.memory_directory import find_host_saves
from deepspeed_compress.local_sgd.anchors import ANCHOR, AnchorServer, fetch_anchor
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.credentials import Credentials
from deepspeed_compress.transport.frames import Limits
from deepspeed_compress.transport.secret import Secret
from tests.attack.test_coordinator import MEGABYTES, memory
from tests.support.file_lists import save, write
from tests.support.hostile import attack_authenticated, attack_unauthenticated

COUNT = 10_000
NUMEL = 1 << 16
KEY = b"a key of a job of the tests"
OWN = Credentials(Secret(KEY, "the tests"))


def attack(*works: Callable[[], object]) -> list[threading.Thread]:
    """Threads that do `works`."""
    found = [threading.Thread(target=work) for work in works]
    for one in found:
        one.start()
    return found


def joined(threads: list[threading.Thread]) -> None:
    for one in threads:
        one.join(120)
        assert not one.is_alive(), "an attack does not end"


def test_ten_thousand_hostile_messages_for_anchors_disturb_nobody() -> None:
    anchor, copies = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), []

    def copy(version: int) -> tuple[int, dict[str, object], dict[str, torch.Tensor]] | None:
        copies.append(version)
        return (3, {"run": "mine"}, {"anchor": anchor}) if version <= 3 else None

    server = AnchorServer("127.0.0.1", copy, 2.0, OWN)
    templates = [{"kind": ANCHOR, "version": 1, "timeout": 1.0}, {"kind": ANCHOR, "version": 9}]
    before = memory(os.getpid())
    threads = attack(
        lambda: attack_unauthenticated(server.address, COUNT // 2, 1),
        lambda: attack_authenticated(server.address, ANCHOR, OWN, lambda number: templates, COUNT // 2, 2),
    )
    for _ in range(10):
        version, _, tensors = patiently(lambda: fetch_anchor(server.address, 1, 20.0, {"anchor": NUMEL}, "mine", OWN))
        assert version == 3
        assert torch.equal(tensors["anchor"], anchor)
    joined(threads)
    assert memory(os.getpid()) - before < 500 * MEGABYTES
    assert copies
    server.close()


def patiently(work: Callable[[], object]) -> object:
    """As an island does, which asks again if a rank is busy."""
    for _ in range(20):
        with contextlib.suppress(ConnectionError):
            return work()
    return work()


def hostile_files(port: int, listed: files.FileList, count: int) -> int:
    """Send copies of one who has the key, but whose lists and files are wrong."""
    draw, fields = random.Random(5), listed.fields
    wrong = (None, True, -1, 1.0, "3", "../../x", "/tmp/x", "", [], {}, 2**62)
    for _ in range(count):
        found = {**fields, "files": dict(fields["files"])}
        where = draw.choice([found, found["files"]])
        where[draw.choice(list(where))] = draw.choice([*wrong, (3000, "0" * 64), (-1, "x"), (2**62, "x"), ("3000", 1)])
        if isinstance(found["files"], dict) and draw.random() < 0.3:
            found["files"][draw.choice(["../../escaped", "/tmp/escaped", ".", "", "a\0b"])] = (10, "0" * 64)
        tag = draw.choice(["global_step4", "..", ".", "", "../x", "a/b", 5, None])
        if (tag, found) == ("global_step4", fields):
            continue
        with contextlib.suppress(ConnectionError):
            answered(port, {"kind": "copy", "tag": tag, "list": found}, bytes(draw.choice([0, 10, 3000, 3010])))
    return count


def answered(port: int, head: dict[str, object], body: bytes) -> None:
    with connect(f"127.0.0.1:{port}", COPIES, OWN, limits=Limits(patience=10)) as connection:
        connection.send(head, body)
        answer = connection.receive(10)
        assert answer is None or answer["kind"] == "refused", answer


def test_ten_thousand_hostile_messages_for_copies_disturb_nobody(tmp_path: Path) -> None:
    (tmp_path / "next").mkdir()
    one = write(save(tmp_path / "own", 4))
    place, listed = one.place, read_list(files.list_file(one.place, 1))
    receiver = Receiver(tmp_path / "next", KEY)
    address, before = f"127.0.0.1:{receiver.port}", memory(receiver.process)
    templates = [{"kind": "copy", "tag": "global_step9", "list": {**listed.fields, "files": {}}}]
    threads = attack(
        lambda: attack_unauthenticated(address, COUNT // 2, 1),
        lambda: attack_authenticated(address, COPIES, OWN, lambda number: templates, COUNT // 4, 2),
        lambda: hostile_files(receiver.port, listed, COUNT // 4),
    )
    for _ in range(5):
        send_copies(place, listed, Destination("127.0.0.1", receiver.port, KEY))
    joined(threads)
    assert memory(receiver.process) - before < 500 * MEGABYTES
    send_copies(place, listed, Destination("127.0.0.1", receiver.port, KEY))
    receiver.close()
    held, _ = find_host_saves(tmp_path / "next")
    assert [found.lists for found in held if found.tag == "global_step4"] == [{1: listed}]
    assert list(files.find_damaged(tmp_path / "next" / "global_step4", listed)) == []
    assert not list(tmp_path.rglob("*escaped*"))
    assert not list((tmp_path / "next").rglob("*.tmp"))
