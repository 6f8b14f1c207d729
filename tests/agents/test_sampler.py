"""The example of an endpoint around `generate`: log-probabilities, versions of answers, and fields that it takes."""

from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("fastapi", reason="fastapi is not installed: pip install .[agents]")

from starlette.testclient import TestClient

from deepspeed_compress.agents.grpo import next_token_logprobs
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from launch.agents.sampler import complete, make_app
from tests.agents.models import END, network, tokenizer

ASK = [{"role": "user", "content": "12+3="}]


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_log_probabilities_are_those_that_training_computes(temperature: float) -> None:
    model, prompts = network(), [(1, 2), (3, 4, 5, 6), (7,)]
    torch.manual_seed(1)
    for prompt, found in zip(prompts, complete(model, tokenizer(), prompts, 8, temperature), strict=True):
        tokens = torch.tensor([[*prompt, *found.tokens]])
        logprobs = next_token_logprobs(model(tokens).logits, tokens, temperature or 1.0)[0, len(prompt) - 1 :]
        torch.testing.assert_close(torch.tensor(found.logprobs), logprobs.detach(), rtol=1e-4, atol=1e-4)


def choosing(token: int) -> Any:
    """Return a model that always chooses `token`."""
    model = network()
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[token] = 50.0
    return model


def test_a_completion_ends_with_the_end_token() -> None:
    torch.manual_seed(3)
    for one in complete(network(), tokenizer(), [(1, 2), (3, 4, 5), (6,)] * 8, 12):
        assert END not in one.tokens[:-1]
        assert one.tokens[-1] == END or len(one.tokens) == 12
        assert len(one.logprobs) == len(one.tokens)
    assert complete(choosing(END), tokenizer(), [(1, 2)], 8)[0].tokens == (END,)


class Job:
    """A job that publishes a model, and an endpoint with another one that follows it."""

    def __init__(self, path: Path, served: Any = None) -> None:
        self.model, store = network(), DirectoryStore(path)
        self.publisher = Publisher(self.model, store, dtype="fp32")
        served = served or network()
        self.client = TestClient(make_app(served, tokenizer(), Receiver(served, store)), raise_server_exceptions=False)

    def ask(self, **fields: Any) -> Any:
        return self.client.post("/v1/chat/completions", json={"messages": ASK, "max_tokens": 6} | fields)


def test_answers_are_sampled_by_the_version_that_they_name(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.client.get("/version").json() == {"version": 0}
    for version in (1, 2, 3):
        with torch.no_grad():
            job.model.transformer.ln_f.bias.fill_(1.0)
            job.model.lm_head.weight.zero_()
            job.model.lm_head.weight[version] = 50.0
        job.publisher.publish()
        answer = job.ask().json()
        assert (answer["model"], answer["prompt_token_ids"]) == (f"policy@{version}", [1, 2, 10, 3, 11])
        [choice] = answer["choices"]
        assert (choice["token_ids"], choice["finish_reason"]) == ([version] * 6, "length")
        assert choice["message"]["content"] == str(version) * 6
        assert len(choice["logprobs"]["content"]) == 6
    with torch.no_grad():
        job.model.lm_head.weight[END] = 90.0
    job.publisher.publish()
    assert job.client.get("/version").json() == {"version": 4}
    [choice] = job.ask().json()["choices"]
    assert (choice["token_ids"], choice["message"]["content"], choice["finish_reason"]) == ([END], "", "stop")


def test_settings_of_the_model_do_not_change_what_is_sampled(tmp_path: Path) -> None:
    """Log-probabilities would be those of another distribution."""
    other, found = network(), []
    other.generation_config.update(repetition_penalty=9.0, no_repeat_ngram_size=1, min_p=0.9, suppress_tokens=[3])
    for number, served in enumerate((network(), other)):
        torch.manual_seed(1)
        found.append(Job(tmp_path / str(number), served).ask().json()["choices"])
    assert found[0] == found[1]


def test_an_answer_has_what_fits_into_the_models_positions(tmp_path: Path) -> None:
    job = Job(tmp_path, choosing(3))
    assert job.ask(max_tokens=100).json()["choices"][0]["token_ids"] == [3] * 15
    refused = job.ask(messages=[{"role": "user", "content": "1" * 20}])
    assert (refused.status_code, "no room for an answer" in refused.json()["detail"]) == (400, True)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stream", True), ("n", 2), ("top_p", 0.5), ("model", "judge"), ("messages", []), ("max_tokens", 0)],
)
def test_fields_that_the_example_does_not_take_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    refused = Job(tmp_path).ask(**{name: value})
    assert (refused.status_code, refused.json()["detail"][0]["loc"]) == (422, ["body", name])
