"""Sampling, and an endpoint whose answers name the version of the weights."""

import asyncio
import json
import math
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from deepspeed_compress.agents.generation import Completion, Sampling, complete
from deepspeed_compress.agents.grpo import next_token_logprobs
from deepspeed_compress.agents.policy import Policy
from deepspeed_compress.errors import RolloutError
from tests.agents.models import END, PAD, network, tokenizer


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probabilities_are_those_that_training_computes(temperature: float) -> None:
    model, prompts = network(), [(1, 2), (3, 4, 5, 6), (7,)]
    torch.manual_seed(1)
    for prompt, found in zip(prompts, complete(model, prompts, Sampling(8, temperature), PAD, END), strict=True):
        tokens = torch.tensor([[*prompt, *found.tokens]])
        logprobs = next_token_logprobs(model(tokens).logits, tokens, temperature or 1.0)[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(found.logprobs), logprobs.detach(), rtol=1e-4, atol=1e-4)


def test_a_completion_ends_with_the_end_token() -> None:
    model = network()
    # The model now chooses the end token always.
    with torch.no_grad():
        model.lm_head.weight[END] = 50 * model.transformer.ln_f.bias.new_ones(32)
        model.transformer.ln_f.bias.fill_(1.0)
    [found] = complete(model, [(1, 2)], Sampling(8), PAD, END)
    assert found == Completion((END,), found.logprobs, True)
    [cut] = complete(model, [(1, 2)], Sampling(8), PAD, None)
    assert (len(cut.tokens), cut.finished) == (8, False)


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_settings_of_the_model_do_not_change_what_is_sampled(temperature: float) -> None:
    """Log-probabilities would be those of another distribution."""
    model, found = network(), []
    for changes in ({}, {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_p": 0.9, "suppress_tokens": [3]}):
        model.generation_config.update(**changes)
        torch.manual_seed(1)
        found.append(complete(model, [(1, 2), (3, 4, 5)], Sampling(8, temperature), PAD, END))
    assert found[0] == found[1]


class Weights:
    """Weights that get a new version before every batch: the next token is the number of the version."""

    def __init__(self, model: Any) -> None:
        self.model, self.version = model, -1

    def update(self) -> int:
        self.version += 1
        with torch.no_grad():
            self.model.transformer.ln_f.bias.fill_(1.0)
            self.model.lm_head.weight.zero_()
            self.model.lm_head.weight[self.version % 10] = 50.0
        return self.version


def test_a_completion_never_mixes_versions() -> None:
    weights = Weights(network())
    policy = Policy(weights.model, PAD, END, weights.update, largest=4, idle_s=0.001)
    answers: list[Future[Any]] = []
    lock = threading.Lock()

    def ask() -> None:
        for _ in range(10):
            future = policy.submit((1, 2, 3), Sampling(6))
            with lock:
                answers.append(future)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = [one.result() for one in answers]
    policy.stop()
    assert all(set(one.completion.tokens) == {one.version % 10} for one in found)
    assert len({one.version for one in found}) > 1


def test_requests_with_other_settings_are_not_mixed() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    lengths = [3, 5, 3, 7, 5]
    futures = [policy.submit((1, 2), Sampling(length, top_p=0.9)) for length in lengths]
    found = [one.result().completion for one in futures]
    policy.stop()
    assert all(len(one.tokens) == length or one.finished for one, length in zip(found, lengths, strict=True))


def held_until(begin: threading.Event) -> Callable[[], int]:
    """Return updates that keep the policy's thread waiting until `begin`, so that requests share a batch."""

    def update() -> int:
        # The first call comes from the constructor.
        if threading.current_thread().name == "policy":
            begin.wait()
        return 0

    return update


def test_a_prompt_that_is_too_long_fails_alone() -> None:
    begin = threading.Event()
    policy = Policy(network(), PAD, END, held_until(begin))
    good, bad, other = (policy.submit(prompt, Sampling(4)) for prompt in ((1,), (1,) * 100, (2, 3)))
    begin.set()
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        bad.result()
    assert good.result().completion.tokens
    assert other.result().completion.tokens
    policy.stop()


def test_a_canceled_request_is_left_out() -> None:
    begin = threading.Event()
    policy = Policy(network(), PAD, END, held_until(begin), idle_s=0.001)
    futures = [policy.submit((1, 2), Sampling(4)) for _ in range(3)]
    assert futures[1].cancel()
    begin.set()
    assert futures[0].result().completion.tokens
    assert futures[2].result().completion.tokens
    assert policy.submit((1,), Sampling(4)).result().completion.tokens
    policy.stop()


def test_a_policy_that_has_stopped_answers_nothing() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    policy.stop()
    assert policy.submit((1,), Sampling(4)).cancelled()


@pytest.mark.parametrize("kind", [RolloutError, ConnectionError])
def test_requests_during_a_failed_update_fail_and_later_ones_are_answered(kind: type[Exception]) -> None:
    broken = threading.Event()

    def update() -> int:
        if broken.is_set():
            raise kind("the store is away")
        return 0

    policy = Policy(network(), PAD, END, update, idle_s=0.001)
    answers = client(policy=policy)
    request = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
    assert answers.post("/v1/chat/completions", json=request).status_code == 200
    broken.set()
    refused = answers.post("/v1/chat/completions", json=request)
    # The update before this request may have succeeded.
    while refused.status_code == 200:
        refused = answers.post("/v1/chat/completions", json=request)
    assert refused.status_code == 503
    assert "the store is away" in refused.json()["error"]["message"]
    broken.clear()
    answer = answers.post("/v1/chat/completions", json=request)
    while answer.status_code == 503:
        answer = answers.post("/v1/chat/completions", json=request)
    assert answer.status_code == 200
    policy.stop()


def test_requests_to_a_policy_that_has_stopped_fail() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    policy.stop()
    request = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 2}
    refused = client(policy=policy).post("/v1/chat/completions", json=request)
    error = {"message": "the policy has stopped", "type": "server_error", "param": None, "code": None}
    assert (refused.status_code, refused.json()) == (503, {"error": error})


def client(secret: str | None = None, policy: Policy | None = None) -> Any:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install deepspeed-compress[rollout]")
    from fastapi.testclient import TestClient

    from deepspeed_compress.agents.endpoint import make_endpoint

    return TestClient(make_endpoint(policy or Policy(network(), PAD, END, lambda: 12), tokenizer(), secret=secret))


def test_a_response_has_tokens_log_probabilities_and_the_version() -> None:
    request = {"model": "policy", "messages": [{"role": "user", "content": "12+3="}], "max_tokens": 6, "n": 2}
    answer = client().post("/v1/chat/completions", json=request).json()
    assert answer["model"] == "policy@12"
    assert answer["prompt_token_ids"] == [1, 2, 10, 3, 11]
    assert len(answer["choices"]) == 2
    for choice in answer["choices"]:
        assert 1 <= len(choice["token_ids"]) <= 6
        assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
        kept = [token for token in choice["token_ids"] if token not in (PAD, END)]
        assert choice["message"]["content"].replace(" ", "") == tokenizer().decode(kept).replace(" ", "")


def test_the_version_can_be_asked_for() -> None:
    assert client().get("/version").json() == {"version": 12}


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}])
def test_requests_need_the_secret(header: dict[str, str]) -> None:
    refused = client("secret").get("/version", headers=header)
    assert (refused.status_code, refused.json()["error"]["type"]) == (401, "invalid_request_error")
    assert client("secret").get("/version", headers={"Authorization": "Bearer secret"}).status_code == 200


