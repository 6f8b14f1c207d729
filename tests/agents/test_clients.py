"""OpenAI's client, and those of LiteLLM and LangChain, at an endpoint that is served."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install -e .[http]")

from deepspeed_compress.agents import serving, vllm_endpoint
from tests.support.endpoints import SECRET, Sampler, body_of, request, served
from tests.support.transport import until

LONG = 100_000
"""Characters of a message that counts among the bodies in flight."""
CLIENTS = {
    "openai": "openai.OpenAI(base_url=url, api_key=key).chat.completions.create(model='policy', messages=ask).model",
    "litellm": "litellm.completion('openai/policy', ask, base_url=url, api_key=key, num_retries=2).model",
    "langchain_openai": "langchain_openai.ChatOpenAI(model='policy', base_url=url, api_key=key).invoke(ask)"
    ".response_metadata['model_name']",
}
PROGRAM = """
import sys
import openai
import {name}
url, ask = sys.argv[1], [{{"role": "user", "content": "1" * {length}}}]
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


def answers(name: str, port: int, *keys: str, length: int = 4) -> list[str]:
    """Return what a client gets for a message and each of `keys`: the model that has answered, or a refusal."""
    program = PROGRAM.format(name=name, length=length, call=CLIENTS[name])
    command = [sys.executable, "-c", program, f"http://127.0.0.1:{port}/v1", *keys]
    # LiteLLM would fetch the prices of all models.
    environment = os.environ | {"LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    output = subprocess.run(command, env=environment, check=True, timeout=300, capture_output=True, text=True).stdout
    return [line for line in output.splitlines() if line.startswith(("policy", "refused"))]


def test_a_client_is_answered_by_a_version_and_gets_its_own_error_for_a_wrong_key(name: str, tmp_path: Path) -> None:
    with served(tmp_path, Sampler()) as port:
        answered, refused = answers(name, port, SECRET, "wrong")
    assert answered == "policy@1"
    assert "Incorrect API key provided: the bearer token is missing or wrong" in refused


def test_a_client_tries_again_when_there_is_too_much_load(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that fills the endpoint is answered as soon as the client was refused."""
    sampler, refuse, statuses = Sampler(), vllm_endpoint._refused, list[int]()
    sampler.allowed.clear()

    async def refused(request: Any, error: Any) -> Any:
        statuses.append(error.status_code)
        sampler.allowed.set()
        return await refuse(request, error)

    monkeypatch.setattr(vllm_endpoint, "_refused", refused)
    monkeypatch.setattr(serving, "_MOST_BODIES", serving._PIECE)
    with served(tmp_path, sampler) as port, socket.create_connection(("127.0.0.1", port)) as other:
        other.sendall(request(body_of(1, metadata={"a": "x" * LONG})))
        until(lambda: sampler.requests)
        assert answers(name, port, SECRET, length=LONG) == ["policy@1"]
    assert statuses == [429]
