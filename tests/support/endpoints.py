"""Endpoints in front of a server that takes the place of vLLM's, served in threads."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from deepspeed_compress.agents.serving import make_server
from deepspeed_compress.agents.vllm_endpoint import ServerWeights, make_vllm_endpoint
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from tests.support import http_servers
from tests.support.processes import join_threads, start_threads

SECRET = "a secret of the tests"
CHAT = "/v1/chat/completions"


def body_of(max_tokens: int, **fields: Any) -> bytes:
    """Return the body of a request."""
    return json.dumps({"messages": [{"role": "user", "content": "1+1="}], "max_tokens": max_tokens, **fields}).encode()


def head_of(length: int, path: str = CHAT, secret: str = SECRET, method: str = "POST") -> bytes:
    """Return the head of a request whose body has `length` bytes."""
    lines = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {secret}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, "Content-Type: application/json", "", ""]).encode()


def request(body: bytes, **changes: str) -> bytes:
    """Return a whole request."""
    return head_of(len(body), **changes) + body


class Sampler(ThreadingHTTPServer):
    """Server whose completions have as many tokens as are asked for. It waits for `allowed` before it answers.

    Attributes:
        requests: bodies of the requests, as they came.
        status: status of all answers.
        seconds: time of a token.
    """

    request_queue_size = 1024

    def __init__(self, seconds: float = 0.0) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[dict[str, Any]] = []
        self.allowed, self.status, self.seconds = threading.Event(), 200, seconds
        self.allowed.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(http_servers.Handler, BaseHTTPRequestHandler):
    server: Sampler

    def do_POST(self) -> None:
        asked = self.read_json()
        self.server.requests.append(asked)
        assert self.server.allowed.wait(60)
        tokens = asked["max_tokens"] if isinstance(asked.get("max_tokens"), int) else 1
        time.sleep(self.server.seconds * tokens)
        choice = {"index": 0, "message": {"role": "assistant", "content": "1"}, "finish_reason": "length"}
        answer = {"id": "1", "object": "chat.completion", "created": 1, "model": "policy", "prompt_token_ids": [0]}
        with contextlib.suppress(ConnectionError):
            content = {**answer, "choices": [choice | {"token_ids": [1] * tokens}]}
            self.answer(json.dumps(content).encode(), self.server.status)


class Engine:
    """Control of the weights of a server, which fails to load version `bad`.

    Attributes:
        calls: what it was told.
    """

    def __init__(self, bad: int = 0) -> None:
        self.bad, self.calls = bad, list[Any]()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self.calls.append(init_info)

    def start_weight_update(self) -> None: ...

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.calls.append(update_info["version"])
        if update_info["version"] == self.bad:
            raise RolloutError("it cannot be loaded")

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self.calls.append(weight_version)


def first_weights(directory: Path) -> ServerWeights:
    """Return weights of version 1, which is published in `directory`."""
    Publisher(torch.nn.Linear(2, 2), DirectoryStore(directory)).publish()
    weights = ServerWeights(Engine(), str(directory))
    weights.update()
    return weights


@contextlib.contextmanager
def served(directory: Path, sampler: Sampler, most: int = 1024, patience: float = 30.0) -> Iterator[int]:
    """Serve an endpoint in front of `sampler`, and yield its port. Its weights are published in `directory`."""
    app = make_vllm_endpoint(sampler.url, first_weights(directory), secret=SECRET)
    with http_servers.serving(sampler), socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(app, "127.0.0.1", 0, most, patience)
        threads = start_threads(partial(server.run, [listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            join_threads(threads)
