"""Time and imports of the linter, at its start and per file."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepspeed_compress.tools.lint.files import Search, sources
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import lint_document
from deepspeed_compress.tools.lint.selection import Selection
from deepspeed_compress.tools.outputs import Report, render

CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "AdamW", "params": {"lr": 3e-4, "betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-4, "warmup_num_steps": 100}},
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "overlap_comm": True,
        "contiguous_gradients": True,
        "reduce_bucket_size": 500000000,
        "stage3_prefetch_bucket_size": 50000000,
        "stage3_param_persistence_threshold": 100000,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "cpu", "pin_memory": True},
    },
    "steps_per_print": 100,
    "wall_clock_breakdown": False,
}
PROCESSOR_TIME = """
import resource, runpy, sys
try:
    runpy.run_module("deepspeed_compress.cli", run_name="__main__")
finally:
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(used.ru_utime + used.ru_stime, *sorted(sys.modules), file=sys.stderr)
"""
BARE = """
import resource
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime)
"""
HEAVY = {"torch", "deepspeed", "transformers", "pydantic", "yaml", "rich", "numpy", "hjson"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG, indent=2))
    return path


def start(config: Path) -> tuple[float, set[str]]:
    """Return the processor time of the command in a new interpreter, and the modules that it loaded."""
    command = [sys.executable, "-c", PROCESSOR_TIME, "lint", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[3])
    assert " 1 file" in f" {done.stdout}", done.stderr
    seconds, *modules = done.stderr.split()
    return float(seconds), {module.split(".")[0] for module in modules}


def bare() -> float:
    """Return the processor time of an interpreter that does nothing."""
    return float(subprocess.run([sys.executable, "-c", BARE], capture_output=True, text=True, check=True).stdout)


# Processor time depends on what else runs.
@pytest.mark.serial
def test_starts_quickly(config: Path) -> None:
    """The limit is the time of ten interpreters, since a busy core slows both down. One takes 0.03 s if idle."""
    rounds = [(bare(), *start(config)) for _ in range(5)]
    assert min(seconds for _, seconds, _ in rounds) < 10 * min(seconds for seconds, _, _ in rounds)
    assert not HEAVY & rounds[0][2]


FILES = 250


def seconds_to_lint(directory: Path) -> float:
    """Return the processor time."""
    start = time.process_time()
    found = list(sources([str(directory)], Search(), sys.stdin.buffer))
    diagnostics = [one for source in found for one in lint_document(source.document, Context(), Selection(), RULES)]
    render(Report(tuple(diagnostics), len(found)), "full")
    assert len(found) == FILES
    return time.process_time() - start


@pytest.mark.serial
def test_many_files(tmp_path: Path) -> None:
    """The limit is the time of 65 interpreters, 1.2 s on an idle core. The best of three counts on a shared core."""
    for number in range(FILES):
        text = json.dumps({**CONFIG, "gradient_clipping": number}, indent=2)
        (tmp_path / f"ds_config_{number}.json").write_text(text)
    limit = 65 * min(bare() for _ in range(3))
    assert any(seconds_to_lint(tmp_path) < limit for _ in range(3))


@pytest.mark.parametrize("depth", [1, 99])
def test_ten_megabytes_through_every_rule(tmp_path: Path, depth: int) -> None:
    """Large files are truncated. The remaining part takes a tenth of the limit if nothing else runs."""
    path = tmp_path / "ds_config.json"
    inside = ", ".join(f'"key{number}": [{number}, "auto", true]' for number in range(200_000))
    path.write_text('{"zero_optimization": ' * depth + f"{{{inside}}}" + "}" * depth)
    [source] = sources([str(path)], Search(), sys.stdin.buffer)
    start = time.process_time()
    findings = lint_document(source.document, Context(framework="hf", world_size=8), Selection(), RULES)
    render(Report(tuple(findings), 1), "full")
    assert findings
    assert time.process_time() - start < 30
