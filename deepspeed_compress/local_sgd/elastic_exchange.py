"""Exchanges between islands that join and leave: each round has its own participants, and is committed by all or none.

An island is a separate job. In a round, every rank communicates with the ranks of equal place in the other islands
(`round_peers`). An exchange changes only residual stores, which can be rolled back. Once all have voted and the
coordinator has committed the round, every island moves its anchor. An island that was away fetches the anchor from an
island that has it (`shared_anchor`).
"""

import os
import re
import socket
import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from deepspeed_compress.config import Elastic
from deepspeed_compress.errors import IslandError
from deepspeed_compress.local_sgd.anchors import AnchorServer, SharedAnchor
from deepspeed_compress.local_sgd.coordinator.client import CoordinatorClient
from deepspeed_compress.local_sgd.coordinator.messages import AnchorSources, Round
from deepspeed_compress.local_sgd.exchange import LocalSGDExchange, Peers, PendingExchange, Share
from deepspeed_compress.local_sgd.round_peers import MakeGroups, RoundPeers, make_groups
from deepspeed_compress.local_sgd.strategy import ExchangeContext, ExchangeResult, LeaderDecision, SyncInterval
from deepspeed_compress.transport.client import own_address

MAX_VOID_ROUNDS = 5
"""Number of consecutive void rounds that indicates a network problem rather than failed islands."""


