"""Islands that exchange in rounds: registration at the coordinator, and the exchanges that follow."""

import os
import socket
import uuid
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch._C._distributed_c10d import TCPStore

from deepspeed_compress.config import Elastic
from deepspeed_compress.local_sgd.anchors import AnchorServer
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.deepspeed.strategy import Given
from deepspeed_compress.local_sgd.elastic_exchange import ElasticExchange, ExchangeResult
from deepspeed_compress.local_sgd.island_ranks import LeaderDecision

__all__ = ["Rounds"]


class Rounds:
    """Exchange in rounds; see `way.Way`."""

    def __init__(self, given: Given) -> None:
        ranks, elastic = given.ranks, given.elastic
        self._ranks, self._decision = ranks, LeaderDecision(ranks)
        self.client: CoordinatorClient | None = None
        self._samples = 0
        host = _own_host(elastic)
        self._server: AnchorServer | None = AnchorServer(host, self._copy, elastic.timeout_seconds)
        try:
            self.exchange = self._meet(given, elastic, host, self._server.address)
        except BaseException:
            # Only this rank can say so: otherwise the others would wait for an island that does not train.
            self.leave()
            raise

    def _meet(self, given: Given, elastic: Elastic, host: str, address: str) -> ElasticExchange:
        ranks, terms = given.ranks, {**given.terms, "timeout": elastic.timeout_seconds}
        ranks.run_on_first(partial(self._join, elastic, host, ranks.gather(address), terms))
        return ElasticExchange(
            given.settings,
            given.master_weights,
            given.site,
            ranks,
            self.client,
            about=given.rates.told,
            moments=given.moments,
            diverged=given.diverged,
        )

    def start(self, samples: int) -> Mapping[str, Any]:
        self._samples = samples
        return self.exchange.start()

    def step_ended(self, samples: int) -> ExchangeResult | None:
        if not self._decision.follow(self._ranks.place == 0 and self.exchange.due()):
            return None
        result = self.exchange.exchange(samples - self._samples)
        if result.kind in ("exchange", "renewed"):
            self._samples = samples
        return result

    def before_saving(self) -> None:
        """Do nothing: no exchange is pending after a step."""

    def before_loading(self) -> None:
        self.exchange.withdraw()

    def described(self) -> dict[str, Any]:
        run = None if self.client is None else self.client.run
        about = {"version": self.exchange.version, "number": self.exchange.number, "run": run}
        return {**about, "samples": self._samples}

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        self._samples = samples
        if saved is not None:
            about = self.exchange.resume(saved["run"], saved["number"], saved["version"], use_own_weights=False)
            if self.exchange.version == saved["version"]:
                # Its samples since its last exchange are still to be counted.
                self._samples = saved.get("samples", samples)
            return about
        # These weights were never agreed upon, so the island that has trained longest provides the first anchor.
        name = self._ranks.run_on_first(lambda: uuid.uuid4().hex)
        return self.exchange.resume(name, -1, max(1, steps), use_own_weights=True)

    def leave(self) -> None:
        if self.client is not None:
            self.client.leave()
            self.client = None
        if self._server is not None:
            self._server.close()
            self._server = None

    def _join(self, elastic: Elastic, host: str, addresses: list[str], terms: Mapping[str, Any]) -> None:
        self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
        timeout, give_up = elastic.timeout_seconds, elastic.give_up_seconds
        process = f"{socket.gethostname()}:{uuid.getnode():x}:{os.getpid()}"
        store = f"{host}:{self._store.port}"
        self.client = CoordinatorClient(elastic.rendezvous, timeout, give_up, terms, store, addresses, process)

    def _copy(self, version: int) -> Any:
        """Return a copy of the anchor `version`; None if another island asks before this one is ready."""
        exchange = vars(self).get("exchange")
        return None if exchange is None else exchange.copy(version)


def _own_host(elastic: Elastic) -> str:
    """Return the address of this machine on its route to the coordinator, at which the other islands can reach it."""
    host, _, port = elastic.rendezvous.rpartition(":")
    family, _, _, _, address = socket.getaddrinfo(host, int(port), type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        # Connecting a UDP socket sends nothing.
        probe.connect(address)
        return str(probe.getsockname()[0])
