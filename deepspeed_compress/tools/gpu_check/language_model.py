"""Part 7: what compression does to a language model's loss, and to its step where no network holds it back."""

import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deepspeed_compress.tools.gpu_check.findings import Finding, Task
from deepspeed_compress.tools.gpu_check.ranks import Said, backend_here, missing, run_ranks

if TYPE_CHECKING:
    from deepspeed_compress.tools.gpu_check.workload import Shape

__all__ = ["SHAPES", "findings", "judge_losses", "judge_times", "measure", "train"]
