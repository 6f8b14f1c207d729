"""A policy that serves requests from a thread of its own, and takes new weights between batches of requests."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepspeed_compress.agents.generation import Completion, Sampling, complete, end_tokens
from deepspeed_compress.errors import RolloutError

_LOG = logging.getLogger(__name__)
_PAUSE = 10.0
"""Pause after a failed update, in multiples of its time: requests that wait for updates lose a tenth of their time."""
_LONGEST_PAUSE = 60.0
"""Longest such pause in seconds, after which new weights would be late when the store is back."""


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


class Receiving(Protocol):
    """Receiver of published weights, such as `rollout.Receiver`.

    Attributes:
        version: the held version; None if no complete one is held.
    """

    version: int | None

    def update(self) -> object:
        """Take the newest version. Raises RolloutError or OSError if it cannot be reached."""


class Updates:
    """Updates of a policy by a receiver. While the store cannot be read, the policy goes on with the held version.

    Answers name this version, so the learner decides how far behind is too far. An outage is logged when it begins.

    Args:
        receiver: receiver of the policy's model.

    Examples:
        >>> policy = Policy(model, tokenizer.pad_token_id, tokenizer.eos_token_id, Updates(Receiver(model, store)))
    """

    def __init__(self, receiver: Receiving) -> None:
        self._receiver, self._is_away, self._next = receiver, False, 0.0

    def __call__(self) -> int:
        """Return the version that the model has now, 0 before the first one.

        Raises:
            RolloutError: the update failed, and no complete version is held.
            OSError: the same, because of the store.
        """
        version, begin = self._receiver.version, time.monotonic()
        if version is not None and begin < self._next:
            return version
        try:
            self._receiver.update()
        except (RolloutError, OSError) as error:
            self._go_on(error)
            end = time.monotonic()
            self._next = end + min(_PAUSE * (end - begin), _LONGEST_PAUSE)
        else:
            self._is_away = False
        return self._receiver.version or 0

    def _go_on(self, error: Exception) -> None:
        version = self._receiver.version
        if version is None:
            raise error
        if not self._is_away:
            _LOG.warning("The weights cannot be updated, so version %d goes on answering: %s", version, error)
        self._is_away = True


class Policy:
    """Samples completions for waiting requests, together if they have equal settings.

    Weights change only between batches, so every token of a completion is sampled by the version that the answer names.

    Args:
        model: a causal language model of transformers.
        pad: id of the padding token; None if the tokenizer has none.
        end: ids of the tokens that end a completion, or the tokenizer's one; None if it has none. Those of the model's
            configurations end it, too.
        update: brings the model to its newest weights, and returns their version (see `Updates`); called between
            batches, and repeatedly while no request waits. If it fails, waiting requests fail, because the weights may
            be incomplete.
        largest: largest number of requests in a batch.
        idle_s: seconds between two calls of `update` while no request waits.
    """

    def __init__(
        self,
        model: Any,
        pad: int | None,
        end: int | Iterable[int] | None,
        update: Callable[[], int] = _first_version,
        largest: int = 32,
        idle_s: float = 0.05,
    ) -> None:
        self._model, self._pad, self._ends = model, pad, end_tokens(model, end)
        self._update, self._largest, self._idle_s = update, largest, idle_s
        self._waiting: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._kept: list[_Request] = []
        self._stopped = threading.Event()
        self.longest: int | None = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        """Largest number of tokens of a prompt and its completion; None if positions have no limit, as with ALiBi."""
        self.version = update()
        """Version of the weights that sample now."""
        self._thread = threading.Thread(target=self._serve, name="policy", daemon=True)
        self._thread.start()

    def submit(self, prompt: Sequence[int], sampling: Sampling) -> "Future[Answer]":
        """Return the future answer to `prompt`, token ids. It is canceled if the policy has stopped.

        Cancel it if nobody needs it any more: sampling then ends after the next token.
        """
        request = _Request(tuple(prompt), sampling)
        self._waiting.put(request)
        if self._stopped.is_set():
            request.answer.cancel()
        return request.answer

    @property
    def stopped(self) -> bool:
        """Return True after `stop` was called."""
        return self._stopped.is_set()

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
                # The weights may be incomplete. The next update may succeed, for example when the store is back.
                self._wait()
                _fail(self._collected(), error)
            else:
                self._answer(self._next_batch())

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
        return [request for request in collected if not request.answer.cancelled()]

    def _next_batch(self) -> list[_Request]:
        """Return the oldest request and those that can share its batch; empty if none waits."""
        if not self._kept:
            self._wait()
        waiting = self._collected()
        alike = [one for one in waiting if one.sampling == waiting[0].sampling][: self._largest]
        taken = set(map(id, alike))
        self._kept = [one for one in waiting if id(one) not in taken]
        return alike

    def _answer(self, batch: Sequence[_Request]) -> None:
        try:
            completions = self._complete(batch)
        except Exception as error:
            if len(batch) == 1:
                _fail(batch, error)
            else:
                # A prompt that the model refuses fails alone.
                for request in batch:
                    if not request.answer.cancelled():
                        self._answer([request])
            return
        for request, completion in zip(batch, completions, strict=True):
            # A future that is not running yet can be canceled until here.
            if request.answer.set_running_or_notify_cancel():
                request.answer.set_result(Answer(completion, self.version))

    def _complete(self, batch: Sequence[_Request]) -> list[Completion]:
        if not batch:
            return []
        prompts = [one.prompt for one in batch]
        answers = [one.answer for one in batch]
        return complete(
            self._model, prompts, batch[0].sampling, self._pad, self._ends, lambda number: answers[number].cancelled()
        )


def _fail(requests: Sequence[_Request], error: Exception) -> None:
    for request in requests:
        if request.answer.set_running_or_notify_cancel():
            request.answer.set_exception(error)
