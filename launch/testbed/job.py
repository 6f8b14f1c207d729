"""What one launched run of the benchmark measures: written by bench.py, read by bench_rank.py on every host."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

DEEPSPEED = "deepspeed"
"""The method that is DeepSpeed without us."""
SECTIONS: Mapping[str, dict[str, Any] | None] = MappingProxyType(
    {
        DEEPSPEED: None,
        "int8": {"gradients": {"method": "blockwise", "bits": 8}},
        "int4": {"gradients": {"method": "blockwise", "bits": 4}},
    }
)
"""Methods by name: the `deepspeed_compress` section, or None for an engine without it."""
PROGRESS = "progress: "
"""What lines for the user begin with; the rest of the output is DeepSpeed's."""


@dataclass(frozen=True)
class Job:
    """`steps` has the number of measured steps for every one of `rates`. Rows are appended to the file `result`."""

    stage: int
    rates: tuple[str, ...]
    steps: tuple[int, ...]
    sections: dict[str, dict[str, Any] | None]
    model: str
    micro_batch: int
    seq_len: int
    seed: int
    result: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        return cls(**json.loads(text))
