"""What a run leaves behind: metrics.jsonl, line by line, and summary.json at the end."""

import json
import os
import statistics
from pathlib import Path
from typing import Any

from deepspeed_compress.errors import ConfigError, DataError

METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
COMPRESSION = "compression.jsonl"


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a .jsonl file, none when it is missing; a last line cut short by a crash is left out."""
    lines = file.read_text(encoding="utf-8").splitlines() if file.is_file() else []
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(json.loads(line))
        except ValueError:
            if number < len(lines):
                raise DataError(f"{file}:{number}: not JSON: {line[:60]!r}") from None
    return parsed


def read_summary(directory: Path) -> dict[str, Any]:
    """summary.json of a run. Raises DataError when the run is not finished, or `directory` is none."""
    try:
        summary: dict[str, Any] = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    except OSError:
        raise DataError(f"{directory}: holds no {SUMMARY}; give the --output-dir of a finished run") from None
    except ValueError as error:
        raise DataError(f"{directory / SUMMARY}: not JSON ({error}); train the run again") from None
    return summary


def write_json(file: Path, value: object) -> None:
    """Write `file` whole or not at all."""
    scratch = file.with_name(f".{file.name}.new")
    scratch.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    os.replace(scratch, file)


def check_new(output_dir: Path) -> None:
    """Raises ConfigError when `output_dir` holds a run already: a run is not overwritten by accident."""
    if (output_dir / METRICS).is_file():
        raise ConfigError(f"--output-dir {output_dir}: holds a run already; write --resume to go on, or choose another")


class Metrics:
    """Appends to metrics.jsonl on the first rank; does nothing on others."""

    def __init__(self, output_dir: Path, visible: bool) -> None:
        self.file, self.visible = output_dir / METRICS, visible

    def begin(self, step: int) -> None:
        """Keep the lines up to `step`, where the run starts or resumes; later ones will come again."""
        if not self.visible:
            return
        self.file.parent.mkdir(parents=True, exist_ok=True)
        kept = [line for line in read_lines(self.file) if line["step"] <= step]
        scratch = self.file.with_name(f".{self.file.name}.new")
        scratch.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        os.replace(scratch, self.file)

    def add(self, **values: float | None) -> None:
        """One line."""
        if self.visible:
            with self.file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(values) + "\n")


def final_figures(output_dir: Path, monitor_dir: Path, batch_tokens: int) -> dict[str, Any]:
    """The figures of summary.json which follow from what was logged.

    Step times are medians: the first steps of a run are slower. The compression figures are means over the
    monitored steps, and left out when there is no compression.jsonl.
    """
    lines = read_lines(output_dir / METRICS)
    last_eval: dict[str, Any] = next((line for line in reversed(lines) if "eval_loss" in line), {})
    times = [line["step_time_s"] for line in lines if "step_time_s" in line]
    median = statistics.median(times) if times else None
    return {
        "eval_loss": last_eval.get("eval_loss"),
        "median_step_s": median,
        "tokens_per_s": batch_tokens / median if median else None,
        **compression_figures(monitor_dir / COMPRESSION),
    }


def compression_figures(file: Path) -> dict[str, float | None]:
    """Mean bytes that one rank sends in a step, of every kind that all lines have, and how many times fewer those of
    gradients are than uncompressed (None when nothing is sent)."""
    lines = read_lines(file)
    if not lines:
        return {}
    kinds = [name for name in lines[0] if name.startswith("bytes_")]
    kinds = [name for name in kinds if all(line.get(name) is not None for line in lines)]
    means = {f"{name}_per_step": statistics.fmean(line[name] for line in lines) for name in kinds}
    sent, uncompressed = means["bytes_sent_per_step"], means["bytes_uncompressed_per_step"]
    return {**means, "compression_ratio": uncompressed / sent if sent else None}
