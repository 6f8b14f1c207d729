"""OpenAI-compatible endpoint of a policy, which returns token ids, log-probabilities, and the version of the weights.

The fields beyond OpenAI's are those of vLLM (`prompt_token_ids`, and `token_ids` of a choice), which tracers of agent
frameworks record. The version is part of the model's name in a response: "policy@12".

Fields that would change an answer but are not implemented are refused by name (see `requests`). Tools reach the chat
template, but tool calls in answers stay text. An answer ends with the token that completes one of its stop strings. As
in vLLM, only its text is cut before the string: token ids and log-probabilities are those of all sampled tokens.

Errors have OpenAI's form, `{"error": {"message": ...}}`, whose message its clients show. Requests whose client has
disconnected are canceled.

Clients share the memory: bodies and tokens count until the answer has been sent. Text is encoded and decoded in
threads, because the event loop would let all other clients wait.
"""

import asyncio
import secrets
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from typing import Any

from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException as StarletteError
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.types import Message as HttpMessage

from deepspeed_compress.agents.generation import Sampling, StopStrings
from deepspeed_compress.agents.policy import Answer, Policy
from deepspeed_compress.agents.requests import ChatRequest, check, make_prompt
from deepspeed_compress.config.problems import show
from deepspeed_compress.errors import RolloutError

_LARGEST_BODY = 1 << 24
"""Bytes of the largest request."""
_MOST_BODIES = 1 << 26
"""Bytes of all requests that are larger than `_PIECE`, until they are answered."""
_PIECE = 1 << 16
"""Bytes of an answer that are sent before the client has read what precedes them."""
_HELD = "deepspeed_compress.held"
"""Key of a request's scope with the stack that gives back what the request holds, after its answer has been sent."""
_RETRY_AFTER_S = 1
"""Seconds after which a client whose request was refused for load should try again."""


def make_endpoint(
    policy: Policy, tokenizer: Any, name: str = "policy", secret: str | None = None, most_tokens: int = 1 << 22
) -> FastAPI:
    """Return the application that serves `policy`; run it with `serving.make_server`.

    Args:
        policy: the policy.
        tokenizer: a tokenizer of transformers. Without a chat template, the contents of messages are joined by lines.
        name: name of the model.
        secret: key that requests must bring as a bearer token; None to serve everyone who reaches the port.
        most_tokens: most tokens, of prompts and longest answers, of the requests that wait, run or are answered
            together. A request beyond them is refused with status 429 and a header Retry-After. A larger request runs
            alone.
    """
    service = _Service(policy, tokenizer, name, _InFlight(most_tokens, "tokens"))
    return make_app(name, secret, service.chat, service.version)


