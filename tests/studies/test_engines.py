"""One model in every engine: uncompressed losses differ by rounding, and those with 4 bits by little."""

import argparse
from pathlib import Path
from typing import Any

import pytest

from deepspeed_compress.tools.bench import gauges
from launch.studies import engines
from launch.studies.loss_curve import train
from tests.studies.toy import ToyFiles
from tests.support.forks import run_forks

pytestmark = pytest.mark.sampled(2)

STEPS = 6


def options_of(directory: Path, model: Path) -> argparse.Namespace:
    arguments = ["--data", "none", "--output-dir", str(directory), "--model", str(model)]
    return engines.parse_options([*arguments, "--steps", str(STEPS), "--seq-len", "16"])


def trained(rank: int, directory: Path, files: ToyFiles, kinds: list[str]) -> dict[str, Any]:
    gauges.join()
    options = options_of(directory, files.model)
    curves = {kind: train(engines.job_of(options, kind, files.key), files.cache, prints=False) for kind in kinds}
    return {kind: (curve.train, curve.held_out[-1][1], curve.gradient_bytes) for kind, curve in curves.items()}


@pytest.mark.parametrize("compressed", [False, True], ids=["uncompressed", "four_bits"])
def test_engines_agree(tmp_path: Path, compressed: bool) -> None:
    kinds = [pair[compressed] for pair in engines.ENGINES.values()]
    found, _ = run_forks(2, trained, tmp_path, ToyFiles(tmp_path), kinds)
    losses, held_out, _ = found["ddp-int4" if compressed else "ddp"]
    for theirs, their_held_out, counted in found.values():
        assert theirs == pytest.approx(losses, rel=5e-3 if compressed else 2e-6)
        assert their_held_out == pytest.approx(held_out, rel=5e-3 if compressed else 2e-6)
        assert (counted is not None) == compressed
        assert counted is None or counted[1] > 7 * counted[0]
