"""Which program a configuration was written for, as far as it tells itself."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.options import Framework

_FILLED = frozenset(
    {
        "bf16",
        "fp16",
        "gradient_accumulation_steps",
        "gradient_clipping",
        "optimizer",
        "scheduler",
        "train_batch_size",
        "train_micro_batch_size_per_gpu",
        "zero_optimization",
    }
)
"""Where Hugging Face fills in "auto"."""


def told_framework(document: Document) -> Framework | None:
    """`hf` for "auto" that neither DeepSpeed nor its autotuner knows; None where nothing is told."""
    if document.get("autotuning", "enabled") is True:
        return None
    autos = (path for path, member in document.walk() if member.value.value == "auto")
    return "hf" if any(path[0] in _FILLED and "zenflow" not in path for path in autos) else None
