"""Anchors from a living island for one that comes: fp32 tensors of equal places, over a connection of their own.

Nobody waits but the one that comes: a rank hands out a copy by a thread, while it trains on.
"""

import contextlib
import json
import socket
import socketserver
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["AnchorServer", "Handed", "fetch_anchor"]

Handed = tuple[int, Mapping[str, Any], Mapping[str, Tensor]]
"""A version, what else is to be known of it, and flat fp32 tensors on the host by name."""
PIECE = 1 << 20


class AnchorServer:
    """Hands out what `copy(version)` gives: what this rank has once that is at least of `version`."""

    def __init__(self, host: str, copy: Callable[[int], Handed | None]) -> None:
        self._server = _Server(("", 0), _Request)
        self._server.copy = copy
        self.address = f"{host}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.2,), daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    copy: Callable[[int], Handed | None]


class _Request(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        # Who asked may be gone.
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, RecursionError):
            found = self.server.copy(int(json.loads(self.rfile.readline(PIECE))["version"]))
            if found is not None:
                self._hand_out(*found)

    def _hand_out(self, version: int, about: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        sizes = {name: tensor.numel() for name, tensor in tensors.items()}
        self.wfile.write(json.dumps({"version": version, "about": dict(about), "sizes": sizes}).encode() + b"\n")
        for tensor in tensors.values():
            self.wfile.write(_bytes(tensor))


def fetch_anchor(address: str, version: int, timeout: float, sizes: Mapping[str, int], run: str) -> Handed:
    """What the rank at `address` has, as soon as that is at least of `version`: tensors of `sizes`, of `run`.

    OSError where nothing comes for `timeout` seconds, or something else listens there.
    """
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=timeout) as there:
        there.sendall(json.dumps({"version": version}).encode() + b"\n")
        with there.makefile("rb") as stream:
            head = _head(stream.readline(PIECE))
            about: Any = head.get("about")
            found = head.get("version")
            known = isinstance(about, dict) and about.get("run") == run and head.get("sizes") == sizes
            if not known or not isinstance(found, int) or found < version:
                raise ConnectionError(f"{address} does not have version {version} of {run}")
            tensors = {name: _receive(stream, numel) for name, numel in sizes.items()}
    return found, about, tensors


def _head(line: bytes) -> Mapping[str, Any]:
    """Empty where it is none."""
    try:
        head = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return head if isinstance(head, dict) else {}


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of `tensor`, contiguous and on the host."""
    return memoryview(tensor.view(torch.uint8).numpy().data) if tensor.numel() else memoryview(b"")


def _receive(stream: Any, numel: int) -> Tensor:
    tensor = torch.empty(numel)
    left = _bytes(tensor)
    while left:
        count = stream.readinto(left[:PIECE])
        if not count:
            raise ConnectionError("an anchor ended before its end")
        left = left[count:]
    return tensor
