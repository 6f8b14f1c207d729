"""Endpoint in front of a vLLM server: labels of versions, and updates between requests. The server is another one."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install .[http]")

from starlette.testclient import TestClient

from deepspeed_compress.agents.vllm_endpoint import ServerWeights, make_vllm_endpoint
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from tests.support import http_servers

QUESTION = {"messages": [{"role": "user", "content": "1+1="}]}


class Server(ThreadingHTTPServer):
    """Server of completions. It waits for `allowed` before it answers.

    Attributes:
        requests: bodies of the requests, as they came.
        status: status of all answers.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[dict[str, Any]] = []
        self.allowed, self.status = threading.Event(), 200
        self.allowed.set()
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(http_servers.Handler, BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.requests.append(self.read_json())
        assert self.server.allowed.wait(60)
        data = json.dumps({"model": "policy", "choices": [{"token_ids": [1]}], "prompt_token_ids": [0]}).encode()
        self.answer(data, self.server.status)


@pytest.fixture
def server() -> Iterator[Server]:
    with http_servers.serving(found := Server()):
        yield found


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


class Job:
    """A job that publishes, and a server that follows it."""

    def __init__(self, path: Path, url: str, bad: int = 0) -> None:
        self.model = torch.nn.Linear(2, 2)
        self.publisher = Publisher(self.model, DirectoryStore(path))
        self.engine = Engine(bad)
        self.weights = ServerWeights(self.engine, str(path))
        self.client = TestClient(make_vllm_endpoint(url, self.weights), raise_server_exceptions=False)

    def publish(self) -> None:
        with torch.no_grad():
            self.model.weight += 1
        self.publisher.publish()

    def ask(self, **fields: Any) -> Any:
        return self.client.post("/v1/chat/completions", json=QUESTION | fields)


def test_answers_name_the_version_that_has_sampled_them(server: Server, tmp_path: Path) -> None:
    job = Job(tmp_path, server.url)
    with job.client:
        assert not job.weights.update()
        assert job.client.get("/version").status_code == 503
        assert job.ask().status_code == 503
        for version in (1, 2):
            job.publish()
            assert job.weights.update()
            assert not job.weights.update()
            assert job.client.get("/version").json() == {"version": version}
            answer = job.ask(max_tokens=3, logprobs=True)
            assert answer.json()["model"] == f"policy@{version}"
            assert answer.json()["choices"] == [{"token_ids": [1]}]
    added = {"model": "policy", "return_token_ids": True}
    assert server.requests == [QUESTION | {"max_tokens": 3, "logprobs": True} | added] * 2
    assert job.engine.calls == [{"place": str(tmp_path)}, 1, "1", 2, "2"]


def test_an_update_waits_for_requests_and_requests_for_an_update(server: Server, tmp_path: Path) -> None:
    job = Job(tmp_path, server.url)
    job.publish()
    job.weights.update()
    with job.client, ThreadPoolExecutor(3) as threads:
        server.allowed.clear()
        running = threads.submit(job.ask)
        while not server.requests:
            threading.Event().wait(0.01)
        job.publish()
        update = threads.submit(job.weights.update)
        while not job.weights._lock._paused:
            threading.Event().wait(0.01)
        later = threads.submit(job.ask)
        threading.Event().wait(0.2)
        assert len(server.requests) == 1
        assert not update.done()
        server.allowed.set()
        assert running.result().json()["model"] == "policy@1"
        assert update.result()
        assert later.result().json()["model"] == "policy@2"


def test_what_cannot_be_answered_is_refused(server: Server, tmp_path: Path) -> None:
    job = Job(tmp_path, server.url)
    job.publish()
    job.weights.update()
    with job.client:
        assert job.ask(model="judge").status_code == 404
        assert job.ask(stream=True).status_code == 400
        assert not server.requests
        server.status = 400
        refusal = job.ask()
        assert (refusal.status_code, refusal.json()["model"]) == (400, "policy")
    gone = Job(tmp_path, "http://127.0.0.1:9")
    gone.weights.update()
    with gone.client:
        answer = gone.ask()
    assert answer.status_code == 503
    assert "ConnectError" in answer.json()["error"]["message"]


def test_a_version_that_cannot_be_loaded_ends_the_following(server: Server, tmp_path: Path) -> None:
    job, stopped = Job(tmp_path, server.url, bad=2), threading.Event()
    job.publish()
    with ThreadPoolExecutor(1) as thread:
        following = thread.submit(job.weights.follow, stopped)
        while job.weights.version is None:
            threading.Event().wait(0.01)
        job.publish()
        with pytest.raises(RolloutError, match="it cannot be loaded"):
            following.result(60)
    assert job.weights.version is None
