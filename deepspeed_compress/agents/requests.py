"""OpenAI chat-completion requests: their fields, which of them are refused, and the prompt that they lead to."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Self

import jinja2
from fastapi import HTTPException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, Json, model_validator

from deepspeed_compress.agents.generation import Sampling, StopStrings
from deepspeed_compress.config.problems import listed, show

_LONGEST_TEXT = 1 << 20
"""Characters of the longest message."""
_MAX_TOKENS = 64
"""Largest number of tokens of an answer whose request names none."""

_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "stream": (False,),
    "tool_choice": ("none", "auto"),
    "top_k": (-1, 0),
    "top_logprobs": (0,),
}
"""Fields that are not implemented, with the values, besides null, that clients send although they change nothing."""
_UNREAD = frozenset(
    {"logprobs", "metadata", "parallel_tool_calls", "return_token_ids", "service_tier", "store", "user"}
)
"""Fields that change no answer."""


class _Fields(BaseModel):
    """Base class of everything that a request consists of. A null is an absent field; others are kept."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, fields: Any) -> Any:
        return (
            {name: field for name, field in fields.items() if field is not None} if isinstance(fields, dict) else fields
        )


class Part(_Fields):
    """A part of a message's content."""

    type: str
    text: str = Field("", max_length=_LONGEST_TEXT)


class CalledFunction(_Fields):
    """The function of a tool call. Chat templates expect its arguments as an object, but OpenAI sends them as JSON."""

    name: str
    arguments: Annotated[Json[dict[str, Any]], BeforeValidator(lambda text: text or "{}")]


class ToolCall(_Fields):
    """A tool call of an earlier answer."""

    function: CalledFunction


class Message(_Fields):
    """A message of a conversation. The chat template also sees its other fields, such as `name` and `tool_call_id`."""

    role: str
    content: Annotated[str, Field(max_length=_LONGEST_TEXT)] | list[Part] = ""
    tool_calls: list[ToolCall] = []

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError('the message has no content (allowed only if its role is "assistant")')
        return self

    @property
    def parts(self) -> list[Part]:
        return [Part(type="text", text=self.content)] if isinstance(self.content, str) else self.content

    @property
    def text(self) -> str:
        return "\n".join(part.text for part in self.parts)


_Stop = Annotated[str, Field(min_length=1)]


class ChatRequest(_Fields):
    """The fields of an OpenAI chat-completion request that are read. `check` tells which others are refused."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=1000)
    tools: list[dict[str, Any]] = []
    max_tokens: int | None = Field(None, ge=1, le=32768)
    max_completion_tokens: int | None = Field(None, ge=1, le=32768)
    temperature: float = Field(1.0, ge=0, allow_inf_nan=False)
    top_p: float = Field(1.0, gt=0, le=1)
    n: int = Field(1, ge=1, le=128)
    stop: _Stop | Annotated[list[_Stop], Field(max_length=4)] = []

    def sampling(self, tokenizer: Any, room: int | None) -> Sampling:
        """Return the settings of sampling, for a model that has room for so many tokens; None if it has for any."""
        strings = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        default = _MAX_TOKENS if room is None else max(1, min(room, _MAX_TOKENS))
        length = self.max_completion_tokens or self.max_tokens or default
        return Sampling(length, self.temperature, self.top_p, StopStrings(strings, tokenizer))


def check(request: ChatRequest, tokenizer: Any) -> None:
    """Check that nothing is asked for that would be ignored.

    Raises:
        HTTPException: something is, with the status 400.
    """
    for problem in (*_unimplemented(request), *_unread_parts(request), *_unread_by_template(request, tokenizer)):
        raise HTTPException(400, problem)


def _unimplemented(request: ChatRequest) -> Iterator[str]:
    for name, value in (request.model_extra or {}).items():
        neutral = _NEUTRAL.get(name, ())
        if name not in _UNREAD and value not in neutral:
            allowed = listed((*neutral, None))
            yield f"/{name}: {show(value)} is not implemented (allowed: {allowed}); leave the field out"


def _unread_parts(request: ChatRequest) -> Iterator[str]:
    for number, message in enumerate(request.messages):
        for place, part in enumerate(message.parts):
            if part.type != "text":
                at = f"/messages/{number}/content/{place}/type"
                yield f'{at}: {show(part.type)} is not read (allowed: "text"); send text only'


def _unread_by_template(request: ChatRequest, tokenizer: Any) -> Iterator[str]:
    """Yield a problem for each field about tools that the chat template, if there is one, does not mention."""
    template = "" if tokenizer.chat_template is None else tokenizer.get_chat_template(tools=request.tools or None)
    found: dict[str, Any] = {"tools": request.tools}
    found |= {f"messages/{number}/tool_calls": message.tool_calls for number, message in enumerate(request.messages)}
    for place, value in found.items():
        if value and place.rpartition("/")[2] not in template:
            yield f"/{place}: the tokenizer has no chat template for it (allowed: null); leave it out or add a template"


def make_prompt(request: ChatRequest, tokenizer: Any) -> list[int]:
    """Return the token ids of the conversation.

    Raises:
        HTTPException: the chat template refuses it, with the status 400.
    """
    if tokenizer.chat_template is None:
        return list(tokenizer("\n".join(message.text for message in request.messages)).input_ids)
    messages = [message.model_dump(exclude_defaults=True) | {"content": message.text} for message in request.messages]
    settings = {"tools": request.tools or None, "add_generation_prompt": True, "return_dict": True}
    try:
        return list(tokenizer.apply_chat_template(messages, **settings)["input_ids"])
    except jinja2.TemplateError as error:
        raise HTTPException(400, f"/messages: the chat template of the tokenizer refuses them: {error}") from error
