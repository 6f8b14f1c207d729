"""Inputs of an exchange strategy among islands that join and leave."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.collectives.reduction import Groups, ReductionContext
from deepspeed_compress.config import Elastic, Islands
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates
from deepspeed_compress.local_sgd.exchange import MasterWeights
from deepspeed_compress.local_sgd.island_ranks import IslandRanks
from deepspeed_compress.local_sgd.moments import SecondMoments


@dataclass(frozen=True)
class ExchangeContext:
    """Inputs of an exchange strategy.

    Attributes:
        settings: the section's `islands`, with `elastic`.
        master_weights: the master weights of this rank.
        reduction_context: returns what reductions over given groups need.
        ranks: the ranks of the island.
        terms: the settings that must be equal in all islands.
        learning_rates: the learning rates of this island.
        moments: the optimizer's second moments; None if they are not exchanged.
        on_divergence: called when the master weights were replaced by the anchor because some were not finite.
    """

    settings: Islands
    master_weights: MasterWeights
    reduction_context: Callable[[Groups], ReductionContext]
    ranks: IslandRanks
    terms: Mapping[str, Any]
    learning_rates: LearningRates
    moments: SecondMoments | None
    on_divergence: Callable[[], object]

    @property
    def elastic(self) -> Elastic:
        """Return the section's `islands.elastic`."""
        assert self.settings.elastic is not None, "made for elastic islands"
        return self.settings.elastic
