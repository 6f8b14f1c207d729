"""``ds-compress islands``: the coordinator of islands that come and go, and who is there."""

import argparse
import contextlib
import json
import os
import signal
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from deepspeed_compress.config.addresses import check_address
from deepspeed_compress.errors import ConfigError, IslandError
from deepspeed_compress.services.rendezvous.client import forget, status
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
    """Print who is connected and who is missing."""
    _show(_asked(options.rendezvous, status))
    return 0


def _forget(options: argparse.Namespace) -> int:
    """Declare islands gone for ever."""
    before = _asked(options.rendezvous, status)
    for state, advice in (
        ("islands", "end it first, or leave it alone"),
        ("missing", "nothing has to be done for it"),
    ):
        numbers = {one["number"] for one in before.get(state, ())}
        wrong = [one for one in options.numbers if (one in numbers) == (state == "islands")]
        if wrong:
            is_what = "is connected" if state == "islands" else "is not missing"
            raise ConfigError(f"N: island {wrong[0]} {is_what} (allowed: {_numbers_missing(before)}); {advice}")
    _show(_asked(options.rendezvous, partial(forget, numbers=options.numbers)))
    return 0


def _numbers_missing(found: Mapping[str, Any]) -> str:
    numbers = ", ".join(str(one["number"]) for one in found.get("missing", ()))
    return numbers or "none, no island is missing"


def _asked(rendezvous: str, ask: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """Return the answer of the coordinator at `rendezvous`."""
    try:
        check_address(rendezvous)
    except ValueError as error:
        raise ConfigError(f"HOST:PORT: {error}") from error
    try:
        return ask(rendezvous)
    except OSError as error:
        where = f"no coordinator answers at {rendezvous} ({error})"
        raise IslandError(
            f"{where}; start one with ds-compress islands serve, or look whether the port is open"
        ) from error


def _show(found: Mapping[str, Any]) -> None:
    _tell(json.dumps({key: value for key, value in found.items() if key != "kind"}, indent=2))


_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = MappingProxyType(
    {"serve": _serve, "status": _status, "forget": _forget}
)
