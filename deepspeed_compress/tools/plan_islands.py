"""``ds-compress plan islands``: what an exchange between islands takes, and how often it may be."""

import argparse
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deepspeed_compress.config import Islands, MethodConfig, parse_section, read_ds_config
from deepspeed_compress.errors import ConfigError

__all__ = ["Plan", "fitting", "plans", "run"]

CANDIDATES = (1, 2, 5, 10, 20, 30, 50, 100, 200, 500, 1000)
LOST = 0.05
"""Part of a step that exchanges may cost on average."""


@dataclass(frozen=True)
class Plan:
    """An exchange every `sync_every` steps: bytes that an island sends in a step on average, seconds of one exchange on
    the wire, and the time of a step against one without exchanges."""

    sync_every: int
    bytes_a_step: float
    exchange_seconds: float
    step_ratio: float


def plans(settings: Islands, islands: int, parameters: int, bandwidth: float, step_seconds: float) -> list[Plan]:
    """A plan for each of the usual intervals. `bandwidth`: bits a second, each way, of the link of an island.

    Raises ConfigError where the size of a message is not known before it is made.
    """
    bits = _bits(settings)
    # As in an all-reduce: what others own goes out, and the mean of what is owned to all others.
    size = 2 * (islands - 1) / islands * parameters * bits / 8
    seconds = 8 * size / bandwidth
    return [Plan(every, size / every, seconds, _ratio(settings, every, seconds, step_seconds)) for every in CANDIDATES]


def _bits(settings: Islands) -> float:
    exchange = settings.exchange
    if exchange.method == "none":
        return 32.0
    if not isinstance(exchange, MethodConfig):
        raise ConfigError(
            f'/deepspeed_compress/islands/exchange/method: "{exchange.method}" sends what depends on shapes, '
            'which is not planned (allowed: other methods); write {"method": "blockwise", "bits": 4}'
        )
    return exchange.bits_per_element()


def _ratio(settings: Islands, every: int, seconds: float, step: float) -> float:
    """What is not hidden behind `delay` steps is waited for, fragment by fragment."""
    hidden = min(settings.delay, every - 1) * step
    waited = settings.fragments * max(0.0, seconds / settings.fragments - hidden)
    # A link that is busy all the time is the bound, however much is hidden.
    return max(1.0 + waited / (every * step), seconds / (every * step))


def fitting(found: Sequence[Plan]) -> Plan | None:
    """The most frequent exchange that costs little; None where none of them does."""
    return next((plan for plan in found if plan.step_ratio <= 1 + LOST), None)


def run(options: argparse.Namespace) -> int:
    """Print the table, and the interval that fits."""
    from rich.console import Console
    from rich.table import Table

    settings = parse_section(read_ds_config(options.config)).islands
    if settings is None:
        raise ConfigError(
            f'{options.config}: /deepspeed_compress/islands is missing; write "islands": {{"by_host": true}}'
        )
    parameters = _parameters(options.model)
    found = plans(settings, options.hosts, parameters, options.bandwidth, options.step)
    title = f"{options.hosts} islands, {parameters:,} parameters, {options.bandwidth / 1e6:g} Mbit/s"
    table = Table(title=title, title_justify="left")
    for head in ("sync_every", "MB a step", "seconds an exchange", "step against none"):
        table.add_column(head, justify="right")
    for plan in found:
        mark = " <- written" if plan.sync_every == settings.sync_every else ""
        figures = (f"{plan.bytes_a_step / 1e6:.3g}", f"{plan.exchange_seconds:.3g}", f"{plan.step_ratio:.2f}{mark}")
        table.add_row(str(plan.sync_every), *figures)
    Console().print(table)
    best = fitting(found)
    print(
        f"sync_every {best.sync_every} costs {100 * (best.step_ratio - 1):.1f} % of the time"
        if best
        else "no interval costs less than 5 % of the time: send less, or write a delay"
    )
    return 0


def _parameters(model: str) -> int:
    """Of a number such as 124M, or of the model of a config.json."""
    match = re.fullmatch(r"([0-9.]+)([kmb]?)", model.strip().lower())
    if match and not Path(model).exists():
        return round(float(match[1]) * {"": 1, "k": 1e3, "m": 1e6, "b": 1e9}[match[2]])
    from deepspeed_compress.models import read_model_config
    from deepspeed_compress.models.skeleton import build_skeleton

    return int(build_skeleton(read_model_config(Path(model))).num_parameters())
