"""Placement of the ranks of a start on slots of hosts, and the numbers of ranks that can train the same batches."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.config import SECTION, parse_section
from deepspeed_compress.config.models import Parallelism
from deepspeed_compress.config.problems import TENSOR

_BATCH, _MICRO, _STEPS = "train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"


@dataclass(frozen=True)
class Host:
    """Connected host. `slots` are the numbers of its usable slots for ranks, such as GPUs."""

    name: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class Placement:
    """Hosts by node rank, each with the slots of its ranks."""

    hosts: tuple[Host, ...]

    @property
    def world(self) -> int:
        """Return the total number of ranks."""
        return sum(len(host.slots) for host in self.hosts)

    def first_rank(self, node: int) -> int:
        """Return the first rank of the host `node`."""
        return sum(len(host.slots) for host in self.hosts[:node])


def place(
    hosts: Sequence[Host], nodes: int, ranks: int, fits: Callable[[int], bool], former: Placement | None = None
) -> Placement | None:
    """Return the largest placement on at most `nodes` of `hosts`, with the same number of ranks on each.

    Hosts of the `former` placement are preferred and keep their node ranks. New hosts take the places of lost ones.

    Args:
        hosts: the connected hosts.
        nodes: largest number of hosts.
        ranks: largest number of ranks on each host.
        fits: returns True if this total number of ranks may train. `nodes` x `ranks` always may.
        former: the previous placement.

    Returns:
        The placement; None if there is none.
    """
    before = [host.name for host in former.hosts] if former is not None else []
    ordered = sorted(hosts, key=lambda host: host.name not in before)
    for count, each in _shapes(nodes, ranks):
        able = [Host(host.name, host.slots[:each]) for host in ordered if len(host.slots) >= each]
        if len(able) >= count and (count * each == nodes * ranks or fits(count * each)):
            return Placement(_in_former_order(able[:count], before))
    return None


def _shapes(nodes: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield (hosts, ranks on each), in the order of decreasing total ranks, and then of decreasing hosts."""
    shapes = [(count, each) for count in range(1, nodes + 1) for each in range(1, ranks + 1)]
    yield from sorted(shapes, key=lambda shape: (shape[0] * shape[1], shape[0]), reverse=True)


def _in_former_order(chosen: Sequence[Host], before: Sequence[str]) -> tuple[Host, ...]:
    """Order `chosen` by former node ranks. New hosts fill the gaps if the number of hosts is the same, or come last."""
    if len(before) != len(chosen):
        return tuple(sorted(chosen, key=lambda host: before.index(host.name) if host.name in before else len(before)))
    known = {host.name: host for host in chosen}
    new = iter([host for host in chosen if host.name not in before])
    return tuple(known[name] if name in known else next(new) for name in before)


def size_problem(ds_config: Mapping[str, Any] | None, ranks: int) -> str:
    """Return why `ranks` ranks cannot train the batches that `ds_config` specifies; "" if they can.

    The rules are those of DeepSpeed's `runtime/config.py`. `ds_config` is None if it is unknown.
    """
    if ds_config is None:
        return f"the program's arguments contain no DeepSpeed configuration with {_BATCH}"
    batch = ds_config.get(_BATCH)
    if not isinstance(batch, int):
        return f"/{_BATCH} is {batch!r}, so another number of ranks would train other batches; write a number"
    copies, rest = divmod(ranks, _ranks_of_a_copy(ds_config))
    if rest or not copies:
        return f"{ranks} ranks are not a multiple of tensor x pipeline = {_ranks_of_a_copy(ds_config)}"
    given = {key: ds_config[key] for key in (_MICRO, _STEPS) if isinstance(ds_config.get(key), int)}
    product = copies * math.prod(given.values())
    if batch % product == 0 and (len(given) < 2 or batch == product):
        return ""
    factors = " x ".join(f"{key} {value}" for key, value in given.items()) or "1"
    advice = f"; leave out {_STEPS}" if len(given) == 2 else ""
    return f"/{_BATCH} {batch} is not divisible by {copies} replicas x {factors}{advice}"


def _ranks_of_a_copy(ds_config: Mapping[str, Any]) -> int:
    """Return the number of ranks that hold one copy of the model's layers."""
    section = parse_section(dict(ds_config)) if SECTION in ds_config else None
    parallelism = section.parallelism if section is not None else None
    return TENSOR.effective(ds_config, parallelism or Parallelism()) * (parallelism.pipeline if parallelism else 1)