class ElasticExchange:
    """The exchanges of one rank with a changing set of islands.

    Args:
        context: the settings, the ranks, and the state of this rank.
        connections: the connections of this rank, and its anchor, which other islands can fetch.
        groups: creates the groups of a round.
    """

    def __init__(
        self, context: ExchangeContext, connections: "RoundConnections", groups: MakeGroups = make_groups
    ) -> None:
        self.settings, self.elastic, alone = context.settings, context.elastic, context.reduction
        self.stores, self._clock = alone.stores, alone.run.clock
        self.number = -1
        self._connections, self.shared_anchor = connections, connections.anchor
        self._weights, self._ranks, self._moments = context.master_weights, context.ranks, context.moments
        self._on_divergence = context.on_divergence
        self._segments = tuple(self._weights.segments)
        self._exchange = LocalSGDExchange(alone.stores, alone.run.meter)
        # Create all residual stores before a state is loaded.
        Peers(self.settings, self._segments, alone)
        self.peers = RoundPeers(context, groups)
        self._decision = LeaderDecision(self._ranks)
        self._interval = SyncInterval(self.settings.sync_steps, self.settings.sync_seconds)
        self._samples = 0
        """Samples at the last exchange."""
        self._void_rounds: list[float] = []
        """Times of the last consecutive void rounds, in seconds."""

    @property
    def version(self) -> int:
        """Return the version of the anchor that this island has; 0 if it has none."""
        return self.shared_anchor.version

    def start(self, samples: int = 0) -> Mapping[str, Any]:
        """Fetch the anchor from another island, or propose this island's weights if there is none. Collective.

        Args:
            samples: the total number of samples trained on so far.

        Returns:
            The metadata published with the anchor.
        """
        self._samples = samples
        self._read_identity()
        return self._adopt_anchor(self._find_sources(), use_own_weights=True)

    def step_ended(self, samples: int) -> ExchangeResult | None:
        """Exchange after a step if it is time, and return the result of an exchange that ended, or None. Collective."""
        is_due, is_first = self._interval.count_step(), self._ranks.place == 0
        # An exchange is due by the clock, or other islands wait for this one.
        asked = is_first and (self._interval.has_elapsed() or self._coordinator.is_awaited)
        if not self._decision.follow(asked, is_due):
            return None
        result = self.exchange(samples - self._samples)
        if result.kind in ("exchange", "renewed"):
            self._samples = samples
        return result

    def prepare_save(self) -> None:
        """Do nothing: no exchange is pending after a step."""

    def prepare_load(self) -> None:
        """Stop serving copies until `resume`, because the anchor is about to be replaced."""
        self.shared_anchor.withdraw()

    def describe(self) -> dict[str, Any]:
        """Return what `resume` must know about a checkpoint that is saved now."""
        run = None if self._connections.client is None else self._connections.client.run
        since = {"samples": self._samples, "interval": self._interval.describe()}
        return {"version": self.version, "number": self.number, "run": run, **since}

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """Continue from a checkpoint that was just loaded, and return the metadata published with the anchor.

        All islands start with the newest saved anchor, unless other islands have continued meanwhile. If all of them
        start again, their numbers are in the order of the saved ones.

        Args:
            saved: what `describe` returned when it was saved; None if only its weights are available.
            steps: the optimizer steps of the checkpoint.
            samples: the samples of the checkpoint.
        """
        self._decision.take()
        agreed = saved if saved is not None and saved["version"] else None
        if agreed is not None:
            claimed = agreed["run"], agreed["number"], agreed["version"]
        else:
            # These weights were never agreed upon, so the island that has trained longest provides the first anchor.
            claimed = uuid.uuid4().hex, -1, max(1, steps)
        sources = self._ranks.run_on_first(lambda: self._coordinator.claim(*claimed))
        # If all islands start again, the coordinator has given them new numbers.
        self._read_identity()
        metadata = self._adopt_anchor(sources, use_own_weights=agreed is None)
        # Steps and samples since the last exchange have not been reported yet.
        since = agreed if agreed is not None and self.version == agreed["version"] else {}
        self._samples = since.get("samples", samples)
        self._interval.resume(since.get("interval"))
        return metadata

    def leave(self) -> None:
        """Leave for good; the other islands do not wait for this one."""
        self._connections.close()

    def exchange(self, samples: int) -> ExchangeResult:
        """Exchange this island's update, made from `samples` samples since the last exchange. Collective in the island.

        Raises:
            IslandError: the coordinator is unreachable for `give_up`, or no exchange succeeds for as long.
        """
        begun = time.monotonic()
        sent = self._weights.read(self._segments)
        is_healthy = self._ranks.all_true(bool(torch.isfinite(sent).all()))
        answer = self._ranks.run_on_first(lambda: self._coordinator.arrive(samples if is_healthy else 0))
        self._interval.restart()
        if isinstance(answer, Round):
            result = self._take_part(answer, sent, is_healthy, begun)
        elif answer is not None:
            result = self._start_again(answer, begun)
        else:
            result = ExchangeResult("left_out", time.monotonic() - begun, reason="too late for a round")
        if not is_healthy and result.kind in ("exchange", "renewed"):
            self._on_divergence()
        return result

    def _take_part(self, round_: Round, sent: Tensor, is_healthy: bool, begun: float) -> ExchangeResult:
        """Exchange in `round_`, and apply the result if all islands have received it."""
        round_begun, problem, kind = time.monotonic(), "", "void"
        received: tuple[PendingExchange, Tensor] | None = None
        try:
            pending = self._send(round_, sent, is_healthy)
            received = pending, self._exchange.receive(pending)
        except (RuntimeError, OSError) as error:
            # This includes errors of this rank: a round is committed only if all ranks completed it. The text is that
            # of gloo without its source location and advice.
            text = re.sub(r"^\[[^\]]*\] ", "", str(error).partition("\n")[0]).partition(". ")[0]
            problem = text or type(error).__name__
        ok = self._ranks.all_true(received is not None)
        committed = self._ranks.run_on_first(self._vote, round_.id, ok, problem)
        for store in self.stores.by_name.values():
            store.commit() if committed else store.rollback()
        if committed:
            assert received is not None, "a committed round was completed by all ranks"
            kind = self._apply(round_, *received)
        self.peers.round_ended(committed, time.monotonic() - round_begun)
        return ExchangeResult(kind, time.monotonic() - begun, round_.id, len(round_.partners), problem)

    def _send(self, round_: Round, sent: Tensor, is_healthy: bool) -> PendingExchange:
        """Send the update of this island, weighted by its samples, to the other islands of `round_`."""
        share = Share(is_healthy, round_.weight(self.number), torch.tensor(float(len(round_.partners))))
        self._clock.begin(round_.id)
        peers = self.peers.connect(round_, self._ranks.place, self.number)
        moments = None
        if self._moments is not None:
            moments = self._moments.start(peers.start_sum, share.weight if is_healthy else 0.0)
        pending = self._exchange.send(peers, peers.fragments[0], self._segments, round_.id, sent, share)
        pending.moments = moments
        return pending

    def _apply(self, round_: Round, pending: PendingExchange, update: Tensor) -> str:
        """Move the anchor by the mean `update` of a committed round, and return the kind of the result."""
        if pending.moments is not None:
            pending.moments.apply()
        if self.version != round_.base:
            self._adopt_anchor(self._find_sources(), use_own_weights=False)
            return "renewed"
        with self.shared_anchor.replacing(round_.id):
            anchor = self._exchange.apply(pending, update, self.settings.outer)
        self._continue_from(anchor)
        return "exchange"

    def _continue_from(self, anchor: Tensor) -> None:
        self._report_ready()
        self._weights.write(self._segments, anchor)
        self._weights.publish()

    def _start_again(self, sources: AnchorSources, begun: float) -> ExchangeResult:
        """Adopt the anchor of the others, to which the anchor of this island does not belong."""
        metadata = self._adopt_anchor(sources, use_own_weights=False)
        if not self.version:
            reason = "the other islands have loaded checkpoints, and wait"
            return ExchangeResult("left_out", time.monotonic() - begun, reason=reason)
        reason = "its anchor belongs to another beginning of the run"
        return ExchangeResult("renewed", time.monotonic() - begun, reason=reason, metadata=metadata)

    def _adopt_anchor(self, sources: AnchorSources, use_own_weights: bool) -> Mapping[str, Any]:
        """Take the anchor of `sources`, or a newer one, and return its metadata. Collective in the island.

        If there are no sources, keep the anchor of this island; with `use_own_weights`, its weights become the anchor.
        """
        deadline = time.monotonic() + self.elastic.give_up_seconds
        while sources.sources:
            fetched = self.shared_anchor.fetch(sources, self._ranks.place, self.number)
            # A source may have moved on between the requests of two ranks.
            if self._ranks.all_equal(0 if fetched is None else fetched[0]) and fetched is not None:
                version, metadata, tensors = fetched
                with self.shared_anchor.replacing(version):
                    anchor = self.shared_anchor.write(tensors, self._weights.device)
                self._continue_from(anchor)
                # The source trains on during the requests, so ranks may have received metadata of different steps.
                return self._ranks.run_on_first(dict, metadata)
            sources = self._ranks.run_on_first(self._find_sources_again, sources, deadline)
        with self.shared_anchor.replacing(sources.version):
            if use_own_weights:
                for store in self.stores.by_name.values():
                    store.clear()
                self._exchange.anchor.write(self._segments, self._weights.read(self._segments))
        self._report_ready()
        return {}

    def _find_sources(self) -> AnchorSources:
        """Return the islands that hold the newest anchor. Collective in the island."""
        return self._ranks.run_on_first(lambda: self._coordinator.sources())

    def _read_identity(self) -> None:
        """Learn the number of this island, and the run that it belongs to. Collective in the island."""
        self.number, self.shared_anchor.run = self._ranks.run_on_first(
            lambda: (self._coordinator.number, self._coordinator.run or "")
        )

    # Requests to the coordinator, on the first rank only.

    @property
    def _coordinator(self) -> CoordinatorClient:
        assert self._connections.client is not None, "only the first rank communicates with the coordinator"
        return self._connections.client

    def _find_sources_again(self, sources: AnchorSources, deadline: float) -> AnchorSources:
        """Return the islands that hold the newest anchor, unless none of `sources` has provided it until `deadline`."""
        if time.monotonic() > deadline:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: none of {len(sources.sources)} islands provided the "
                f"anchor within {self.elastic.give_up} ({self.shared_anchor.failure}); islands must reach each other, "
                "not only the coordinator: open the ports between them"
            )
        return self._coordinator.sources()

    def _report_ready(self) -> None:
        if self._ranks.place == 0:
            self._coordinator.ready(self.version)

    def _vote(self, id_: int, ok: bool, problem: str) -> bool:
        """Vote on round `id_`, and return True if it is committed.

        Raises:
            IslandError: no exchange has succeeded for `give_up`.
        """
        committed = self._coordinator.vote(id_, ok)
        self._void_rounds = [] if committed else [*self._void_rounds, time.monotonic()]
        count = len(self._void_rounds)
        if count > MAX_VOID_ROUNDS and self._void_rounds[-1] - self._void_rounds[0] > self.elastic.give_up_seconds:
            raise IslandError(
                f"/deepspeed_compress/islands/elastic/give_up: {count} exchanges in a row failed within "
                f"{self.elastic.give_up} ({problem or 'other islands failed'}); islands must reach each other, not "
                "only the coordinator: open the ports between them, or set GLOO_SOCKET_IFNAME; if exchanges time out "
                "on a slow link, write a longer give_up, or fewer bits"
            )
        return committed


class RoundConnections:
    """Connections of a rank whose island exchanges in rounds.

    Attributes:
        anchor: the anchor of this rank.
        address: "host:port" at which the anchor is served.
        client: connection to the coordinator on the first rank; None on the others, and before `join`.
    """

    def __init__(self, elastic: Elastic, anchor: SharedAnchor) -> None:
        self._elastic, self.anchor = elastic, anchor
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
        elastic, terms = self._elastic, {**terms, "timeout": self._elastic.timeout_seconds}
        self._store = store = TCPStore(self._host, 0, is_master=True, wait_for_workers=False)
        own, process = f"{self._host}:{store.port}", f"{socket.gethostname()}:{uuid.getnode():x}:{os.getpid()}"
        self.client = CoordinatorClient(elastic.rendezvous, elastic.give_up_seconds, terms, own, addresses, process)

    def close(self) -> None:
        """Leave the other islands, and stop serving the anchor. It may be called repeatedly."""
        if self.client is not None:
            self.client.leave()
            self.client = None
        self._server.close()
