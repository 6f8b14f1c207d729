"""Checkpoints of split models: resuming in the same layout, and in others by DeepSpeed's universal checkpoints."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout
from deepspeed_compress.tools import checkpoint as tools
from deepspeed_compress.training.stepper import mean_over_ranks, share_of
from tests.models.families import write_config
from tests.models.runs import Run, finish, own_part, start, stepper_of
from tests.support.forks import RankError, run_forks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SAVED = 2
"""Steps before the checkpoint. The same number of steps follows."""
ROUNDING = 5e-6
"""Tolerance of losses, as in test_layouts."""
UNIVERSAL = {"checkpoint": {"load_universal": True}}
SLICES, STAGES, BOTH = Layout(tensor=2), Layout(pipeline=2), Layout(tensor=2, pipeline=2)


def steps(engine: Any, run: Run, first: int, last: int) -> list[float]:
    stepper, share = stepper_of(engine, run), share_of(engine)
    batches = list(run.batches())[first:last]
    return [mean_over_ranks([stepper.train(own_part(batch, share))], share) for batch in batches]


def save(rank: int, run: Run, directory: str) -> list[float]:
    """Train, save a checkpoint, and return the losses after it."""
    engine = start(run)
    steps(engine, run, 0, SAVED)
    engine.save_checkpoint(directory)
    losses = steps(engine, run, SAVED, run.steps)
    finish(engine)
    return losses


def resume(rank: int, run: Run, directory: str) -> list[float]:
    """Load the checkpoint into a new engine, and return the losses after it."""
    engine = start(run)
    engine.load_checkpoint(directory)
    losses = steps(engine, run, SAVED, run.steps)
    finish(engine)
    return losses


def convert(rank: int, directory: str, tensor: int | None = None) -> None:
    tools.convert_to_universal(Path(directory), None, "universal", tensor)


def on_all_ranks(work: Any, run: Run, directory: Path) -> list[float]:
    results: list[list[float]] = run_forks(run.ranks, work, run, str(directory), timeout=400)
    assert all(losses == results[0] for losses in results)
    return results[0]


def run_of(model: Path, layout: Layout, data: int, stage: int = 1) -> Run:
    """Return a run whose global batch is the same with one replica as with two."""
    return Run(model, layout, stage, steps=2 * SAVED, accumulation=2 // data, data=data)


def continued(
    family: str,
    saved: tuple[Layout, int],
    *loaded: tuple[Layout, int, int],
    directory: Path,
    tied: bool = False,
    tensor: int | None = None,
    **changes: Any,
) -> tuple[list[float], list[list[float]]]:
    """Return the losses after the checkpoint: of the run that saved it, and of runs that load it as a universal one."""
    model = write_config(directory / "model", family, tied, **changes)
    expected = on_all_ranks(save, run_of(model, *saved), directory)
    run_forks(1, convert, str(directory), tensor)
    runs = [replace(run_of(model, *found), extra=UNIVERSAL) for found in loaded]
    return expected, [on_all_ranks(resume, run, directory) for run in runs]


def check(found: tuple[list[float], list[list[float]]]) -> None:
    expected, others = found
    for losses in others:
        assert losses == pytest.approx(expected, rel=0, abs=ROUNDING)


def test_resuming_in_the_same_layout_is_exact(tmp_path: Path) -> None:
    section = {"gradients": {"bits": 4, "block_size": 32}, "weights": {"bits": 4, "block_size": 32}}
    parallelism = {"zero_stage": 1, "tensor": 2, "pipeline": 2}
    model = write_config(tmp_path / "model", "gpt2")
    run = replace(run_of(model, BOTH, 2), extra={SECTION: {"parallelism": parallelism, **section}})
    expected = on_all_ranks(save, run, tmp_path)
    assert on_all_ranks(resume, run, tmp_path) == expected


def test_the_tensor_parallel_size_can_change(tmp_path: Path) -> None:
    """The number of replicas and the ZeRO stage change as well."""
    whole = Layout()
    check(continued("llama", (SLICES, 2), (whole, 2, 1), (SLICES, 1, 2), directory=tmp_path / "joined"))
    check(continued("phi3", (whole, 1), (SLICES, 1, 1), directory=tmp_path / "made"))


def test_the_number_of_pipeline_stages_can_change(tmp_path: Path) -> None:
    check(continued("gpt2", (STAGES, 2), (Layout(pipeline=3), 1, 1), directory=tmp_path))


@pytest.mark.parametrize(
    ("saved", "loaded", "message"),
    [
        ((STAGES, 1), (Layout(), 1, 1), "has no weight transformer.wte.weight: a pipeline numbers its layers"),
        ((Layout(), 1), (STAGES, 1, 1), "has no weight 0.tokens.weight: a pipeline numbers its layers"),
        ((Layout(), 1), (Layout(), 1, 0), r"of ZeRO 1 cannot be loaded by ZeRO 0 \(allowed: ZeRO 1 and 2\)"),
        ((Layout(), 1), (Layout(), 1, 3), r"of ZeRO 1 cannot be loaded by ZeRO 3 \(allowed: ZeRO 1 and 2\)"),
        ((SLICES, 1), (Layout(), 1, 1), "GPT-2's matrices are transposed"),
        ((Layout(), 1), (SLICES, 1, 1), "GPT-2's matrices are transposed"),
    ],
    ids=["to-none-from-stages", "to-stages-from-none", "to-zero0", "to-zero3", "gpt2-joined", "gpt2-cut"],
)
def test_an_unsupported_change_of_layout_is_refused(
    saved: tuple[Layout, int], loaded: tuple[Layout, int, int], message: str, tmp_path: Path
) -> None:
    with pytest.raises(RankError, match=f"StateError: .*{message}"):
        continued("gpt2", saved, loaded, directory=tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_a_pipeline_with_tensor_parallelism_can_change(tied: bool, tmp_path: Path) -> None:
    """DeepSpeed asks only the first stage how weights are split, so that stage must know it for all stages."""
    loaded = [(BOTH, 1, 1), (STAGES, 2, 1), (Layout(pipeline=3), 1, 1)]
    check(continued("llama", (BOTH, 2), *loaded, directory=tmp_path, tied=tied))


def test_tied_weights_are_taken_from_one_stage(tmp_path: Path) -> None:
    """ZeRO partitions the two copies differently if a stage has no other layers."""
    uneven = Layout(pipeline=2, partition=(0, 3))
    check(continued("gpt2", (uneven, 2), (STAGES, 1, 1), directory=tmp_path, tied=True))


def test_the_tensor_parallel_size_of_gpt2_can_change(tmp_path: Path) -> None:
    """Split matrices of GPT-2 are transposed, so the converter needs the size of the run that loads the checkpoint."""
    check(continued("gpt2", (SLICES, 1), (Layout(), 2, 1), directory=tmp_path / "joined", tensor=1))
    check(continued("gpt2", (Layout(), 1), (SLICES, 1, 2), directory=tmp_path / "made", tensor=2))


def test_residuals_are_kept_in_the_same_layout_only(tmp_path: Path) -> None:
    section = {"parallelism": {"zero_stage": 1}, "gradients": {"bits": 4, "block_size": 32}}
    model = write_config(tmp_path / "model", "llama")
    run = replace(run_of(model, Layout(), 2), extra={SECTION: section})
    expected = on_all_ranks(save, run, tmp_path)
    run_forks(1, convert, str(tmp_path))
    assert on_all_ranks(resume, replace(run, extra=UNIVERSAL | {SECTION: section}), tmp_path) == expected
    # Residuals of another layout are unknown. Without them, the first step is the same, and later steps are not.
    parallelism = {"parallelism": {"zero_stage": 1, "tensor": 2}}
    other = run_of(model, SLICES, 2)
    with pytest.raises(RankError, match=r'StateError: .*"on_missing_state": "reset"'):
        on_all_ranks(resume, replace(other, extra=UNIVERSAL | {SECTION: section | parallelism}), tmp_path)
    reset = {SECTION: section | parallelism | {"on_missing_state": "reset"}}
    losses = on_all_ranks(resume, replace(other, extra=UNIVERSAL | reset), tmp_path)
    assert losses[0] == pytest.approx(expected[0], rel=0, abs=ROUNDING)
    assert losses[1] == pytest.approx(expected[1], rel=1e-2)
    assert losses[1] != expected[1]


def residual_sum(engine: Any) -> float:
    """Return the sum of all residuals of all ranks."""
    stores = engine.compression.residuals.by_name.values()
    own = sum((tensor.double().sum() for store in stores for _, tensor in store.items()), torch.zeros(()).double())
    dist.all_reduce(own)
    return float(own)


def with_residuals(rank: int, run: Run, directory: str, saves: bool) -> tuple[float, list[float]]:
    """Train and save, or load. Return the sum of the residuals in the checkpoint, and the losses after it."""
    engine = start(run)
    if saves:
        steps(engine, run, 0, SAVED)
        engine.save_checkpoint(directory)
    else:
        engine.load_checkpoint(directory)
    residuals = residual_sum(engine)
    losses = steps(engine, run, SAVED, run.steps)
    finish(engine)
    return residuals, losses


def test_four_bits_continue_on_another_number_of_replicas(tmp_path: Path) -> None:
    """The residuals of two replicas are divided among four."""
    method = {"bits": 4, "block_size": 32, "error_feedback": {"dtype": "fp32"}}
    section = {SECTION: {"parallelism": {"zero_stage": 1}, "gradients": method}}
    model = write_config(tmp_path / "model", "llama")
    two, four = (
        Run(model, Layout(), 1, steps=2 * SAVED, accumulation=4 // data, data=data, extra=section) for data in (2, 4)
    )
    residuals, expected = run_forks(2, with_residuals, two, str(tmp_path), True)[0]
    run_forks(1, convert, str(tmp_path), None)
    four = replace(four, extra=UNIVERSAL | section)
    loaded, losses = run_forks(4, with_residuals, four, str(tmp_path), False)[0]
    assert loaded == pytest.approx(residuals, rel=1e-4)
    assert abs(residuals) > 1e-6
    assert losses[0] == pytest.approx(expected[0], rel=0, abs=ROUNDING)
    assert losses[1] == pytest.approx(expected[1], rel=1e-2)
