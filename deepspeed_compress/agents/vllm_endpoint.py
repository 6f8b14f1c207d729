"""Endpoint in front of a vLLM server, which follows published weights and answers agents.

vLLM's answers name no version, and its weights may change between two tokens. The endpoint passes requests on, changes
the weights only while none runs, and labels each answer with the version that has sampled it: the model's name in a
response is "policy@12". It also asks for token ids, which tracers of agent frameworks record.
"""

import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
from fastapi import FastAPI, HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException as StarletteError
from starlette.requests import Request
from starlette.responses import JSONResponse

from deepspeed_compress.agents.serving import Guard, error_response
from deepspeed_compress.config.problems import show
from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import open_store
from deepspeed_compress.rollout.receiver import Updates
from deepspeed_compress.rollout.request_lock import RequestLock
from deepspeed_compress.rollout.versions import find_versions
from deepspeed_compress.rollout.vllm import WeightControl, follow_weights, load_version

_IDLE_S = 0.05
"""Seconds between two looks for a new version."""
_JSON = {"Content-Type": "application/json"}


class ServerWeights:
    """Weights of a vLLM server that follows a store.

    Args:
        engine: the server.
        place: the published versions, as the hosts of the server see them.

    Attributes:
        version: the version that the server has; None before the first one, and after one that it could not load.
    """

    def __init__(self, engine: WeightControl, place: str) -> None:
        self._engine, self._place, self._store = engine, place, open_store(place)
        self._lock, self._follows = RequestLock(), False
        self.version: int | None = None

    def update(self) -> bool:
        """Let the server load the newest version between requests. Return True if there was a newer one.

        Raises:
            RolloutError: the server cannot load it.
            OSError: the store cannot be read, or the server does not answer.
        """
        newest = max(find_versions(self._store), default=None)
        if newest is None or newest == self.version:
            return False
        if not self._follows:
            follow_weights(self._engine, self._place)
            self._follows = True
        with self._lock.pause():
            self.version = None
            load_version(self._engine, newest)
            self.version = newest
        return True

    @asynccontextmanager
    async def request(self) -> AsyncIterator[int]:
        """Keep updates out of the block of a coroutine, and yield the version.

        Raises:
            RolloutError: the server has no version.
        """
        async with self._lock.coroutine_request():
            if self.version is None:
                raise RolloutError("the server has no published weights yet")
            yield self.version

    def follow(self, stopped: threading.Event) -> None:
        """Load new versions until `stopped` is set. While the store cannot be read, the server keeps its version.

        Raises:
            RolloutError: the server could not load a version, so its weights are not known.
            OSError: the same.
        """
        updates = Updates(self)
        while not stopped.wait(_IDLE_S):
            updates()


async def _refused(_: Request, error: StarletteError) -> JSONResponse:
    return error_response(error.status_code, str(error.detail), error.headers)


async def _failed(_: Request, error: Exception) -> JSONResponse:
    return error_response(500, f"{type(error).__name__}: {error}")


async def _malformed(_: Request, error: RequestValidationError) -> JSONResponse:
    problems = (f"/{'/'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors())
    return error_response(400, "; ".join(problems))


class _Service:
    """Handlers of the endpoint."""

    def __init__(self, url: str, weights: ServerWeights, name: str) -> None:
        # Rollouts wait as long as they are told to, and all of them may wait together.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(base_url=url, timeout=None, limits=limits)
        self._weights, self._name = weights, name

    async def version(self) -> dict[str, int]:
        if self._weights.version is None:
            raise HTTPException(503, "the server has no published weights yet")
        return {"version": self._weights.version}

    async def chat(self, request: dict[str, Any]) -> JSONResponse:
        if request.get("model") not in (None, self._name):
            message = f"/model: {show(request['model'])} does not exist (allowed: {show(self._name)})"
            return error_response(404, message, code="model_not_found")
        if request.get("stream"):
            raise HTTPException(400, "/stream: true is not possible (allowed: false)")
        # Unlike httpx's own encoder, this one has a form for NaN and for half of a surrogate pair: vLLM refuses them.
        body = json.dumps(request | {"model": self._name, "return_token_ids": True})
        try:
            async with self._weights.request() as version:
                answer = await self._client.post("/v1/chat/completions", content=body, headers=_JSON)
        except (RolloutError, httpx.HTTPError) as error:
            raise HTTPException(503, f"{type(error).__name__}: {error}") from error
        label = {"model": f"{self._name}@{version}"} if answer.is_success else {}
        return JSONResponse(answer.json() | label, answer.status_code)


def make_vllm_endpoint(url: str, weights: ServerWeights, name: str = "policy", secret: str | None = None) -> FastAPI:
    """Return the application that serves a vLLM server's policy; run it with `serving.make_server`.

    Args:
        url: address of the server, whose model is named `name`.
        weights: its weights, which a thread lets `follow` the store.
        name: name of the model.
        secret: key that requests must bring as a bearer token; None to serve everyone who reaches the port.
    """
    service = _Service(url, weights, name)
    handlers: Any = {StarletteError: _refused, RequestValidationError: _malformed, Exception: _failed}
    app = FastAPI(title=name, exception_handlers=handlers)
    app.add_middleware(Guard, secret=secret)
    model = {"id": name, "object": "model", "owned_by": "deepspeed_compress"}
    app.add_api_route("/v1/chat/completions", service.chat, methods=["POST"], response_model=None)
    app.add_api_route("/v1/models", lambda: {"object": "list", "data": [model]}, methods=["GET"])
    app.add_api_route("/version", service.version, methods=["GET"])
    return app