def make_app(name: str, secret: str | None, chat: Callable[..., Any], version: Callable[..., Any]) -> FastAPI:
    """Return the application with these handlers of requests (see `make_endpoint`)."""
    handlers: Any = {StarletteError: _refused, RequestValidationError: _malformed, Exception: _failed}
    app = FastAPI(title=name, exception_handlers=handlers)
    app.add_middleware(_Guard, secret=secret, bodies=_InFlight(_MOST_BODIES, "bytes"))
    model = {"id": name, "object": "model", "owned_by": "deepspeed_compress"}
    app.add_api_route("/v1/chat/completions", chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", lambda: {"object": "list", "data": [model]}, methods=["GET"])
    app.add_api_route("/version", version, methods=["GET"])
    return app


async def _refused(_: Request, error: StarletteError) -> JSONResponse:
    return _error(error.status_code, str(error.detail), error.headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return _error(500, f"{type(error).__name__}: {error}")


async def _malformed(_: Request, error: RequestValidationError) -> JSONResponse:
    problems = (f"/{'/'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
    return _error(400, "; ".join(problems))


def _error(
    status: int, message: str, headers: Mapping[str, str] | None = None, code: str | None = None
) -> JSONResponse:
    """Return an error. Clients tell some errors apart by OpenAI's `code`."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    # JSON may escape half of a surrogate pair, which a message that repeats it cannot be encoded with.
    text = message.encode(errors="backslashreplace").decode()
    return JSONResponse({"error": {"message": text, "type": kind, "param": None, "code": code}}, status, headers)


class _InFlight:
    """Amount that requests hold until they are answered, at most `most` unless a single request has more."""

    def __init__(self, most: int, unit: str) -> None:
        self._most, self._unit, self._held = most, unit, 0

    @contextmanager
    def hold(self, amount: int) -> Iterator[None]:
        """Count the amount of a request inside the block.

        Raises:
            HTTPException: with status 429, there is too much.
        """
        if self._held and self._held + amount > self._most:
            busy = f"requests with {self._held} {self._unit} are being answered (allowed: {self._most})"
            raise HTTPException(429, f"{busy}: try again later", {"Retry-After": str(_RETRY_AFTER_S)})
        self._held += amount
        try:
            yield
        finally:
            self._held -= amount


def unknown_model(asked: object, name: str) -> JSONResponse:
    """Return the refusal of a request for another model than `name`."""
    return _error(404, f"/model: {show(asked)} does not exist (allowed: {show(name)})", code="model_not_found")


class _Guard:
    """Middleware that checks the bearer token before anything of a body is read, and bounds what clients hold."""

    def __init__(self, app: ASGIApp, secret: str | None, bodies: _InFlight) -> None:
        self._app, self._secret, self._bodies = app, secret, bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._admits(Headers(scope=scope).get("authorization", "")):
            # LiteLLM knows a wrong key by the first words only.
            message = "Incorrect API key provided: the bearer token is missing or wrong"
            refusal = _error(401, message, code="invalid_api_key")
            await refusal(scope, receive, send)
            return
        with ExitStack() as held:
            scope[_HELD] = held
            await self._app(scope, _BoundedBody(scope, receive, self._bodies), _Pieces(send))

    def _admits(self, authorization: str) -> bool:
        expected = f"Bearer {self._secret}"
        return self._secret is None or secrets.compare_digest(authorization.encode(), expected.encode())


class _BoundedBody:
    """Messages of a request, as long as neither its body nor those of all requests are too large."""

    def __init__(self, scope: Scope, receive: Receive, bodies: _InFlight) -> None:
        self._receive, self._bodies, self._held = receive, bodies, scope[_HELD]
        self._announced = int(Headers(scope=scope).get("content-length", "0"))
        self._read, self._counted = 0, _PIECE

    async def __call__(self) -> HttpMessage:
        message = await self._receive()
        self._read += len(message.get("body", b""))
        if max(self._read, self._announced) > _LARGEST_BODY:
            raise HTTPException(413, f"the body has more than {_LARGEST_BODY} bytes")
        while self._counted < self._read:
            self._held.enter_context(self._bodies.hold(_PIECE))
            self._counted += _PIECE
        return message


class _Pieces:
    """Sender of bodies in pieces. A client that does not read keeps one of them in the memory of the connection."""

    def __init__(self, send: Send) -> None:
        self._send = send

    async def __call__(self, message: HttpMessage) -> None:
        body = message.get("body", b"")
        ends = range(_PIECE, len(body), _PIECE)
        for end in ends:
            await self._send({**message, "body": body[end - _PIECE : end], "more_body": True})
        await self._send({**message, "body": body[len(ends) * _PIECE :]} if ends else message)


async def _while_connected(futures: Sequence["Future[Answer]"], connection: Request) -> list[Answer]:
    """Return the answers. If the client disconnects, cancel all that it still waits for."""
    answers = asyncio.gather(*map(asyncio.wrap_future, futures), return_exceptions=True)
    # The body has been read, so the next message is that the client has disconnected.
    disconnected = asyncio.ensure_future(connection.receive())
    try:
        await asyncio.wait((answers, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if not answers.done():
            raise HTTPException(499, "the client has disconnected")
        found = await answers
        for failure in (one for one in found if isinstance(one, BaseException)):
            raise failure
        return [one for one in found if isinstance(one, Answer)]
    finally:
        disconnected.cancel()
        for future in futures:
            future.cancel()


class _Service:
    """Handlers of the endpoint."""

    def __init__(self, policy: Policy, tokenizer: Any, name: str, in_flight: _InFlight) -> None:
        self._policy, self._tokenizer, self._name, self._in_flight = policy, tokenizer, name, in_flight

    async def version(self) -> dict[str, int]:
        return {"version": self._policy.version}

    async def chat(self, request: ChatRequest, connection: Request) -> JSONResponse:
        if request.model not in (None, self._name):
            return unknown_model(request.model, self._name)
        prompt, sampling = await asyncio.to_thread(self._read, request)
        # Held until the client has the answer, which would fill the memory if clients did not read.
        tokens = request.n * (len(prompt) + sampling.max_tokens)
        connection.scope[_HELD].enter_context(self._in_flight.hold(tokens))
        try:
            futures = [self._policy.submit(prompt, sampling) for _ in range(request.n)]
            answers = await _while_connected(futures, connection)
        except asyncio.CancelledError:
            if not self._policy.stopped:
                raise
            raise HTTPException(503, "the policy has stopped") from None
        except (RolloutError, OSError) as error:
            raise HTTPException(503, f"the weights cannot be updated: {error}") from error
        return await asyncio.to_thread(self._response, prompt, answers, sampling.stop)

    def _read(self, request: ChatRequest) -> tuple[list[int], Sampling]:
        """Return the prompt, and how to sample.

        Raises:
            HTTPException: with status 400, something in the request is not possible.
        """
        check(request, self._tokenizer)
        prompt = make_prompt(request, self._tokenizer)
        if not prompt:
            raise HTTPException(400, "the messages contain no token of the model's vocabulary")
        longest = self._policy.longest
        sampling = request.sampling(self._tokenizer, None if longest is None else longest - len(prompt))
        self._check_length(len(prompt) + sampling.max_tokens)
        return prompt, sampling

    def _check_length(self, tokens: int) -> None:
        """Refuse positions that the model does not have: on a GPU, they would end the process."""
        longest = self._policy.longest
        if longest is not None and tokens > longest:
            raise HTTPException(400, f"prompt and completion have up to {tokens} tokens (allowed: {longest})")

    def _response(self, prompt: list[int], answers: list[Answer], stop: StopStrings) -> JSONResponse:
        produced = sum(len(one.completion.tokens) for one in answers)
        content = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            # Samples of one request may come from two versions; the oldest one is named.
            "model": f"{self._name}@{min(one.version for one in answers)}",
            "prompt_token_ids": prompt,
            "choices": [self._choice(index, answer, stop) for index, answer in enumerate(answers)],
            "usage": {
                "prompt_tokens": len(prompt),
                "completion_tokens": produced,
                "total_tokens": len(prompt) + produced,
            },
        }
        return JSONResponse(content)

    def _choice(self, index: int, answer: Answer, stop: StopStrings) -> dict[str, Any]:
        completion = answer.completion
        texts = [self._tokenizer.decode([token]) for token in completion.tokens]
        content = [
            {"token": text, "logprob": logprob, "bytes": None, "top_logprobs": []}
            for text, logprob in zip(texts, completion.logprobs, strict=True)
        ]
        return {
            "index": index,
            "message": {"role": "assistant", "content": stop.text(completion.tokens)},
            "finish_reason": "stop" if completion.finished else "length",
            "token_ids": list(completion.tokens),
            "logprobs": {"content": content},
        }
