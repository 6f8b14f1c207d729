"""Settings of islands: groups of ranks that train independently and exchange weights from time to time."""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, model_validator

from deepspeed_compress.config.methods import BlockwiseConfig, Model
from deepspeed_compress.config.numbers import Duration, seconds
from deepspeed_compress.config.overrides import Pattern
from deepspeed_compress.config.places import BlockwiseGradients, ErrorFeedbackConfig, GradientsConfig, TopKGradients

_MOST = 65535
_HOST = r"[A-Za-z0-9_](?:[A-Za-z0-9_.-]{0,252})"


def check_address(text: str) -> str:
    """Return `text` if it is "host:port" with a name or an IPv4 address, and a port from 1 to 65535.

    Raises:
        ValueError: if it is not, with what to write instead.
    """
    found = re.fullmatch(rf"{_HOST}:(\d{{1,5}})", text, re.ASCII)
    if found is None or not 1 <= int(found[1]) <= _MOST:
        raise ValueError(
            f'"{text}" is not an address (allowed: host:port, with a name or an IPv4 address, and a port from 1 to '
            f'{_MOST}); write "head.example.org:29400"'
        )
    return text


Address = Annotated[
    str,
    AfterValidator(check_address),
    Field(examples=["head.example.org:29400"], json_schema_extra={"pattern": rf"^{_HOST}:[0-9]{{1,5}}$"}),
]


class Outer(Model):
    """Outer optimizer, which applies the mean of the islands' weight changes since the last exchange."""

    optimizer: Literal["average", "nesterov"] = "average"
    """`average` adds `lr` times the mean change to the weights; `nesterov` applies Nesterov momentum to it."""
    lr: float = Field(default=1.0, gt=0)
    """Outer learning rate. 1.0 with `average` gives the mean of the islands' weights."""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """Momentum of `nesterov`."""


class SecondMoments(Model):
    """Exchange of Adam's second moments, which are scaled to the same mean in each block at every exchange."""

    block_size: int = Field(default=128, ge=1)
    """Number of elements whose second moments are scaled together. Each block sends 4 bytes."""


class Asynchronous(Model):
    """Asynchronous islands, which push and pull when ready (`ds-compress islands serve --parameter-server`)."""

    max_staleness: int = Field(default=64, ge=1)
    """Largest number of pushes by other islands since an island pulled the anchor. A later push is discarded."""


class Elastic(Model):
    """Islands that join and leave: each is a separate job, and they find each other through a coordinator."""

    rendezvous: Address
    """Address "host:port" of the coordinator, which `ds-compress islands serve` starts."""
    timeout: Duration = "5 s"
    """Time that islands wait for one that does not answer, or that has not finished its step. It must be longer than a
    step, and should be longer than an exchange on your link."""
    minimum: int = Field(default=1, ge=1, le=65536)
    """Number of islands needed to start training and for each exchange."""
    give_up: Duration = "5 min"
    """Time that an island waits for the coordinator, or for `minimum` islands, before it ends with an error; at least
    `timeout`."""
    parameter_server: Asynchronous | None = None
    """Asynchronous exchange: each island pushes to and pulls from a parameter server when it is ready, without
    `minimum`; null exchanges in rounds."""

    @property
    def timeout_seconds(self) -> float:
        return seconds(self.timeout)

    @property
    def give_up_seconds(self) -> float:
        return seconds(self.give_up)


