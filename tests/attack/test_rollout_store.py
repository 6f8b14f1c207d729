"""Ten thousand hostile messages to a server of a store, while an honest client continues."""

import contextlib
import os
from contextlib import closing
from pathlib import Path

from deepspeed_compress.rollout import DirectoryStore, ServedStore, StoreServer
from tests.support.hostile import attack_authenticated, attack_unauthenticated
from tests.support.processes import MEGABYTE, join_threads, resident_memory, start_threads
from tests.support.transport import CREDENTIALS

COUNT = 10_000
SERVICE = "rollout store"
TEMPLATES = [{"kind": "get", "name": "blob"}, {"kind": "names"}, {"kind": "delete", "name": "other"}]


def test_hostile_messages_do_not_disturb_a_store(tmp_path: Path) -> None:
    server = StoreServer(DirectoryStore(tmp_path), "127.0.0.1", 0, CREDENTIALS)
    address, before = f"127.0.0.1:{server.port}", resident_memory(os.getpid())
    blob = bytes(range(256)) * 1000
    with server, closing(ServedStore(address, CREDENTIALS)) as store:
        store.put("blob", blob)
        threads = start_threads(
            lambda: attack_unauthenticated(address, COUNT // 2, 1),
            lambda: attack_authenticated(
                address, "rollout store", CREDENTIALS, lambda number: TEMPLATES, COUNT // 2, 2
            ),
        )
        for _ in range(50):
            # Unauthenticated connections are bounded, and an honest one may be dropped among them.
            with contextlib.suppress(ConnectionError):
                assert store.get("blob") == blob
        join_threads(threads)
        assert store.get("blob") == blob
    assert resident_memory(os.getpid()) - before < 500 * MEGABYTE
