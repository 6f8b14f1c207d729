"""A policy that serves requests from a thread of its own, and takes new weights between batches of requests."""

import queue
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from deepspeed_compress.agents.generation import Completion, Sampling, complete


@dataclass(frozen=True)
class Answer:
    """A completion, and the version of the weights that sampled it."""

    completion: Completion
    version: int


@dataclass(frozen=True)
class _Request:
    prompt: tuple[int, ...]
    sampling: Sampling
    answer: "Future[Answer]" = field(default_factory=Future)


def _first_version() -> int:
    return 0


class Policy:
    """Samples completions for waiting requests, together if they have equal settings.

    Weights change only between batches, so every token of a completion is sampled by the version that the answer names.

    Args:
        model: a causal language model of transformers.
        pad: id of the padding token.
        end: id of the token that ends a completion; None if there is none.
        update: brings the model to its newest weights, and returns their version; called between batches, and
            repeatedly while no request waits.
        largest: largest number of requests in a batch.
        idle_s: seconds between two calls of `update` while no request waits.
    """

    def __init__(
        self,
        model: Any,
        pad: int,
        end: int | None,
        update: Callable[[], int] = _first_version,
        largest: int = 32,
        idle_s: float = 0.05,
    ) -> None:
        self._model, self._pad, self._end = model, pad, end
        self._update, self._largest, self._idle_s = update, largest, idle_s
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._kept: list[_Request] = []
        self._stopped = threading.Event()
        self.version = update()
        """Version of the weights that sample now."""
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Answer]":
        """Return the future answer to `prompt`, token ids."""
        request = _Request(tuple(prompt), sampling)
        self._waiting.put(request)
        return request.answer

    def stop(self) -> None:
        """Stop after the running batch; requests that still wait are canceled."""
        self._stopped.set()
        self._thread.join()
        for request in self._collected():
            request.answer.cancel()

    def _serve(self) -> None:
        while not self._stopped.is_set():
            try:
                self.version = self._update()
            except Exception as error:
                self._fail(error)
                return
            batch = self._next_batch()
            if batch:
                self._answer(batch)

    def _fail(self, error: Exception) -> None:
        """Pass `error`, which keeps the weights from being updated, to all requests until `stop`."""
        while not self._stopped.is_set():
            for request in self._collected():
                request.answer.set_exception(error)
            self._wait()

    def _wait(self) -> None:
        """Wait a moment for a request."""
        try:
            self._kept.append(self._waiting.get(timeout=self._idle_s))
        except queue.Empty:
            return

    def _collected(self) -> list[_Request]:
        """Return all requests that wait, the oldest first."""
        while not self._waiting.empty():
            self._kept.append(self._waiting.get())
        collected, self._kept = self._kept, []
        return collected

    def _next_batch(self) -> list[_Request]:
        """Return the oldest request and those that can share its batch; empty if none waits."""
        if not self._kept:
            self._wait()
        waiting = self._collected()
        batch = [one for one in waiting if one.sampling == waiting[0].sampling][: self._largest]
        taken = set(map(id, batch))
        self._kept = [one for one in waiting if id(one) not in taken]
        return batch

    def _answer(self, batch: Sequence[_Request]) -> None:
        prompts = [one.prompt for one in batch]
        try:
            completions = complete(self._model, prompts, batch[0].sampling, self._pad, self._end)
        except Exception as error:
            # A prompt that the model refuses fails its own request, and not the thread.
            for request in batch:
                request.answer.set_exception(error)
            return
        for request, completion in zip(batch, completions, strict=True):
            request.answer.set_result(Answer(completion, self.version))
