"""Checkpoints that stay in memory, copies that are sent to the next host, and copies that it refuses."""

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from deepspeed_compress.checkpointing import completeness as files
from deepspeed_compress.checkpointing import memory_copies
from deepspeed_compress.checkpointing.completeness import FileList, read_list
from deepspeed_compress.checkpointing.directory import CheckpointDirectory
from deepspeed_compress.checkpointing.memory_copies import (
    COPIES,
    Destination,
    Receiver,
    send_copies,
)
from deepspeed_compress.checkpointing.memory_directory import (
    MemoryCatalog,
    find_host_saves,
    job_directory,
    job_name,
    missing_files,
)
from deepspeed_compress.errors import StateError
from deepspeed_compress.launcher.heartbeat import MEMORY
from deepspeed_compress.transport.client import connect, own_address
from deepspeed_compress.transport.connection import Connection, encode
from deepspeed_compress.transport.credentials import Credentials, Secret
from tests.support.checkpoints import save, write
from tests.support.transport import until

KEY = b"k" * 32


@pytest.fixture
def receiver(tmp_path):
    (tmp_path / "next").mkdir()
    found = Receiver(tmp_path / "next", KEY)
    yield found
    found.close()


def listed(tmp_path: Path) -> tuple[Path, FileList]:
    one = write(save(tmp_path / "own", 4))
    return one.place, read_list(files.list_file(one.place, 1))


def test_files_arrive_with_their_list(tmp_path, receiver):
    place, one = listed(tmp_path)
    send_copies(place, one, Destination("127.0.0.1", receiver.port, KEY))
    [held], problems = find_host_saves(tmp_path / "next")
    assert problems == []
    assert (held.tag, held.lists) == ("global_step4", {1: one})
    assert list(files.find_damaged(tmp_path / "next" / held.tag, one)) == []
    assert all(not file.stat().st_mode & 0o077 for file in (tmp_path / "next" / held.tag).glob("*.pt"))


def test_a_rate_is_kept(tmp_path, receiver):
    place, one = listed(tmp_path)
    begun = time.monotonic()
    send_copies(place, one, Destination("127.0.0.1", receiver.port, KEY, max_rate=10_000))
    assert time.monotonic() - begun > 0.3


def test_messages_of_other_jobs_and_oversized_ones_are_refused(tmp_path, receiver):
    place, one = listed(tmp_path)
    destination = Destination("127.0.0.1", receiver.port, KEY)
    with pytest.raises(StateError, match="another job"):
        send_copies(place, one, replace(destination, key=b"x" * 32))
    [name] = one.files
    with pytest.raises(StateError, match="damaged in transit"):
        send_copies(place, replace(one, files={name: (3000, "0" * 64)}), destination)
    shutil.copy(place / name, tmp_path)
    with pytest.raises(StateError, match="outside"):
        send_copies(place.parent / "..", one, destination)
    with socket.create_connection(("127.0.0.1", receiver.port)) as garbage:
        garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
        with contextlib.suppress(ConnectionResetError):
            assert garbage.recv(1000) == b""
    assert find_host_saves(tmp_path / "next") == ([], [])
    assert not list((tmp_path / "next").rglob("*.tmp"))


@pytest.mark.parametrize("tag", ["..", ".", "", "../own", "/tmp/own", "a/b", "a\0b", "x" * 2000])
def test_a_copy_stays_below_the_directory(tmp_path, receiver, tag):
    _, one = listed(tmp_path)
    with connected(receiver) as connection:
        connection.send({"kind": "copy", "tag": tag, "list": one.fields}, bytes(3000))
        answer = connection.receive(120)
        assert answer is not None
        assert answer["kind"] == "refused"
    assert find_host_saves(tmp_path / "next") == ([], [])


def connected(receiver: Receiver, key: bytes = KEY) -> Connection:
    credentials = Credentials(Secret(key, "the tests"))
    return connect(f"127.0.0.1:{receiver.port}", COPIES, credentials, timeout=120.0)


def begun(tmp_path: Path, receiver: Receiver) -> Connection:
    """Send only the first half of a copy."""
    _, one = listed(tmp_path)
    connection = connected(receiver)
    connection._write(memoryview(encode({"kind": "copy", "tag": "global_step4", "list": one.fields}, 3000)))
    connection._write(memoryview(bytes(1500)))
    return connection


@pytest.mark.parametrize("peer", ["plain", "authenticated", "begun"])
def test_an_end_does_not_wait_long_for_a_silent_peer(tmp_path, monkeypatch, peer):
    monkeypatch.setattr(memory_copies, "DRAIN", 1.0)
    (tmp_path / "next").mkdir()
    receiver = Receiver(tmp_path / "next", KEY)
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            make = {
                "plain": lambda: socket.create_connection(("127.0.0.1", receiver.port)),
                "authenticated": lambda: connected(receiver),
                "begun": lambda: begun(tmp_path, receiver),
            }[peer]
            stack.enter_context(make())
        time.sleep(0.3)
        begin = time.monotonic()
        receiver.close()
        assert time.monotonic() - begin < 15
    assert not list((tmp_path / "next").rglob("*.tmp"))


def test_a_directory_that_the_system_has_removed_holds_nothing(tmp_path):
    """logind removes what a user has in /dev/shm at the end of the last session (RemoveIPC)."""
    assert find_host_saves(tmp_path / "gone") == ([], [])
    CheckpointDirectory(tmp_path / "gone").keep_only(save(tmp_path / "gone", 4), ["global_step4"])


