"""Endpoint in front of a vLLM server: labels of versions, and updates between requests. The server is another one."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install .[http]")

import httpx
from starlette.testclient import TestClient

from deepspeed_compress.agents.vllm_endpoint import ServerWeights, make_vllm_endpoint
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from tests.support import http_servers
from tests.support.endpoints import CHAT, SECRET, Engine, Sampler, first_weights

QUESTION = {"messages": [{"role": "user", "content": "1+1="}]}


@pytest.fixture
def server() -> Iterator[Sampler]:
    with http_servers.serving(found := Sampler()):
        yield found


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
        return self.client.post(CHAT, json=QUESTION | fields)


def test_answers_name_the_version_that_has_sampled_them(server: Sampler, tmp_path: Path) -> None:
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
            assert answer.json()["choices"][0]["token_ids"] == [1] * 3
    added = {"model": "policy", "return_token_ids": True}
    assert server.requests == [QUESTION | {"max_tokens": 3, "logprobs": True} | added] * 2
    assert job.engine.calls == [{"place": str(tmp_path)}, 1, "1", 2, "2"]


def test_an_update_waits_for_requests_and_requests_for_an_update(server: Sampler, tmp_path: Path) -> None:
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


def test_what_cannot_be_answered_is_refused(server: Sampler, tmp_path: Path) -> None:
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


def test_an_answer_that_is_no_json_is_an_error_of_openais_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(*_: Any, **__: Any) -> httpx.Response:
        return httpx.Response(200, content=b"<html>")

    monkeypatch.setattr(httpx.AsyncClient, "post", post)
    app = make_vllm_endpoint("http://127.0.0.1:9", first_weights(tmp_path))
    refused = TestClient(app, raise_server_exceptions=False).post(CHAT, json=QUESTION)
    assert (refused.status_code, refused.json()["error"]["type"]) == (500, "server_error")


def test_a_version_that_cannot_be_loaded_ends_the_following(server: Sampler, tmp_path: Path) -> None:
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


@pytest.fixture
def guarded(tmp_path: Path) -> TestClient:
    """Return a client of an endpoint with a secret, in front of a server that is gone."""
    return TestClient(make_vllm_endpoint("http://127.0.0.1:9", first_weights(tmp_path), secret=SECRET))


RIGHT = {"Authorization": f"Bearer {SECRET}"}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": SECRET}])
def test_requests_need_the_secret(header: dict[str, str], guarded: TestClient) -> None:
    refused = guarded.get("/version", headers=header)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "invalid_request_error")
    assert guarded.get("/version", headers=RIGHT).json() == {"version": 1}


def test_a_body_without_the_secret_is_not_read(guarded: TestClient) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": [], "query_string": b""}
    asyncio.run(guarded.app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_an_unknown_method_is_refused_with_the_known_one(guarded: TestClient) -> None:
    refused = guarded.get(CHAT, headers=RIGHT)
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "Method Not Allowed"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_too_large_is_refused(
    chunked: bool, guarded: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deepspeed_compress.agents.serving._LARGEST_BODY", 1000)
    body: Any = iter([b"1" * 600] * 2) if chunked else b"1" * 1200
    refused = guarded.post(CHAT, content=body, headers={"Content-Type": "application/json", **RIGHT})
    assert (refused.status_code, "more than 1000 bytes" in refused.json()["error"]["message"]) == (413, True)


def test_an_unknown_model_is_refused_as_by_openai(server: Sampler, tmp_path: Path) -> None:
    job = Job(tmp_path, server.url)
    job.publish()
    job.weights.update()
    with job.client:
        refused = job.ask(model="gpt-5")
        message = '/model: "gpt-5" does not exist (allowed: "policy")'
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": "model_not_found"}
        assert (refused.status_code, refused.json()) == (404, {"error": error})
        for one in job.client.get("/v1/models").json()["data"]:
            assert job.ask(model=one["id"]).status_code == 200


@pytest.mark.parametrize("body", ["", "[]", "{", "1"])
def test_a_body_that_is_no_object_is_refused(body: str, guarded: TestClient) -> None:
    refused = guarded.post(CHAT, content=body, headers={"Content-Type": "application/json", **RIGHT})
    assert (refused.status_code, refused.json()["error"]["type"]) == (400, "invalid_request_error")
