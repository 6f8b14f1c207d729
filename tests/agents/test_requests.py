"""Fields of OpenAI requests: what clients send by default, what changes an answer, and what is refused by name."""

from typing import Any

import pytest
import torch

from deepspeed_compress.agents.generation import Completion, Sampling, StopStrings, complete
from deepspeed_compress.agents.policy import Policy
from launch.agents.sums import encode
from tests.agents.models import END, PAD, network, tokenizer

PROMPTS = [(1, 2), (3, 4, 5, 6), (7,)]
ASK = {"role": "user", "content": "1+1="}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"numbers": [1, null]}'}}
TALK = [ASK, {"role": "assistant", "content": None, "tool_calls": [CALL]}, {"role": "tool", "content": "2"}]
PLAIN = "{% for one in messages %}{{ one.content }}{% endfor %}"
TOOLS = (
    "{% for tool in tools or [] %}{{ tool.function.name | length }}{% endfor %}"
    "{% for one in messages %}+{{ one.content }}{% for call in one.tool_calls %}"
    "={{ call.function.arguments.numbers[0] }}{{ call.function.arguments.numbers | length }}{% endfor %}{% endfor %}="
)
"""Chat template that shows lengths of tools' names, contents, and arguments, in characters of the tokenizer."""


def sampled(strings: tuple[str, ...]) -> list[Completion]:
    torch.manual_seed(1)
    sampling = Sampling(12, stop=StopStrings(strings, tokenizer()))
    return complete(network(), PROMPTS, sampling, PAD, None)


def text(tokens: tuple[int, ...]) -> str:
    return str(tokenizer().decode(tokens, skip_special_tokens=True))


def test_a_stop_string_ends_a_completion_with_the_token_that_completes_it() -> None:
    whole = sampled(())
    strings = (text(whole[0].tokens[3:5]), text(whole[1].tokens[6:9]))
    for one, found in zip(whole, sampled(strings), strict=True):
        lengths = (length for length in range(13) if any(stop in text(one.tokens[:length]) for stop in strings))
        end = next(lengths, 12)
        assert found == Completion(
            one.tokens[:end], one.logprobs[:end], any(stop in text(one.tokens) for stop in strings)
        )
    assert len(sampled(strings)[0].tokens) < 12


def test_a_stop_string_that_begins_in_the_prompt_does_not_count() -> None:
    whole = sampled(())
    string = text((*PROMPTS[0], whole[0].tokens[0]))
    assert string not in text(whole[0].tokens)
    assert sampled((string,))[0] == whole[0]


def client(template: str | None = None) -> Any:
    pytest.importorskip("fastapi", reason="fastapi is not installed: pip install -e .[agents]")
    from fastapi.testclient import TestClient

    from deepspeed_compress.agents.endpoint import make_endpoint

    reader = tokenizer()
    reader.chat_template = template
    return TestClient(make_endpoint(Policy(network(), PAD, END, idle_s=0.001), reader))


def ask(fields: dict[str, Any], template: str | None = None) -> Any:
    request = {"messages": [ASK], "max_tokens": 6, "temperature": 0, **fields}
    return client(template).post("/v1/chat/completions", json=request)


