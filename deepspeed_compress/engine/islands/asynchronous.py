"""Asynchronous islands under DeepSpeed: a push client for every rank, and its pushes and pulls."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.communication.asynchronous import AsynchronousExchange
from deepspeed_compress.communication.elastic import Met, group_of_one
from deepspeed_compress.communication.reduction import Groups
from deepspeed_compress.engine.islands.way import Given
from deepspeed_compress.services.parameter_server.client import PushClient

__all__ = ["Pushes"]


class Pushes:
    """See `way.Way`."""

    def __init__(self, given: Given) -> None:
        elastic, site = given.elastic, given.site
        assert elastic.parameter_server is not None, "made for asynchronous islands"
        self._timeout = elastic.timeout_seconds
        pace = site(Groups(group_of_one())).run.wait_to_send
        self._client = PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds, pace)
        terms = {**given.terms, "max_staleness": elastic.parameter_server.max_staleness}
        self.exchange = AsynchronousExchange(
            given.settings,
            given.masters,
            site,
            given.team,
            self._client,
            terms,
            lambda: given.rates.step,
            given.diverged,
        )

    def start(self, samples: int) -> Mapping[str, Any]:
        return self.exchange.start(samples)

    def step_ended(self, samples: int) -> Met | None:
        return self.exchange.step_ended(samples)

    def before_saving(self) -> None:
        """What is on its way is saved as if it had not left, unless it comes soon."""
        self.exchange.finish(self._timeout)

    def before_loading(self) -> None:
        """What the server has is not touched."""

    def described(self) -> dict[str, Any]:
        return self.exchange.described()

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        return self.exchange.resume(saved, steps, samples)

    def leave(self) -> None:
        self.exchange.leave()
