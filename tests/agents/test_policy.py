"""Sampling, and an endpoint whose answers name the version of the weights."""

import asyncio
import gc
import json
import logging
import math
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from deepspeed_compress.agents.generation import Completion, Sampling, complete
from deepspeed_compress.agents.grpo import next_token_logprobs
from deepspeed_compress.agents.policy import Policy, Updates
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


def choosing(token: int) -> Any:
    """Return a model that always chooses `token`."""
    model = network()
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 50.0
    return model


@pytest.mark.parametrize("place", ["config", "generation_config"])
@pytest.mark.parametrize("ids", [7, [3, 7]])
def test_every_end_token_of_the_model_ends_a_completion(place: str, ids: Any) -> None:
    """Chat models end a turn with a token that generation_config.json lists, and the tokenizer does not name."""
    model = choosing(7)
    getattr(model, place).eos_token_id = ids
    policy = Policy(model, PAD, END, idle_s=0.001)
    futures = [policy.submit(prompt, Sampling(8)) for prompt in ((1, 2), (3,))]
    found = [(future.result().completion.tokens, future.result().completion.finished) for future in futures]
    policy.stop()
    assert found == [((7,), True)] * 2


def test_a_completion_of_a_batch_has_no_padding_behind_any_end_token() -> None:
    model = network()
    torch.manual_seed(3)
    ends = {3, 7, END}
    for one in complete(model, [(1, 2), (3, 4, 5), (6,)] * 8, Sampling(12), PAD, ends):
        assert one.finished == (one.tokens[-1] in ends)
        assert not ends.intersection(one.tokens[:-1])
        assert len(one.logprobs) == len(one.tokens)


def test_a_tokenizer_without_a_padding_token_gives_the_same_completions() -> None:
    prompts, found = [(1, 2), (3, 4, 5, 6), (7,)], []
    for pad in (PAD, None):
        torch.manual_seed(1)
        found.append([one.tokens for one in complete(network(), prompts, Sampling(8), pad, END)])
    assert found[0] == found[1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-6])
def test_a_temperature_close_to_zero_takes_the_likeliest_token(temperature: float) -> None:
    cold, greedy = (complete(network(), [(1, 2)], Sampling(8, one), PAD, END) for one in (temperature, 0.0))
    assert cold == greedy


class Peak(TorchDispatchMode):
    """Largest number of elements that tensors of at least `counted` elements have at a time."""

    def __init__(self, counted: int) -> None:
        super().__init__()
        self.counted, self.now, self.most = counted, 0, 0

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result._base is None and result.numel() >= self.counted:
            self._add(result.numel())
            weakref.finalize(result, self._add, -result.numel())
        return result

    def _add(self, number: int) -> None:
        self.now += number
        self.most = max(self.most, self.now)


def test_memory_does_not_grow_with_tokens_times_vocabulary() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    vocabulary, rows, found = 5000, 2, []
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 1, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=vocabulary, bos_token_id=0, eos_token_id=0, **sizes)).eval()
    for tokens in (4, 40):
        with Peak(vocabulary) as peak:
            complete(model, [(1, 2)] * rows, Sampling(tokens), 0, None)
        found.append(peak.most / (rows * vocabulary))
    assert found[0] == found[1] < 16


CUTS = {
    "do_sample": True,
    "epsilon_cutoff": 0.09,
    "eta_cutoff": 0.09,
    "forced_eos_token_id": 4,
    "max_time": 1e-9,
    "num_return_sequences": 2,
}


@pytest.mark.parametrize("temperature", [1.0, 0.0])
def test_settings_of_the_model_do_not_change_what_is_sampled(temperature: float) -> None:
    """Log-probabilities would be those of another distribution."""
    model, found = network(), []
    for changes in (
        {},
        {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "min_p": 0.9, "suppress_tokens": [3]},
        CUTS,
    ):
        model.generation_config.update(**changes)
        torch.manual_seed(1)
        found.append(complete(model, [(1, 2), (3, 4, 5)], Sampling(8, temperature), PAD, END))
    assert found[0] == found[1] == found[2]


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
    found = [answer.result() for answer in answers]
    policy.stop()
    assert all(set(one.completion.tokens) == {one.version % 10} for one in found)
    assert len({one.version for one in found}) > 1


