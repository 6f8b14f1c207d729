"""Connections of an elastic island: to a coordinator and the other islands, or to a parameter server."""

import os
import socket
import uuid
from collections.abc import Sequence

from torch._C._distributed_c10d import TCPStore

from deepspeed_compress.collectives.reduction import Groups
from deepspeed_compress.local_sgd.anchors import AnchorServer
from deepspeed_compress.local_sgd.asynchronous_exchange import AsynchronousExchange
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.deepspeed.context import ExchangeContext
from deepspeed_compress.local_sgd.elastic_exchange import ElasticExchange
from deepspeed_compress.local_sgd.exchange import AnchorState
from deepspeed_compress.local_sgd.parameter_server.client import PushClient
from deepspeed_compress.local_sgd.round_peers import group_of_one
from deepspeed_compress.local_sgd.shared_anchor import SharedAnchor
from deepspeed_compress.local_sgd.strategy import ExchangeStrategy
from deepspeed_compress.transport.client import own_address


def connect(context: ExchangeContext) -> ExchangeStrategy:
    """Return the exchange strategy that the configuration names, with its connections. Collective in the island."""
    if context.elastic.parameter_server is not None:
        return _connect_to_parameter_server(context, context.elastic.parameter_server.max_staleness)
    return _connect_to_coordinator(context)


def _connect_to_parameter_server(context: ExchangeContext, max_staleness: int) -> AsynchronousExchange:
    elastic, rates = context.elastic, context.learning_rates
    pace = context.reduction_context(Groups(group_of_one())).run.wait_to_send
    return AsynchronousExchange(
        context.settings,
        context.master_weights,
        context.reduction_context,
        context.ranks,
        PushClient(elastic.rendezvous, elastic.timeout_seconds, elastic.give_up_seconds, pace),
        {**context.terms, "max_staleness": max_staleness},
        lambda: rates.step,
        context.on_divergence,
    )


def _connect_to_coordinator(context: ExchangeContext) -> ElasticExchange:
    segments, stores = tuple(context.master_weights.segments), context.reduction_context(Groups(group_of_one())).stores
    anchor = SharedAnchor(context.settings, segments, AnchorState(stores), context.learning_rates.published)
    connections = _RoundConnections(context, anchor)
    try:
        context.ranks.run_on_first(connections.join, context.ranks.gather(connections.address))
        return ElasticExchange(
            context.settings,
            context.master_weights,
            context.reduction_context,
            context.ranks,
            anchor,
            connections.client,
            moments=context.moments,
            on_divergence=context.on_divergence,
            on_leave=connections.close,
        )
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

    def __init__(self, context: ExchangeContext, anchor: SharedAnchor) -> None:
        self._context = context
        self._host = own_address(context.elastic.rendezvous.rpartition(":")[0])
        self._server = AnchorServer(self._host, anchor.copy, context.elastic.timeout_seconds)
        self.address = self._server.address
        self.client: CoordinatorClient | None = None
        self._store: TCPStore | None = None
        """Store of the island, through which other islands make process groups as long as it exists."""

    def join(self, addresses: Sequence[str]) -> None:
        """Register the island at the coordinator. On the first rank only.

        Args:
            addresses: the `address` of every rank.
        """
        elastic = self._context.elastic
        terms = {**self._context.terms, "timeout": elastic.timeout_seconds}
        self._store = store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        self.client = CoordinatorClient(
            elastic.rendezvous,
            elastic.timeout_seconds,
            elastic.give_up_seconds,
            terms,
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
