"""OpenAI's client, and those of LiteLLM and LangChain, at an endpoint that is served."""

import gc
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="uvicorn is not installed: pip install -e .[http]")

from deepspeed_compress.agents import endpoint
from deepspeed_compress.agents.generation import Sampling
from deepspeed_compress.agents.policy import Answer
from tests.support.endpoints import SECRET, Ready, request, served

pytestmark = pytest.mark.filterwarnings("default")
"""The clients warn about themselves."""
ASK = [{"role": "user", "content": "1+1="}]


def by_openai(url: str, key: str) -> str:
    import openai

    return str(openai.OpenAI(base_url=url, api_key=key).chat.completions.create(model="policy", messages=ASK).model)


def by_litellm(url: str, key: str) -> str:
    import litellm

    return str(litellm.completion("openai/policy", ASK, base_url=url, api_key=key, num_retries=2).model)


def by_langchain(url: str, key: str) -> str:
    from langchain_openai import ChatOpenAI

    return str(ChatOpenAI(model="policy", base_url=url, api_key=key).invoke("1+1=").response_metadata["model_name"])


CLIENTS: Mapping[str, Callable[[str, str], str]] = {
    "openai": by_openai,
    "litellm": by_litellm,
    "langchain_openai": by_langchain,
}


@pytest.fixture(params=CLIENTS)
def ask(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], str]]:
    # LiteLLM would fetch the prices of all models.
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    yield CLIENTS[request.param]
    # They leave connections open, of which other tests would be warned.
    gc.collect()


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


def test_a_client_is_answered_by_a_version(ask: Callable[[str, str], str]) -> None:
    with served(Ready()) as port:
        assert ask(f"http://127.0.0.1:{port}/v1", SECRET) == "policy@1"


def test_a_client_gets_its_own_error_for_a_wrong_key(ask: Callable[[str, str], str]) -> None:
    import openai

    # Those of LiteLLM and LangChain are subclasses.
    with served(Ready()) as port, pytest.raises(openai.AuthenticationError, match="Incorrect API key provided"):
        ask(f"http://127.0.0.1:{port}/v1", "wrong")


def test_a_client_tries_again_when_there_is_too_much_load(
    ask: Callable[[str, str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
        assert ask(f"http://127.0.0.1:{port}/v1", SECRET) == "policy@1"
    assert statuses == [429]