def test_requests_with_other_settings_are_not_mixed() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    lengths = [3, 5, 3, 7, 5]
    futures = [policy.submit((1, 2), Sampling(length, top_p=0.9)) for length in lengths]
    found = [future.result().completion for future in futures]
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


class Counted:
    """Forward passes of a model: each of them reports itself, and waits."""

    def __init__(self, model: Any) -> None:
        self.passes, self.begun, self.go_on = 0, threading.Event(), threading.Event()
        model.register_forward_pre_hook(self._count)

    def _count(self, *_: Any) -> None:
        self.passes += 1
        self.begun.set()
        assert self.go_on.wait(60)


def test_a_request_that_is_canceled_while_it_is_sampled_ends() -> None:
    model = network()
    counted, policy = Counted(model), Policy(model, PAD, None, idle_s=0.001)
    future = policy.submit((1, 2), Sampling(16))
    assert counted.begun.wait(60)
    assert future.cancel()
    counted.go_on.set()
    policy.stop()
    assert counted.passes == 1


def test_a_canceled_request_does_not_end_the_others_of_its_batch() -> None:
    model, begin = choosing(3), threading.Event()
    counted, policy = Counted(model), Policy(model, PAD, END, held_until(begin))
    futures = [policy.submit((1, 2), Sampling(6)) for _ in range(2)]
    begin.set()
    assert counted.begun.wait(60)
    assert futures[0].cancel()
    counted.go_on.set()
    assert futures[1].result().completion.tokens == (3,) * 6
    policy.stop()


def test_a_request_whose_client_disconnects_is_canceled(caplog: pytest.LogCaptureFixture) -> None:
    model = network()
    counted, policy = Counted(model), Policy(model, PAD, END, idle_s=0.001)
    app, futures = client(policy=policy).app, []
    policy.submit = lambda *request: futures.append(Policy.submit(policy, *request)) or futures[-1]  # type: ignore
    body = json.dumps({"messages": [{"role": "user", "content": "1+1="}], "max_tokens": 12, "n": 3}).encode()
    messages = iter([{"type": "http.request", "body": body}])

    async def receive() -> Any:
        if (message := next(messages, None)) is None:
            await asyncio.to_thread(counted.begun.wait, 60)
        return message or {"type": "http.disconnect"}

    async def send(message: Any) -> None: ...

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers, "query_string": b""}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), 60))
    counted.go_on.set()
    policy.stop()
    gc.collect()
    assert [future.cancelled() for future in futures] == [True] * 3
    assert counted.passes == 1
    assert not caplog.records, "a client that leaves is no error"


class Away:
    """A receiver whose store can be away. If it breaks, the weights are incomplete."""

    def __init__(self) -> None:
        self.version: int | None = None
        self.away, self.breaks, self.calls = False, False, 0

    def update(self) -> None:
        self.calls += 1
        if self.breaks:
            self.version = None
        if self.away:
            raise ConnectionError("the store is away")
        self.version = (self.version or 0) + 1


def test_requests_are_answered_by_the_held_version_while_the_store_is_away(caplog: pytest.LogCaptureFixture) -> None:
    receiver = Away()
    updates = Updates(receiver)
    policy = Policy(network(), PAD, END, updates, idle_s=0.001)
    answers = client(policy=policy)
    with caplog.at_level(logging.WARNING):
        receiver.away = True
        found = [ask(answers, max_tokens=2) for _ in range(3)]
        assert [one.status_code for one in found] == [200] * 3
        [said] = [record.getMessage() for record in caplog.records]
        assert said.endswith("goes on answering: the store is away")
        receiver.away = False
        before = policy.version
        while policy.version < before + 2:
            policy.submit((1,), Sampling(1)).result(60)
        receiver.away = True
        calls = receiver.calls
        while receiver.calls < calls + 2:
            policy.submit((1,), Sampling(1)).result(60)
        assert len(caplog.records) == 2
    receiver.breaks = True
    while ask(answers, max_tokens=2).status_code != 503:
        pass
    policy.stop()


