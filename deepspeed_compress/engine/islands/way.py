"""What is asked of a way to exchange between islands that come and go, and what one is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from deepspeed_compress.communication.elastic import Met
from deepspeed_compress.communication.islands import Masters
from deepspeed_compress.communication.moments import Moments
from deepspeed_compress.communication.reduction import Groups, Site
from deepspeed_compress.communication.team import Team
from deepspeed_compress.config import Elastic, Islands
from deepspeed_compress.engine.islands.rates import Rates

__all__ = ["Given", "Way"]


@dataclass(frozen=True)
class Given:
    """What a way is made of. `settings`: with `elastic`. `masters`: of this rank. `site`: of groups, what is exchanged
    in. `team`: the ranks of the island. `terms`: what all islands must have alike. `rates`: learning rates of this
    island. `moments`: of the optimizer, where they are exchanged. `diverged`: is called when the masters are those
    of the others again, after some were not finite."""

    settings: Islands
    masters: Masters
    site: Callable[[Groups], Site]
    team: Team
    terms: Mapping[str, Any]
    rates: Rates
    moments: Moments | None
    diverged: Callable[[], object]

    @property
    def elastic(self) -> Elastic:
        assert self.settings.elastic is not None, "made for elastic islands"
        return self.settings.elastic


class Way(Protocol):
    """How an island exchanges with others: `rounds.Rounds` or `asynchronous.Pushes`, made of `Given`."""

    @property
    def exchange(self) -> Any:
        """What exchanges: `number` of the island, `version` of its anchor, `stores`."""

    def start(self, samples: int) -> Mapping[str, Any]:
        """Begin with the anchor of those who are there, or with the own weights, after `samples` in all; what was said
        beside it. Collective."""

    def step_ended(self, samples: int) -> Met | None:
        """After a step, `samples` in all: what became of an exchange, if one has ended. Collective."""

    def before_saving(self) -> None:
        """Collective."""

    def before_loading(self) -> None:
        """What is saved is about to be restored; then comes `resume`."""

    def described(self) -> dict[str, Any]:
        """What `resume` must know of what is saved now."""

    def resume(self, saved: Mapping[str, Any] | None, steps: int, samples: int) -> Mapping[str, Any]:
        """A checkpoint was loaded, of so many `steps` and `samples`; `saved`: None where it has weights alone."""

    def leave(self) -> None:
        """For ever; the others do not wait."""
