"""Function calls and imports of the linter, at its start and per file."""

import cProfile
import json
import time
from pathlib import Path

import pytest

from deepspeed_compress.tools.lint.files import sources
from deepspeed_compress.tools.lint.rule import Context
from deepspeed_compress.tools.lint.rules import RULES
from deepspeed_compress.tools.lint.runner import Selection, lint_document
from deepspeed_compress.tools.outputs.machine import FORMATS
from deepspeed_compress.tools.outputs.report import Report
from tests.support.processes import run_python

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
COUNT_CALLS = """
import runpy, sys
from collections import Counter
events = Counter()
sys.setprofile(lambda frame, event, argument: events.update((event,)))
try:
    runpy.run_module("deepspeed_compress.cli", run_name="__main__")
finally:
    sys.setprofile(None)
    print(events["call"] + events["c_call"], *sorted(sys.modules), file=sys.stderr)
"""
FILES = 25
HEAVY = {"torch", "deepspeed", "transformers", "pydantic", "yaml", "rich", "numpy", "hjson", "jinja2"}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps(CONFIG, indent=2))
    return path


def test_starts_quickly(config: Path) -> None:
    """Count function calls, which take 0.1 s on an idle core, because times depend on what else runs."""
    done = run_python("-c", COUNT_CALLS, "lint", config, cwd=Path(__file__).parents[3])
    assert " 1 file" in f" {done.stdout}", done.stderr
    calls, *modules = done.stderr.split()
    assert int(calls) < 400_000
    assert not HEAVY & {module.split(".")[0] for module in modules}


def lint_all(directory: Path) -> int:
    """Return the number of files that were found."""
    found = list(sources([str(directory)]))
    diagnostics = [one for source in found for one in lint_document(source.document, Context(), Selection(), RULES)]
    FORMATS["full"](Report(tuple(diagnostics), len(found)))
    return len(found)


def test_many_files(tmp_path: Path) -> None:
    """Each file costs 13,000 calls, and the limit is twice as many."""
    for number in range(FILES):
        text = json.dumps({**CONFIG, "gradient_clipping": number}, indent=2)
        (tmp_path / f"ds_config_{number}.json").write_text(text)
    profile = cProfile.Profile()
    assert profile.runcall(lint_all, tmp_path) == FILES
    assert sum(entry.callcount for entry in profile.getstats()) < 26_000 * FILES


def test_ten_megabytes_through_every_rule(tmp_path: Path) -> None:
    """Large files are truncated. The remaining part takes a tenth of the limit if nothing else runs."""
    path = tmp_path / "ds_config.json"
    inside = ", ".join(f'"key{number}": [{number}, "auto", true]' for number in range(200_000))
    path.write_text('{"zero_optimization": ' * 99 + f"{{{inside}}}" + "}" * 99)
    [source] = sources([str(path)])
    start = time.process_time()
    findings = lint_document(source.document, Context(framework="hf", world_size=8), Selection(), RULES)
    FORMATS["full"](Report(tuple(findings), 1))
    assert findings
    assert time.process_time() - start < 30
