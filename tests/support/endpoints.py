"""Endpoints that are served in a thread, and a policy that answers at once."""

import contextlib
import json
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from typing import Any

from deepspeed_compress.agents.endpoint import make_endpoint
from deepspeed_compress.agents.generation import Completion, Sampling
from deepspeed_compress.agents.policy import Answer, Policy
from deepspeed_compress.agents.serving import make_server
from tests.agents.models import tokenizer
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


class Ready(Policy):
    """A policy whose answers are there at once."""

    longest = None

    def __init__(self) -> None:
        self.version = 1

    def submit(self, prompt: Any, sampling: Sampling) -> "Future[Answer]":
        tokens = (1,) * sampling.max_tokens
        answer: Future[Answer] = Future()
        answer.set_result(Answer(Completion(tokens, (-0.5,) * len(tokens), False), 1))
        return answer


@contextlib.contextmanager
def served(policy: Policy, most: int = 1024, patience: float = 30.0, **settings: Any) -> Iterator[int]:
    """Serve in a thread, and yield the port."""
    app = make_endpoint(policy, tokenizer(), secret=SECRET, **settings)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = make_server(app, "127.0.0.1", 0, most, patience)
        threads = start_threads(partial(server.run, [listening]))
        try:
            yield listening.getsockname()[1]
        finally:
            server.should_exit = server.force_exit = True
            join_threads(threads)
