"""Interface of an exchange strategy among islands that join and leave: its inputs, and the outcome of an exchange."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from deepspeed_compress.collectives.reduction import ReductionContext
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.config import Elastic, Islands
from deepspeed_compress.local_sgd.exchange import MasterWeights
from deepspeed_compress.local_sgd.island_ranks import IslandRanks
from deepspeed_compress.local_sgd.moments import SecondMoments


@dataclass(frozen=True)
class ExchangeContext:
    """Inputs of any exchange strategy.

    Attributes:
        settings: the section's `islands`, with `elastic`.
        master_weights: fp32 master weights of this rank.
        reduction: the residual stores and counters, over a group of this rank alone.
        ranks: the ranks of this island.
        moments: second moments of the optimizer, if they are exchanged.
        on_divergence: called when the master weights equal the anchor again after some were not finite.
    """

    settings: Islands
    master_weights: MasterWeights
    reduction: ReductionContext
    ranks: IslandRanks
    moments: SecondMoments | None = None
    on_divergence: Callable[[], object] = lambda: None

    @property
    def elastic(self) -> Elastic:
        """Return the section's `islands.elastic`."""
        assert self.settings.elastic is not None, "made for elastic islands"
        return self.settings.elastic


@dataclass(frozen=True)
class ExchangeResult:
    """Outcome of one exchange between islands.

    Attributes:
        kind: "exchange", "renewed" (the island was away and now has the newest anchor), "void" or "left_out".
        seconds: time for which training was blocked.
        round: number of the round; 0 if there was none.
        islands: number of islands in the round; 0 if there was none.
        reason: explanation if the outcome is not "exchange".
        weight: weight of this island's update relative to that of a single island; only for asynchronous exchanges.
        metadata: metadata that came with the anchor of another run.
    """

    kind: str
    seconds: float
    round: int = 0
    islands: int = 0
    reason: str = ""
    weight: float = 1.0
    metadata: Mapping[str, Any] = field(default_factory=dict)


class ExchangeStrategy(Protocol):
    """Exchanges of one rank with other islands: `ElasticExchange` or `AsynchronousExchange`.

    Attributes:
        stores: the residuals and the anchor, which a checkpoint contains.
        number: unique id of this island. Ids are never reused. -1 before `start`.
    """

    stores: ResidualStores
    number: int

    @property
    def version(self) -> int:
        """Return the version of the anchor of this island; 0 if it has none."""

    def start(self, samples: int) -> Mapping[str, Any]:
        """Start with the anchor of the islands that exist, or else with this island's own weights. Collective.

        Args:
            samples: the total number of samples trained on so far.

        Returns:
            The metadata published with the anchor.
        """

    def step_ended(self, samples: int) -> ExchangeResult | None:
        """Exchange after a step if it is time, and return the result of an exchange that ended, or None. Collective.

        Args:
            samples: the total number of samples trained on so far.
        """

    def prepare_save(self) -> None:
        """Finish or set aside what is pending, before a checkpoint is saved. Collective."""

    def prepare_load(self) -> None:
        """Prepare for the loading of a checkpoint; `resume` is called afterwards."""

    def describe(self) -> dict[str, Any]:
        """Return what `resume` must know about a checkpoint that is saved now."""

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """Continue from a checkpoint that was just loaded.

        Args:
            saved: what `describe` returned when it was saved; None if only its weights are available.
            steps: the optimizer steps of the checkpoint.
            samples: the samples of the checkpoint.

        Returns:
            The metadata published with the anchor.
        """

    def leave(self) -> None:
        """Leave for good; the other islands do not wait for this one."""
