"""Thousands of hostile messages to a server of anchors, and to the process that receives copies of checkpoints."""

import contextlib
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing.completeness import read_list
from deepspeed_compress.checkpointing.memory_copies import COPIES, Destination, Receiver, send_copies
from deepspeed_compress.checkpointing.memory_directory import find_host_saves
from deepspeed_compress.local_sgd.anchors import ANCHOR, AnchorServer, fetch_anchor
from deepspeed_compress.transport.client import connect
from deepspeed_compress.transport.connection import Limits
from deepspeed_compress.transport.credentials import Credentials, Secret
from tests.support.checkpoints import save, write
from tests.support.hostile import COUNTS, attack_authenticated, attack_unauthenticated
from tests.support.processes import MEGABYTE, join_threads, resident_memory, start_threads

NUMEL = 1 << 16
KEY = b"a key of a job of the tests"
OWN = Credentials(Secret(KEY, "the tests"))


@COUNTS
def test_hostile_messages_do_not_disturb_the_transfer_of_anchors(count: int) -> None:
    anchor, copies = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)), []

    def copy(version: int) -> tuple[int, dict[str, object], dict[str, torch.Tensor]] | None:
        copies.append(version)
        return (3, {"run": "mine"}, {"anchor": anchor}) if version <= 3 else None

    server = AnchorServer("127.0.0.1", copy, 2.0)
    templates = [{"kind": ANCHOR, "version": 1, "timeout": 1.0}, {"kind": ANCHOR, "version": 9}]
    before = resident_memory(os.getpid())
    threads = start_threads(
        lambda: attack_unauthenticated(server.address, count // 2, 1),
        lambda: attack_authenticated(
            server.address, ANCHOR, Credentials.find(), lambda number: templates, count // 2, 2
        ),
    )
    for _ in range(10):
        version, _, tensors = with_retries(
            lambda: fetch_anchor(server.address, 1, 20.0, {"anchor": NUMEL}, "mine"), ConnectionError
        )
        assert version == 3
        assert torch.equal(tensors["anchor"], anchor)
    join_threads(threads)
    assert resident_memory(os.getpid()) - before < 500 * MEGABYTE
    assert copies
    server.close()


def with_retries(work: Callable[[], object], *errors: type[OSError]) -> object:
    """Retry `work` after some errors, such as that of a busy server, as islands do, or on a busy machine a timeout."""
    for _ in range(20):
        with contextlib.suppress(TimeoutError, *errors):
            return work()
    return work()


def hostile_files(port: int, listed: files.FileList, count: int) -> int:
    """Send copies with the right key, but with wrong lists and files."""
    rng, fields = random.Random(5), listed.fields
    wrong = (None, True, -1, 1.0, "3", "../../x", "/tmp/x", "", [], {}, 2**62)
    for _ in range(count):
        found = {**fields, "files": dict(fields["files"])}
        where = rng.choice([found, found["files"]])
        where[rng.choice(list(where))] = rng.choice([*wrong, (3000, "0" * 64), (-1, "x"), (2**62, "x"), ("3000", 1)])
        if isinstance(found["files"], dict) and rng.random() < 0.3:
            found["files"][rng.choice(["../../escaped", "/tmp/escaped", ".", "", "a\0b"])] = (10, "0" * 64)
        tag = rng.choice(["global_step4", "..", ".", "", "../x", "a/b", 5, None])
        if (tag, found) == ("global_step4", fields):
            continue
        with contextlib.suppress(ConnectionError):
            check_refused(port, {"kind": "copy", "tag": tag, "list": found}, bytes(rng.choice([0, 10, 3000, 3010])))
    return count


def check_refused(port: int, head: dict[str, object], body: bytes) -> None:
    with connect(f"127.0.0.1:{port}", COPIES, OWN, timeout=120.0, limits=Limits(patience=120)) as connection:
        connection.send(head, body)
        answer = connection.receive(120)
        assert answer is None or answer["kind"] == "refused", answer


@pytest.mark.serial  # the process that receives copies has the lowest priority, so other work would starve it
@COUNTS
def test_hostile_messages_do_not_disturb_the_transfer_of_copies(tmp_path: Path, count: int) -> None:
    (tmp_path / "next").mkdir()
    one = write(save(tmp_path / "own", 4))
    place, listed = one.place, read_list(files.list_file(one.place, 1))
    receiver = Receiver(tmp_path / "next", KEY)
    address, destination = f"127.0.0.1:{receiver.port}", Destination("127.0.0.1", receiver.port, KEY)
    before = resident_memory(receiver.process)
    templates = [{"kind": "copy", "tag": "global_step9", "list": {**listed.fields, "files": {}}}]
    threads = start_threads(
        lambda: attack_unauthenticated(address, count // 2, 1),
        lambda: attack_authenticated(address, COPIES, OWN, lambda number: templates, count // 4, 2),
        lambda: hostile_files(receiver.port, listed, count // 4),
    )
    for _ in range(5):
        with_retries(lambda: send_copies(place, listed, destination))
    join_threads(threads)
    assert resident_memory(receiver.process) - before < 500 * MEGABYTE
    with_retries(lambda: send_copies(place, listed, destination))
    receiver.close()
    held, _ = find_host_saves(tmp_path / "next")
    assert [found.lists for found in held if found.tag == "global_step4"] == [{1: listed}]
    assert list(files.find_damaged(tmp_path / "next" / "global_step4", listed)) == []
    assert not list(tmp_path.rglob("*escaped*"))
    assert not list((tmp_path / "next").rglob("*.tmp"))
