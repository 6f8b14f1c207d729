"""``ds-compress rollout serve``: serve a directory of published weights."""

import argparse
import os
import signal
import socket
import sys
import threading
from functools import partial

from deepspeed_compress.rollout.served_store import SCHEME
from deepspeed_compress.rollout.store import DirectoryStore
from deepspeed_compress.rollout.store_server import StoreServer
from deepspeed_compress.transport.credentials import Credentials, find_secret, find_tls, set_tls

_ALL_ADDRESSES = ("", "0.0.0.0", "::")


def run(options: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM, and return the exit code.

    Raises:
        ConfigError: the secret or the TLS files cannot be used.
    """
    set_tls(os.environ, options.tls_certificate, options.tls_authority)
    credentials = Credentials(find_secret(options.secret_file), find_tls())
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    log = partial(print, "store server:", file=sys.stderr, flush=True)
    store = DirectoryStore(options.directory)
    with StoreServer(store, options.host, options.port, credentials, log=log) as server:
        print(_first_line(options, server.port, credentials), flush=True)
        stopped.wait()
    return 0


def _first_line(options: argparse.Namespace, port: int, credentials: Credentials) -> str:
    """Return the first line of output, with the address for clients and the source of the secret."""
    host = socket.gethostname() if options.host in _ALL_ADDRESSES else options.host
    address = f"{SCHEME}{f'[{host}]' if ':' in host else host}:{port}"
    return f"{options.directory} is served at {address}; the secret is from {credentials.secret.source}"
