"""Bytes that the startup line announces, compared with those that the interface of an emulated host counts."""

import json
import re
import sys
from pathlib import Path

import pytest

from deepspeed_compress.tools.bench.hosts import Cluster
from deepspeed_compress.tools.bench.links import UNLIMITED
from tests.support.hosts import needs_hosts

Lines = dict[str, tuple[str, float, float]]


AMOUNT = r"([\d,.]+) (bytes|MB)"


def live(per_host: int) -> dict[tuple[str, int], Lines]:
    """Return the lines by model and ZeRO stage, on two hosts. With two ranks on each, sharding stays within hosts."""
    program = [sys.executable, "-W", "ignore", "-m", "tests.backends.deepspeed.announced_rank", str(per_host - 1)]
    with Cluster(2, UNLIMITED, per_host) as cluster:
        run = cluster.run(program, {"PYTHONPATH": str(Path(__file__).parents[3])}, timeout=1500)
    assert run.failure is None, "".join(run.outputs)[-3000:]
    found: dict[tuple[str, int], Lines] = {}
    for model, stage, section, *rest in json.loads(run.outputs[0].strip().splitlines()[-1]):
        found.setdefault((model, stage), {})[section] = tuple(rest)
    return found


def amount(text: str, before: str, after: str = "") -> float:
    """Return the bytes that `text` names between two patterns."""
    found = re.search(before + AMOUNT + after, text)
    assert found is not None, (before, text)
    return float(found[1].replace(",", "")) * {"bytes": 1, "MB": 1e6}[found[2]]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_hosts
def test_bytes_of_fine_tuning_between_hosts() -> None:
    for (model, stage), lines in live(1).items():
        line, forward, step = lines["4 bits"]
        sent, whole = amount(line, "sends about "), amount(line, "of gradients a step, uncompressed ")
        if stage == 3:
            gathered = amount(line, "weights travel uncompressed: ", " each time")
            assert forward == pytest.approx(gathered, rel=0.01), (model, stage)
            assert lines["none"][2] - step == pytest.approx(whole - sent, rel=0.01), (model, stage)
            rounded = amount(lines["weights"][0], "about ", " of weights each time")
            assert lines["weights"][1] == pytest.approx(rounded, rel=0.01), (model, stage)
            continue
        weights = amount(line, "weights travel uncompressed: ", " a step") if stage else 0
        assert step == pytest.approx(sent + weights, rel=0.01), (model, stage)
        assert lines["none"][2] == pytest.approx(whole + weights, rel=0.01), (model, stage)
        if stage:
            rounded = amount(lines["weights"][0], "about ", " of weights a step")
            assert lines["weights"][2] == pytest.approx(sent + rounded, rel=0.01), (model, stage)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@needs_hosts
def test_bytes_of_fine_tuning_with_sharding_within_hosts() -> None:
    """Both ranks of a host send their shares of the gradients, and no weights."""
    for (model, stage), lines in live(2).items():
        line, _, step = lines["4 bits"]
        sent, whole = amount(line, "sends about "), amount(line, "of gradients a step, uncompressed ")
        assert step == pytest.approx(2 * sent, rel=0.01), (model, stage)
        assert lines["none"][2] == pytest.approx(2 * whole, rel=0.01), (model, stage)