def test_a_process_that_was_killed_does_not_keep_its_rank_from_ending(tmp_path):
    receiver = Receiver(tmp_path, KEY)
    os.kill(receiver.process, signal.SIGKILL)
    os.waitid(os.P_PID, receiver.process, os.WEXITED | os.WNOWAIT)
    receiver.close()


@pytest.mark.slow
def test_an_end_waits_for_a_copy_that_moves(tmp_path):
    (tmp_path / "next").mkdir()
    receiver = Receiver(tmp_path / "next", KEY)
    place, one = listed(tmp_path)
    sending = threading.Thread(
        target=send_copies, args=(place, one, Destination("127.0.0.1", receiver.port, KEY, max_rate=1000))
    )
    sending.start()
    until(lambda: bool(list((tmp_path / "next").rglob("*.tmp"))))
    receiver.close()
    sending.join(60)
    [held], _ = find_host_saves(tmp_path / "next")
    assert held.lists == {1: one}


def test_a_job_is_identified_by_its_directory_and_memory_is_private(tmp_path, monkeypatch):
    monkeypatch.setenv(MEMORY, str(tmp_path / "memory"))
    job = job_name(tmp_path / "disk")
    assert job == job_name(tmp_path / "disk") != job_name(tmp_path / "other")
    place = job_directory(job)
    assert place.stat().st_mode & 0o777 == 0o700
    place.chmod(0o755)
    with pytest.raises(StateError, match="not private to this user"):
        job_directory(job)
    place.rmdir()
    os.symlink(tmp_path, place)
    with pytest.raises(StateError, match="not private to this user"):
        job_directory(job)
    (tmp_path / "disk" / ".deepspeed_compress_job").write_text("../..")
    with pytest.raises(StateError, match="damaged"):
        job_name(tmp_path / "disk")


def test_a_tag_that_faster_ranks_have_begun_is_not_removed(tmp_path):
    """The writer of the leader may still be at an earlier checkpoint, whose task does not name the tag."""
    for step in (1, 2):
        write(save(tmp_path, step))
    for step in (3, 4):
        save(tmp_path, step).place.mkdir()
    CheckpointDirectory(tmp_path).begin(save(tmp_path, 4), 1)
    CheckpointDirectory(tmp_path).keep_only(save(tmp_path, 2), {"global_step2"})
    assert sorted(place.name for place in tmp_path.iterdir()) == ["global_step2", "global_step3", "global_step4"]


def test_the_newest_two_written_tags_and_later_ones_are_kept():
    catalog = MemoryCatalog(copies=False)
    for number in range(1, 6):
        assert not catalog.begin(number, str(number))
    catalog.written = 3
    assert catalog.tags_to_keep() == {"2", "3", "4", "5"}
    catalog.mark_failed(3, of_copy=False)
    assert catalog.tags_to_keep() == {"2", "4", "5"}
    catalog.written = 5
    assert catalog.tags_to_keep() == {"4", "5"}
    catalog.restart_from("4")
    catalog.begin(6, "6")
    assert catalog.tags_to_keep() == {"4", "6"}


def test_one_copy_is_on_its_way_at_a_time_and_the_last_that_arrived_stays():
    catalog = MemoryCatalog(copies=True)
    assert [catalog.begin(number, str(number)) for number in (1, 2, 3)] == [True, False, False]
    catalog.written = 3
    assert catalog.tags_to_keep() == {"1", "2", "3"}
    catalog.copied = 3
    assert [catalog.begin(number, str(number)) for number in (4, 5, 6)] == [True, False, False]
    catalog.written = 6
    assert catalog.tags_to_keep() == {"1", "4", "5", "6"}
    catalog.mark_failed(4, of_copy=True)
    assert not catalog.sending
    assert catalog.tags_to_keep() == {"1", "5", "6"}


def test_hosts_receive_only_the_files_that_their_ranks_read(tmp_path):
    def of(rank: int, *names: str) -> FileList:
        return FileList(1, "run", 1, 4, rank, 3, True, dict.fromkeys(names, (1, "")))

    masters = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in range(3)]
    lists = {
        0: of(0, masters[0], "mp_rank_00_model_states.pt", "deepspeed_compress_rank_00000.json"),
        1: of(1, "deepspeed_compress_islands_rank_00001.json", masters[1]),
        2: of(2, masters[2]),
    }
    ranks = [frozenset({0}), frozenset({1}), frozenset({2})]
    found = missing_files(lists, [frozenset({0, 2}), frozenset(), frozenset({0, 1})], ranks)
    assert [(one.name, one.source, one.needed_by) for one in found] == [
        ("mp_rank_00_model_states.pt", 0, (1,)),
        ("deepspeed_compress_islands_rank_00001.json", 2, (1,)),
        (masters[1], 2, (1,)),
        (masters[2], 0, (2,)),
    ]


def test_all_other_tags_are_removed(tmp_path):
    for step in (1, 2, 3):
        write(save(tmp_path, step))
    (files.list_file(tmp_path / "global_step3", 0)).write_text("damaged")
    CheckpointDirectory(tmp_path).keep_only(save(tmp_path, 4), {"global_step2"})
    assert [place.name for place in tmp_path.iterdir()] == ["global_step2"]


def test_an_address_that_others_can_reach():
    assert own_address("127.0.0.1") == "127.0.0.1"