@pytest.mark.parametrize("several", [False, True])
def test_only_the_text_of_an_answer_is_cut_before_a_stop_string(several: bool) -> None:
    [whole] = ask({}).json()["choices"]
    answer = whole["message"]["content"]
    stop = answer[1:3]
    [choice] = ask({"stop": ["0" * 9, stop] if several else stop}).json()["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (answer[: answer.index(stop)], "stop")
    kept = len(choice["token_ids"])
    assert choice["token_ids"] == whole["token_ids"][:kept]
    assert len(choice["logprobs"]["content"]) == kept
    assert stop in text(tuple(choice["token_ids"]))


@pytest.mark.parametrize("stop", ["", [""], ["1", "2", "3", "4", "5"], [1]])
def test_malformed_stop_strings_are_refused(stop: Any) -> None:
    assert ask({"stop": stop}).status_code == 400


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "stop": None, "stream": False, "max_completion_tokens": None, "top_p": None, "tools": None},
        {"frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "seed": None, "best_of": 1},
        {"response_format": {"type": "text"}, "tool_choice": "auto", "parallel_tool_calls": True, "top_logprobs": None},
        {"model": "policy", "user": "me", "metadata": {}, "store": False, "logprobs": True, "stream_options": None},
        {"return_token_ids": True, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "temperature": None},
    ],
)
def test_defaults_that_clients_send_are_served(fields: dict[str, Any]) -> None:
    assert ask(fields).status_code == 200


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("stream", True, "false, null"),
        ("frequency_penalty", 0.5, "0, null"),
        ("presence_penalty", -1, "0, null"),
        ("logit_bias", {"5": 1}, "{}, null"),
        ("seed", 0, "null"),
        ("response_format", {"type": "json_object"}, '{"type": "text"}, null'),
        ("best_of", 2, "1, null"),
        ("top_logprobs", 2, "0, null"),
        ("tool_choice", "required", '"none", "auto", null'),
        ("top_k", 50, "-1, 0, null"),
        ("unknown", False, "null"),
    ],
)
def test_fields_that_would_change_an_answer_are_refused_by_name(name: str, value: Any, allowed: str) -> None:
    refused = ask({name: value})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(f"/{name}: ")
    assert f"(allowed: {allowed})" in refused.json()["error"]["message"]


def test_text_parts_of_a_message_are_joined() -> None:
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    answer = ask({"messages": [{"role": "user", "content": parts}]}, PLAIN.replace("content", "content[:2]"))
    assert answer.json()["prompt_token_ids"] == encode("1+")
    # The tokenizer has no token for a line break.
    joined = ask({"messages": [{"role": "user", "content": parts}]}).json()["prompt_token_ids"]
    assert [token for token in joined if token != PAD] == encode("1+1=")


def test_parts_that_are_no_text_are_refused_by_name() -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    refused = ask({"messages": [ASK, {"role": "user", "content": [{"type": "text", "text": "1"}, image]}]})
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith('/messages/1/content/1/type: "image_url" is not read')


def test_a_chat_template_gets_tools_and_tool_calls() -> None:
    answer = ask({"messages": TALK, "tools": [TOOL]}, TOOLS)
    assert answer.json()["prompt_token_ids"] == encode("3+1+1=+=12+2=")


@pytest.mark.parametrize("template", [None, PLAIN])
@pytest.mark.parametrize(
    ("fields", "place"), [({"tools": [TOOL]}, "/tools: "), ({"messages": TALK}, "/messages/1/tool_calls: ")]
)
def test_tools_need_a_chat_template_for_them(template: str | None, fields: dict[str, Any], place: str) -> None:
    refused = ask(fields, template)
    assert refused.status_code == 400
    assert refused.json()["error"]["message"].startswith(place)


def test_messages_without_content_are_for_the_assistant_only() -> None:
    empty = {"role": "assistant", "content": None, "tool_calls": [], "refusal": None}
    assert ask({"messages": [ASK, empty]}, PLAIN).json()["prompt_token_ids"] == encode("1+1=")
    assert ask({"messages": [ASK, {"role": "user", "content": None}]}).status_code == 400


def test_messages_that_the_chat_template_refuses_are_refused() -> None:
    refused = ask({}, "{{ raise_exception('roles must alternate') }}")
    assert (refused.status_code, "roles must alternate" in refused.json()["error"]["message"]) == (400, True)


def test_arguments_of_tool_calls_that_are_no_json_are_refused() -> None:
    broken = {**CALL, "function": {"name": "add", "arguments": "{"}}
    assert ask({"messages": [ASK, {"role": "assistant", "tool_calls": [broken]}]}, TOOLS).status_code == 400
