"""Asynchronous islands under DeepSpeed: each rank pushes to and pulls from the parameter server."""

from collections.abc import Mapping
from typing import Any

from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.local_sgd.asynchronous_exchange import AsynchronousExchange
from deepspeed_compress.local_sgd.deepspeed.strategy import Given
from deepspeed_compress.local_sgd.elastic_exchange import ExchangeResult, group_of_one
from deepspeed_compress.local_sgd.parameter_server.client import PushClient

__all__ = ["Pushes"]


class Pushes:
    """Exchange with a parameter server; see `way.Way`."""

    def __init__(self, given: Given) -> None:
        elastic, site = given.elastic, given.site
        assert elastic.parameter_server is not None, "made for asynchronous islands"
        self._timeout = elastic.timeout_seconds
        pace = site(Groups(group_of_one())).run.wait_to_send
        self._client = PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds, pace)
        terms = {**given.terms, "max_staleness": elastic.parameter_server.max_staleness}
        self.exchange = AsynchronousExchange(
            given.settings,
            given.master_weights,
            site,
            given.ranks,
            self._client,
            terms,
            lambda: given.rates.step,
            given.diverged,
        )

    def start(self, samples: int) -> Mapping[str, Any]:
        return self.exchange.start(samples)

    def step_ended(self, samples: int) -> ExchangeResult | None:
        return self.exchange.step_ended(samples)

    def before_saving(self) -> None:
        """Wait up to `timeout_seconds` for pending pushes.

        A push that is still pending then is saved as if it had not been sent.
        """
        self.exchange.finish(self._timeout)

    def before_loading(self) -> None:
        """Do nothing: loading does not change the server's state."""

    def described(self) -> dict[str, Any]:
        return self.exchange.described()

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        return self.exchange.resume(saved, steps, samples)

    def leave(self) -> None:
        self.exchange.leave()
