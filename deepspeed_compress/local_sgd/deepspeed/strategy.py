"""Interface of an exchange strategy between islands that join and leave, and the inputs that one is made from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_compress.collectives.reduction import Groups, Site
from deepspeed_compress.config import Elastic, Islands
from deepspeed_compress.local_sgd.deepspeed.rates import LearningRates
from deepspeed_compress.local_sgd.elastic_exchange import ExchangeResult
from deepspeed_compress.local_sgd.exchange import MasterWeights
from deepspeed_compress.local_sgd.island_ranks import IslandRanks
from deepspeed_compress.local_sgd.moments import SecondMoments

__all__ = ["Given", "Way"]


@dataclass(frozen=True)
class Given:
    """Inputs of an exchange strategy.

    Attributes:
        settings: the section's `islands`, with `elastic`.
        master_weights: the master weights of this rank.
        site: returns the site of exchanges over given groups.
        ranks: the ranks of the island.
        terms: the settings that must be equal in all islands.
        rates: the learning rates of this island.
        moments: the optimizer's second moments; None if they are not exchanged.
        diverged: called when the master weights have been replaced by those of the others because some were not finite.
    """

    settings: Islands
    master_weights: MasterWeights
    site: Callable[[Groups], Site]
    ranks: IslandRanks
    terms: Mapping[str, Any]
    rates: LearningRates
    moments: SecondMoments | None
    diverged: Callable[[], object]

    @property
    def elastic(self) -> Elastic:
        assert self.settings.elastic is not None, "made for elastic islands"
        return self.settings.elastic


class Way(Protocol):
    """Exchange strategy of an island: `rounds.Rounds` or `asynchronous.Pushes`, made from a `Given`."""

    @property
    def exchange(self) -> Any:
        """Return the exchange, which has the `number` of the island, the `version` of its anchor, and its `stores`."""

    def start(self, samples: int) -> Mapping[str, Any]:
        """Start with the anchor of the islands that exist, or else with this island's own weights. Collective.

        Args:
            samples: the total number of samples trained on so far.

        Returns:
            The information published with the anchor.
        """

    def step_ended(self, samples: int) -> ExchangeResult | None:
        """Exchange after a step if it is time, and return the result of an exchange that ended, or None. Collective.

        Args:
            samples: the total number of samples trained on so far.
        """

    def before_saving(self) -> None:
        """Finish or set aside what is pending, before a checkpoint is saved. Collective."""

    def before_loading(self) -> None:
        """Prepare for the loading of a checkpoint; `resume` is called afterwards."""

    def described(self) -> dict[str, Any]:
        """Return what `resume` must know about a checkpoint that is saved now."""

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """Continue from a checkpoint that was just loaded.

        Args:
            saved: what `described` returned when it was saved; None if only its weights are available.
            steps: the optimizer steps of the checkpoint.
            samples: the samples of the checkpoint.

        Returns:
            The information published with the anchor.
        """

    def leave(self) -> None:
        """Leave for good; the other islands do not wait for this one."""