_INT4 = BlockwiseGradients(bits=4)
_SPARSE = TopKGradients(
    method="topk",
    density=0.03,
    block_size=4096,
    values=BlockwiseConfig(bits=2),
    error_feedback=ErrorFeedbackConfig(decay=0.95),
)
_HALF_MOMENTUM = Outer(optimizer="nesterov", lr=0.7, momentum=0.5)
PRESETS: Mapping[str, Mapping[str, Any]] = {
    "local_sgd": {"sync_every": 10, "exchange": _INT4},
    "diloco": {"sync_every": 30, "exchange": _INT4, "outer": Outer(optimizer="nesterov", lr=0.7)},
    "sparseloco": {"sync_every": 30, "exchange": _SPARSE},
    "adam": {
        "sync_every": 30,
        "exchange": _INT4,
        "outer": _HALF_MOMENTUM,
        "second_moments": SecondMoments(block_size=1),
    },
    "muon": {"sync_every": 30, "exchange": _INT4, "outer": _HALF_MOMENTUM},
}
"""Values that each preset sets unless the file does.

Local SGD with averaging: Stich, arXiv:1805.09767. DiLoCo: Douillard et al., arXiv:2311.08105, section 2. SparseLoCo:
Sarfi et al., arXiv:2508.15706, section 3. `adam` and `muon` lost least in docs/results.md with these inner optimizers.
"""


class Islands(Model):
    """Groups of ranks that train independently and exchange their weight changes every `sync_every` steps."""

    preset: Literal["local_sgd", "diloco", "sparseloco", "adam", "muon"] | None = None
    """Named set of values for the keys that are not written: a published algorithm, or the best measured settings for
    Adam or Muon inside; null uses the defaults."""
    size: int | None = Field(default=None, ge=1)
    """Number of consecutive data-parallel ranks of the job in an island; null with `by_host` or `elastic`."""
    by_host: bool = False
    """Make the ranks of each host an island, instead of `size`."""
    sync_every: Annotated[int, Field(ge=1)] | Duration = 30
    """Interval between exchanges in optimizer steps; with `elastic` also a time such as "30 s"."""
    exchange: GradientsConfig = BlockwiseGradients(bits=4)
    """Compression of the weight changes, with the keys of `gradients`, but without `powersgd` and `hierarchy`."""
    outer: Outer = Outer()
    """Outer optimizer, which applies the mean weight change of all islands."""
    second_moments: SecondMoments | None = None
    """Exchange the second moments of Adam, too; null leaves them to each island."""
    # strict=False: JSON has lists, not tuples.
    own: Annotated[tuple[Pattern, ...], Field(strict=False)] = ()
    """Patterns of parameters that each island keeps for itself, such as the heads of agents that share a trunk."""
    fragments: int = Field(default=1, ge=1)
    """Number of parts of the model that are exchanged in turn within `sync_every` steps, which evens out the traffic;
    at most `sync_every`."""
    delay: int = Field(default=0, ge=0)
    """Optimizer steps that training continues while an exchange is in flight, fewer than `sync_every`; 0 waits for
    it."""
    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps at the start after each of which all islands average their weights uncompressed."""

    elastic: Elastic | None = None
    """Islands that are separate jobs, and may join and leave; null if they are the ranks of one job."""

    @property
    def sync_steps(self) -> int | None:
        """Return `sync_every` as a number of steps; None if it is a time."""
        return self.sync_every if isinstance(self.sync_every, int) else None

    @property
    def sync_seconds(self) -> float | None:
        return None if isinstance(self.sync_every, int) else seconds(self.sync_every)

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, given: Any) -> Any:
        name = given.get("preset") if isinstance(given, dict) else None
        preset = PRESETS.get(name, {}) if isinstance(name, str) else {}
        return {**preset, **{key: _within(preset.get(key), value) for key, value in given.items()}} if preset else given


def _within(preset: Any, given: Any) -> Any:
    """Return `given` completed by the preset's object, unless it is of another method or optimizer."""
    if not (isinstance(preset, BaseModel) and isinstance(given, dict)):
        return given
    written = preset.model_dump(exclude_unset=True)
    same = all(given.get(kind, written.get(kind)) == written.get(kind) for kind in ("method", "optimizer"))
    return {**written, **given} if same else given


def island_directory(number: int) -> str:
    """Return the directory for files of island `number`, relative to the directory of the job.

    Empty for island 0, whose files are in the job's directory.
    """
    return f"island_{number:04d}" if number else ""
