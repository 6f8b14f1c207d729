"""Services: ``ds-compress islands`` runs, shows and changes a coordinator, ``rollout`` serves weights."""

import argparse
import contextlib
import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.local_sgd.coordinator import client
from deepspeed_compress.local_sgd.coordinator.coordinator import StateFile, island_server
from deepspeed_compress.tools.tables import print_table
from deepspeed_compress.transport.credentials import Credentials, find_secret, find_tls, set_tls
from deepspeed_compress.transport.errors import AuthenticationError


def serve_islands(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM. Return the exit code."""
    # Only the user may read the server's state, which includes weights. This holds for files of any library.
    os.umask(0o077)
    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    place = (options.host, options.port, _log)
    server: Any
    if options.parameter_server:
        # Only this server needs torch.
        from deepspeed_compress.local_sgd.parameter_server.server import Server as ParameterServer
        from deepspeed_compress.local_sgd.parameter_server.snapshot import Snapshot

        server = ParameterServer(Snapshot(options.state), *place)
    else:
        server = island_server(StateFile(options.state), *place)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    with contextlib.suppress(KeyboardInterrupt):
        server.run(lambda: _log(_listening(options, server.port)))
    return 0


def _tell(text: str) -> None:
    print(text, flush=True)


def _log(text: str) -> None:
    """Print a line. If standard output is closed, the server continues."""
    with contextlib.suppress(OSError):
        _tell(text)


def _listening(options: argparse.Namespace, port: int) -> str:
    """Return the first line of a server's output, which says how islands can connect."""
    line = f"islands may connect to port {port} of {options.host or 'all addresses'}; state in {options.state}"
    if options.host not in _OWN_HOST:
        return line
    return f"{line}. Only this host can connect; for islands on other hosts, pass --host 0.0.0.0 or one address"


def status(options: argparse.Namespace) -> int:
    """Print which islands are connected and which are missing. Return the exit code."""
    _show(options, _asked(options, client.status))
    return 0


def forget(options: argparse.Namespace) -> int:
    """Declare that islands are permanently gone. Return the exit code."""
    before = _asked(options, client.status)
    for state, advice in (("islands", "end it first, or do not forget it"), ("missing", "choose one of these")):
        numbers = {one["number"] for one in before.get(state, ())}
        wrong = [number for number in options.numbers if (number in numbers) == (state == "islands")]
        if wrong:
            problem = "is connected" if state == "islands" else "is unknown: it never joined, has left, or is forgotten"
            missing = ", ".join(str(one["number"]) for one in before.get("missing", ())) or "none, no island is missing"
            raise ConfigError(f"N: island {wrong[0]} {problem} (allowed: {missing}); {advice}")
    _show(options, _asked(options, partial(client.forget, numbers=options.numbers)))
    return 0


def _asked(options: argparse.Namespace, ask: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of the coordinator at `options.rendezvous`.

    Raises:
        ConfigError: The address is invalid, or authentication fails.
        IslandError: No coordinator answers.
    """
    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    rendezvous = options.rendezvous
    try:
        return ask(rendezvous)
    except AuthenticationError as error:
        raise ConfigError(str(error)) from error
    except OSError as error:
        raise IslandError(f"no coordinator answers at {rendezvous} ({error}); start one, or open its port") from error
    except ValueError as error:
        raise ConfigError(f"HOST:PORT: {error}") from error


def _show(options: argparse.Namespace, found: Mapping[str, Any]) -> None:
    """Print a line about the run and a table of its islands, with a column for each field that any of them has."""
    if options.json:
        _tell(json.dumps(found, indent=2))
        return
    about = {key: value for key, value in found.items() if not isinstance(value, list)}
    _tell(", ".join(f"{key} {'none' if value is None else value}" for key, value in about.items()))
    islands = [*found.get("islands", found.get("hosts", []))]
    islands += [{**one, "silent": "missing"} for one in found.get("missing", [])]
    names = [name for name in _COLUMNS if any(name in island for island in islands)]
    rows = ([str(island.get(name, "")) for name in names] for island in islands)
    if islands:
        print_table("", [_COLUMNS[name] for name in names], rows, _COLUMNS.values())
    else:
        _tell("no island is connected")


_OWN_HOST = ("127.0.0.1", "localhost", "::1")
_COLUMNS: Mapping[str, str] = {
    "number": "island",
    "host": "host",
    "address": "host",
    "version": "version",
    "waiting": "waiting",
    "weight": "weight",
    "silent": "last seen (s)",
}
"""Titles of the columns of `status`, by field."""


_ALL_ADDRESSES = ("", "0.0.0.0", "::")
_EXPORT_INTERVAL = 1.0
"""Seconds between looks at a store."""


def serve_rollout(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code.

    Raises:
        ConfigError: the secret or the TLS files cannot be used.
    """
    # Only this server needs torch.
    from deepspeed_compress.rollout.served_store import SCHEME, StoreServer
    from deepspeed_compress.rollout.store import DirectoryStore

    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    credentials = Credentials(find_secret(options.secret_file), find_tls())
    stopped = _stopped_by_signals()
    log = partial(print, "store server:", file=sys.stderr, flush=True)
    store = DirectoryStore(options.directory)
    with StoreServer(store, options.host, options.port, credentials, log=log) as server:
        host = socket.gethostname() if options.host in _ALL_ADDRESSES else options.host
        address = f"{SCHEME}{f'[{host}]' if ':' in host else host}:{server.port}"
        _tell(f"{options.directory} is served at {address}; the secret is from {credentials.secret.source}")
        stopped.wait()
    return 0


def export_rollout(options: argparse.Namespace) -> int:
    """Export new versions of weights or, without a model, of adapters until SIGINT or SIGTERM. Return the exit code.

    Raises:
        RolloutError: the store or the directory is damaged.
    """
    from deepspeed_compress.rollout import open_store
    from deepspeed_compress.rollout.adapter_export import AdapterExporter
    from deepspeed_compress.rollout.checkpoint_export import CheckpointExporter

    stopped, store = _stopped_by_signals(), open_store(options.store)
    exporter: Any
    if options.model is None:
        exporter = AdapterExporter(store, options.directory)
    else:
        exporter = CheckpointExporter(store, options.directory, options.model)
    while not stopped.is_set():
        for version in exporter.update():
            _tell(f"version {version} is in {options.directory}")
        stopped.wait(_EXPORT_INTERVAL)
    return 0


def _stopped_by_signals() -> threading.Event:
    """Return an event that SIGINT and SIGTERM set."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    return stopped