def test_a_store_that_takes_long_to_fail_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("deepspeed_compress.agents.policy.time.monotonic", lambda: now[0])
    receiver = Away()
    updates = Updates(receiver)
    assert updates() == 1

    def update() -> None:
        now[0] += 8.0
        Away.update(receiver)

    receiver.away, receiver.update = True, update  # type: ignore[method-assign]
    for _ in range(100):
        assert updates() == 1
        now[0] += 1.0
    assert receiver.calls == 3


@pytest.mark.parametrize("kind", [RolloutError, ConnectionError])
def test_requests_during_a_failed_update_fail_and_later_ones_are_answered(kind: type[Exception]) -> None:
    broken = threading.Event()

    def update() -> int:
        if broken.is_set():
            raise kind("the store is away")
        return 0

    policy = Policy(network(), PAD, END, update, idle_s=0.001)
    answers = client(policy=policy)
    assert ask(answers, max_tokens=2).status_code == 200
    broken.set()
    # The update before the first request may have succeeded.
    while (refused := ask(answers, max_tokens=2)).status_code == 200:
        pass
    assert refused.status_code == 503
    assert "the store is away" in refused.json()["error"]["message"]
    broken.clear()
    while (answer := ask(answers, max_tokens=2)).status_code == 503:
        pass
    assert answer.status_code == 200
    policy.stop()


def test_requests_to_a_policy_that_has_stopped_fail() -> None:
    policy = Policy(network(), PAD, END, idle_s=0.001)
    policy.stop()
    refused = ask(client(policy=policy))
    error = {"message": "the policy has stopped", "type": "server_error", "param": None, "code": None}
    assert (refused.status_code, refused.json()) == (503, {"error": error})


def ask(to: Any, **fields: Any) -> Any:
    """Return the answer of a client's endpoint."""
    return to.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "1+1="}], **fields})


def client(secret: str | None = None, policy: Policy | None = None) -> Any:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install -e .[rollout]")
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


def test_a_request_without_max_tokens_gets_what_fits() -> None:
    policy = Policy(choosing(3), PAD, END, idle_s=0.001)
    answer = ask(client(policy=policy)).json()
    assert answer["choices"][0]["token_ids"] == [3] * 16


def test_an_unknown_model_is_refused_as_by_openai() -> None:
    answers = client()
    refused = ask(answers, model="gpt-5")
    message = '/model: "gpt-5" does not exist (allowed: "policy")'
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": "model_not_found"}
    assert (refused.status_code, refused.json()) == (404, {"error": error})
    for one in answers.get("/v1/models").json()["data"]:
        assert ask(answers, model=one["id"]).status_code == 200


def test_tokens_in_flight_are_limited_and_given_back() -> None:
    """A request of 5 + 15 tokens runs alone, although 10 are allowed. Two at once are too many."""
    httpx = pytest.importorskip("httpx")
    from deepspeed_compress.agents.endpoint import make_endpoint

    begin = threading.Event()
    app = make_endpoint(Policy(network(), PAD, END, held_until(begin), idle_s=0.001), tokenizer(), most_tokens=10)
    request = {"messages": [{"role": "user", "content": "12+3="}], "max_tokens": 15}

    async def ask() -> list[Any]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://testserver") as asking:
            first = asyncio.ensure_future(asking.post("/v1/chat/completions", json=request))
            await asyncio.sleep(0.2)
            refused = await asking.post("/v1/chat/completions", json=request)
            begin.set()
            return [refused, await first, await asking.post("/v1/chat/completions", json=request)]

    refused, first, later = asyncio.run(ask())
    assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
    assert "20 tokens are being answered (allowed: 10)" in refused.json()["error"]["message"]
    assert (first.status_code, later.status_code) == (200, 200)


def test_an_error_of_the_model_has_openais_form() -> None:
    model = network()
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)
    from fastapi.testclient import TestClient

    answers = TestClient(client(policy=Policy(model, PAD, END)).app, raise_server_exceptions=False)
    refused = ask(answers)
    assert (refused.status_code, refused.json()["error"]["type"]) == (500, "server_error")


def test_positions_that_the_model_does_not_have_are_refused() -> None:
    refused = ask(client(), max_tokens=17)
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
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"/{name}: ")
