"""Output of a run: metrics.jsonl line by line, and the figures of summary.json."""

import json
import statistics
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import CompressWarning, ConfigError
from deepspeed_compress.safe_files import write_text
from deepspeed_compress.tools.run_directory import METRICS, Line, read_metrics, read_statistics


def check_new(output_dir: Path) -> None:
    """Check that `output_dir` holds no run yet, so that none is overwritten by accident.

    Raises:
        ConfigError: if it holds a run.
    """
    if (output_dir / METRICS).is_file():
        raise ConfigError(f"--output-dir {output_dir}: already holds a run; pass --resume, or choose another directory")


class Metrics:
    """Writer of metrics.jsonl on the first rank. On other ranks, it does nothing.

    A line that cannot be written is dropped, because an error on one rank would leave the others waiting. The first
    dropped line issues a CompressWarning.
    """

    def __init__(self, output_dir: Path, visible: bool) -> None:
        self.file, self.visible = output_dir / METRICS, visible
        self._warned = False

    def begin(self, step: int) -> None:
        """Keep only the lines up to `step`, from which the run starts or resumes."""
        if not self.visible:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_metrics(self.file.parent) if line["step"] <= step]
        write_text(self.file, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, **values: float | None) -> None:
        """Append one line."""
        try:
            if self.visible:
                with self.file.open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(values) + "\n")
        except OSError as error:
            if not self._warned:
                text = f"{self.file} cannot be written ({error.strerror}), so log lines are lost"
                warnings.warn(text, CompressWarning, stacklevel=2)
            self._warned = True


def final_figures(output_dir: Path, monitor_dir: Path, batch_tokens: int, run: str | None = None) -> dict[str, Any]:
    """Return the figures of summary.json that are computed from the logs.

    Step times are medians, because the first steps of a run are slower. The compression figures are means over the
    monitored steps of `run`, or of the last run if it is None, and are left out if there is no compression.jsonl.
    """
    lines = read_metrics(output_dir)
    last_eval: Line = next((line for line in reversed(lines) if "eval_loss" in line), {})
    times = [line["step_time_s"] for line in lines if line.get("step_time_s") is not None]
    median = statistics.median(times) if times else None
    return {
        "eval_loss": last_eval.get("eval_loss"),
        "median_step_s": median,
        "tokens_per_s": batch_tokens / median if median else None,
        **compression_figures(read_statistics(monitor_dir, run)),
    }


def compression_figures(lines: Sequence[Line]) -> dict[str, float]:
    """Return the mean bytes that one rank sends per step, for every kind of traffic that all `lines` have.

    `lines` are those of compression.jsonl.
    """
    kinds = [name for name in (lines[0] if lines else {}) if name.startswith("bytes_")]
    kinds = [name for name in kinds if all(line.get(name) is not None for line in lines)]
    return {f"{name}_per_step": statistics.fmean(line[name] for line in lines) for name in kinds}
