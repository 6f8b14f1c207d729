"""Sampling, and an endpoint whose answers name the version of the weights."""

import threading
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from deepspeed_compress.agents.generation import Completion, Sampling, complete
from deepspeed_compress.agents.grpo import next_token_logprobs
from deepspeed_compress.agents.policy import Policy
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


def test_a_prompt_that_is_too_long_fails_alone() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    with pytest.raises((IndexError, RuntimeError, ValueError)):
        policy.submit((1,) * 100, Sampling(4)).result()
    assert policy.submit((1,), Sampling(4)).result().completion.tokens
    policy.stop()


def test_failing_updates_reach_the_requests() -> None:
    calls = iter([0])

    def update() -> int:
        return next(calls)

    policy = Policy(network(), PAD, END, update, idle_s=0.001)
    with pytest.raises(StopIteration):
        policy.submit((1,), Sampling(4)).result()
    policy.stop()


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
    assert client("secret").get("/version", headers=header).status_code == 401
    assert client("secret").get("/version", headers={"Authorization": "Bearer secret"}).status_code == 200


@pytest.mark.parametrize("wrong", [{"messages": []}, {"max_tokens": 0}, {"temperature": -1}, {"n": 1000}])
def test_malformed_requests_are_refused(wrong: dict[str, Any]) -> None:
    request = {"messages": [{"role": "user", "content": "1+1="}], **wrong}
    assert client().post("/v1/chat/completions", json=request).status_code == 422
