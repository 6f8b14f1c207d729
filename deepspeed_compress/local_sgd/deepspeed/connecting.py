"""Connections of an elastic island: to a coordinator and the other islands, or to a parameter server."""

import os
import socket
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from torch._C._distributed_c10d import TCPStore

from deepspeed_compress.config import Elastic
from deepspeed_compress.local_sgd.anchors import AnchorServer
from deepspeed_compress.local_sgd.asynchronous_exchange import AsynchronousExchange
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates
from deepspeed_compress.local_sgd.elastic_exchange import ElasticExchange
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.local_sgd.shared_anchor import SharedAnchor
from deepspeed_compress.local_sgd.strategy import ExchangeContext, ExchangeStrategy
from deepspeed_compress.transport.client import own_address


def connect(context: ExchangeContext, terms: Mapping[str, Any], rates: LearningRates) -> ExchangeStrategy:
    """Return the exchange strategy that the configuration names, with its connections. Collective in the island.

    Args:
        context: the inputs of any strategy.
        terms: the settings that must be equal in all islands.
        rates: the learning rates of this island.
    """
    elastic, ranks = context.elastic, context.ranks
    if elastic.parameter_server is not None:
        pace = context.reduction.run.wait_to_send
        client = PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds, pace)
        terms = {**terms, "max_staleness": elastic.parameter_server.max_staleness}
        return AsynchronousExchange(context, client, terms, lambda: rates.step)
    anchor = SharedAnchor(context, rates.published)
    connections = _RoundConnections(elastic, anchor)
    try:
        ranks.run_on_first(connections.join, terms, ranks.gather(connections.address))
        return ElasticExchange(context, anchor, connections.client, on_leave=connections.close)
    except BaseException:
        # Only this rank can report it: otherwise the others would wait for an island that does not train.
        connections.close()
        raise


class _RoundConnections:
    """Connections of a rank whose island exchanges in rounds.

    Attributes:
        address: "host:port" at which the anchor of this rank is served.
        client: connection to the coordinator on the first rank; None on the others, and before `join`.
    """

    def __init__(self, elastic: Elastic, anchor: SharedAnchor) -> None:
        self._elastic = elastic
        self._host = own_address(elastic.rendezvous.rpartition(":")[0])
        self._server = AnchorServer(self._host, anchor.copy, elastic.timeout_seconds)
        self.address = self._server.address
        self.client: CoordinatorClient | None = None
        self._store: TCPStore | None = None
        """Store of the island, through which other islands make process groups as long as it exists."""

    def join(self, terms: Mapping[str, Any], addresses: Sequence[str]) -> None:
        """Register the island at the coordinator. On the first rank only.

        Args:
            terms: the settings that must be equal in all islands.
            addresses: the `address` of every rank.
        """
        elastic = self._elastic
        self._store = store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self.client = CoordinatorClient(
            elastic.rendezvous,
            elastic.timeout_seconds,
            elastic.give_up_seconds,
            {**terms, "timeout": elastic.timeout_seconds},
            f"{self._host}:{store.port}",
            addresses,
            f"{socket.gethostname()}:{uuid.getnode():x}:{os.getpid()}",
        )

    def close(self) -> None:
        """Leave the other islands, and stop serving the anchor. It may be called repeatedly."""
        if self.client is not None:
            self.client.leave()
            self.client = None
        self._server.close()
