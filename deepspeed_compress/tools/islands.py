"""``ds-compress islands``: the coordinator of islands that come and go, and who is there."""

import argparse
import contextlib
import json
import os
import re
import signal
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.services.rendezvous.client import status
from deepspeed_compress.services.rendezvous.server import StateFile, island_server

__all__ = ["run"]


def run(options: argparse.Namespace) -> int:
    """The exit code of what is asked for."""
    return _ACTIONS[options.action](options)


def _serve(options: argparse.Namespace) -> int:
    """Until SIGINT or SIGTERM."""
    # What it keeps, weights among it, is for its user alone, whichever library writes it.
    os.umask(0o077)
    server = _parameter_server(options) if options.parameter_server else _coordinator(options)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: server.stop())
    with contextlib.suppress(KeyboardInterrupt):
        server.run(lambda: _log(f"islands may connect to port {server.port}; state in {options.state}"))
    return 0


def _coordinator(options: argparse.Namespace) -> Any:
    return island_server(StateFile(options.state), options.host, options.port, _log)


def _parameter_server(options: argparse.Namespace) -> Any:
    """It alone needs torch."""
    from deepspeed_compress.services.parameter_server.ledger import Ledger
    from deepspeed_compress.services.parameter_server.server import Server as ParameterServer

    return ParameterServer(Ledger(options.state), options.host, options.port, _log)


def _tell(text: str) -> None:
    print(text, flush=True)


def _log(text: str) -> None:
    """What nobody reads any more stops no server."""
    with contextlib.suppress(OSError):
        _tell(text)


def _status(options: argparse.Namespace) -> int:
    if re.fullmatch(r"[^:\s]+:[0-9]+", options.rendezvous) is None:
        raise ConfigError(f"{options.rendezvous}: no address (allowed: host:port); write localhost:29400")
    try:
        found = {key: value for key, value in status(options.rendezvous).items() if key != "kind"}
    except OSError as error:
        where = f"no coordinator answers at {options.rendezvous} ({error})"
        raise IslandError(
            f"{where}; start one with ds-compress islands serve, or look whether the port is open"
        ) from error
    _tell(json.dumps(found, indent=2))
    return 0


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType({"serve": _serve, "status": _status})
