"""OpenAI's client, and those of LiteLLM and LangChain, at an endpoint that is served."""

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install -e .[http]")

from deepspeed_compress.agents import endpoint
from deepspeed_compress.agents.generation import Sampling
from deepspeed_compress.agents.policy import Answer
from tests.support.endpoints import SECRET, Ready, request, served

ASK = [{"role": "user", "content": "1+1="}]
CLIENTS = {
    "openai": "openai.OpenAI(base_url=url, api_key=key).chat.completions.create(model='policy', messages=ask).model",
    "litellm": "litellm.completion('openai/policy', ask, base_url=url, api_key=key, num_retries=2).model",
    "langchain_openai": "langchain_openai.ChatOpenAI(model='policy', base_url=url, api_key=key).invoke('1+1=')"
    ".response_metadata['model_name']",
}
PROGRAM = """
import sys
import openai
import {name}
url, ask = sys.argv[1], {ask}
for key in sys.argv[2:]:
    try:
        print({call})
    except openai.AuthenticationError as error:
        print("refused:", error)
"""
"""Clients have processes of their own, because they leave connections and an event loop behind."""


@pytest.fixture(params=CLIENTS)
def name(request: pytest.FixtureRequest) -> str:
    if importlib.util.find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: pip install openai litellm langchain-openai")
    return str(request.param)


def answers(name: str, port: int, *keys: str) -> list[str]:
    """Return what a client gets for each of `keys`: the model that has answered, or a refusal."""
    program = PROGRAM.format(name=name, ask=ASK, call=CLIENTS[name])
    command = [sys.executable, "-c", program, f"http://127.0.0.1:{port}/v1", *keys]
    # LiteLLM would fetch the prices of all models.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    output = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if line.startswith(("policy", "refused"))]


class Held(Ready):
    """A policy whose first answer comes when it is released."""

    def __init__(self) -> None:
        super().__init__()
        self.first: Future[Answer] = Future()
        self.is_asked = threading.Event()

    def submit(self, prompt: Any, sampling: Sampling) -> "Future[Answer]":
        answer = super().submit(prompt, sampling)
        if self.is_asked.is_set():
            return answer
        self.is_asked.set()
        return self.first


def test_a_client_is_answered_by_a_version_and_gets_its_own_error_for_a_wrong_key(name: str) -> None:
    with served(Ready()) as port:
        answered, refused = answers(name, port, SECRET, "wrong")
    assert answered == "policy@1"
    assert "Incorrect API key provided: the bearer token is missing or wrong" in refused


def test_a_client_tries_again_when_there_is_too_much_load(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that fills the endpoint is answered as soon as the client was refused."""
    policy, refuse, statuses = Held(), endpoint._refused, list[int]()

    async def refused(request: Any, error: Any) -> Any:
        statuses.append(error.status_code)
        policy.first.set_result(Ready().submit((1,), Sampling(1)).result())
        return await refuse(request, error)

    monkeypatch.setattr(endpoint, "_refused", refused)
    with served(policy, most_tokens=70) as port, socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(request(json.dumps({"messages": ASK}).encode()))
        assert policy.is_asked.wait(60)
        assert answers(name, port, SECRET) == ["policy@1"]
    assert statuses == [429]