def test_a_body_without_the_secret_is_not_read() -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        raise AssertionError("the body is read")

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": [], "query_string": b""}
    asyncio.run(client("secret").app(scope, receive, send))
    assert sent[0]["status"] == 401


def test_an_unknown_method_is_refused_with_the_known_one() -> None:
    refused = client().get("/v1/chat/completions")
    assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
    assert refused.json()["error"]["message"] == "Method Not Allowed"


@pytest.mark.parametrize("chunked", [True, False])
def test_a_body_that_is_too_large_is_refused(chunked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = client()
    monkeypatch.setattr("deepspeed_compress.agents.endpoint._LARGEST_BODY", 1000)
    body: Any = iter([b"1" * 600] * 2) if chunked else b"1" * 1200
    refused = answers.post("/v1/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert (refused.status_code, "more than 1000 bytes" in refused.json()["error"]["message"]) == (413, True)


def test_positions_that_the_model_does_not_have_are_refused() -> None:
    request = {"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 17}
    refused = client().post("/v1/chat/completions", json=request)
    assert refused.status_code == 400
    assert "up to 21 tokens (allowed: 20)" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("messages", []), ("max_tokens", 0), ("temperature", -1), ("temperature", math.nan), ("n", 1000)],
)
def test_malformed_requests_are_refused_by_name(name: str, wrong: Any) -> None:
    """OpenAI's clients show the message of the error."""
    request = {"messages": [{"role": "user", "content": "1+1="}], name: wrong}
    headers = {"Content-Type": "application/json"}
    refused = client().post("/v1/chat/completions", content=json.dumps(request), headers=headers)
    assert refused.status_code == 422
    assert refused.json()["error"]["message"].startswith(f"/{name}: ")
