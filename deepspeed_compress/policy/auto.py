"""Choice between compressed steps and uncompressed ones of the engine alone, by their measured times."""

import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config.models import Auto

WARM_UP = 4
"""Number of steps of each kind that are not measured: first steps allocate, compile, and learn the order of buckets."""


@dataclass(frozen=True)
class Verdict:
    """Result of the comparison.

    Attributes:
        compresses: True if later steps are compressed.
        uncompressed_ms: milliseconds of an uncompressed step.
        compressed_ms: milliseconds of a compressed step.
    """

    compresses: bool
    uncompressed_ms: float
    compressed_ms: float

    @property
    def reason(self) -> str:
        times = f"compressed steps take {self.compressed_ms:.0f} ms, uncompressed ones {self.uncompressed_ms:.0f} ms"
        if self.compresses:
            return f"{times} ({self.uncompressed_ms / self.compressed_ms:.2f} times as fast), so compression stays"
        return f"{times}, so this run continues uncompressed"


class AutoChoice:
    """Comparison at the start of a run: uncompressed steps first, then as many compressed ones.

    Times of steps differ between ranks, so all ranks take those of the slowest one.
    """

    def __init__(self, config: Auto) -> None:
        self._config = config
        self._steps = 0
        """Steps of the present kind that are over."""
        self._times: list[float] = []
        """Milliseconds of the measured steps of the present kind."""
        self._uncompressed_ms: float | None = None
        self._compresses: bool | None = None

    @property
    def length(self) -> int:
        """Return the number of steps from the start of a comparison to the first step of the faster kind."""
        return 2 * (WARM_UP + self._config.steps) + 1

    def restart(self) -> None:
        """Begin a new comparison with the next step."""
        self.load({"uncompressed_ms": None, "compresses": None})

    @property
    def measures(self) -> bool:
        """Return True until the choice is made."""
        return self._compresses is None

    @property
    def alone(self) -> bool:
        """Return True if the next step is left to the engine, uncompressed."""
        return self._uncompressed_ms is None if self._compresses is None else not self._compresses

    def see(self, step_ms: float | None) -> bool:
        """Note the time of a step, None if it is not comparable; return True if enough of this kind are measured."""
        self._steps += 1
        if step_ms is not None and self._steps > WARM_UP:
            self._times.append(step_ms)
        return len(self._times) >= self._config.steps

    @property
    def median(self) -> float:
        """Return this rank's median time in milliseconds of the measured steps of the present kind."""
        return statistics.median(self._times)

    def close(self, slowest_ms: float) -> Verdict | None:
        """End the present kind of steps, whose median on the slowest rank is given; return the choice if it is made."""
        self._steps, self._times = 0, []
        if self._uncompressed_ms is None:
            self._uncompressed_ms = slowest_ms
            return None
        self._compresses = slowest_ms <= (1 - self._config.margin) * self._uncompressed_ms
        return Verdict(self._compresses, self._uncompressed_ms, slowest_ms)

    def stop(self) -> None:
        """End the comparison without measuring further. Steps of the present kind remain."""
        self._compresses = not self.alone

    def saved(self) -> dict[str, Any]:
        """Return the state that later steps depend on, for JSON. Times of the present kind are dropped."""
        return {"uncompressed_ms": self._uncompressed_ms, "compresses": self._compresses}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from the state that `saved` returned."""
        self._steps, self._times = 0, []
        self._uncompressed_ms, self._compresses = saved["uncompressed_ms"], saved["compresses"]
