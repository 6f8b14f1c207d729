"""Values that DeepSpeed calculates with, outside of its models, without checking that they are numbers.

Which of them accept null, arrays and other values was found by running DeepSpeed with each.
"""

from collections.abc import Iterator, Mapping

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document, Node
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.rules.optimizer import known_optimizer
from deepspeed_compress.tools.lint.values import means_auto, text_number

_INTEGER, _NUMBER = ("integer",), ("number",)
_CALCULATED: Mapping[Path, tuple[str, ...]] = {
    ("gradient_accumulation_steps",): ("integer", "null"),
    ("gradient_clipping",): _NUMBER,
    ("sequence_parallel_size",): _INTEGER,
    ("steps_per_print",): ("integer", "null"),
    ("train_batch_size",): ("integer", "null"),
    ("train_micro_batch_size_per_gpu",): ("integer", "null"),
    ("wall_clock_breakdown",): ("boolean",),
    ("flops_profiler", "enabled"): ("boolean",),
}
"""Keys of every run, with the types that do not fail."""
_PROFILER: Mapping[Path, tuple[str, ...]] = {
    ("flops_profiler", "module_depth"): _INTEGER,
    ("flops_profiler", "profile_step"): _INTEGER,
    ("flops_profiler", "recompute_fwd_factor"): _NUMBER,
    ("flops_profiler", "top_modules"): _INTEGER,
}
_OPTIMIZER = frozenset(
    {
        *("lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value", "muon_lr", "adam_lr"),
        *("alpha", "rho", "lambd", "t0", "momentum_decay", "beta2_decay", "d"),
    }
)
_UNTRIED = frozenset({"lamb", "lion", "lion+offload", "adagrad+offload"})
"""Optimizers whose kernels do not run on a CPU."""
_RATE = ("number", "array")
_SCHEDULER: Mapping[str, tuple[str, ...]] = {
    "cos_min_ratio": _NUMBER,
    "cycle_first_stair_count": _INTEGER,
    "cycle_first_step_size": _NUMBER,
    "cycle_max_lr": _RATE,
    "cycle_min_lr": _RATE,
    "cycle_second_stair_count": ("integer", "null"),
    "cycle_second_step_size": ("number", "null"),
    "decay_lr_rate": _NUMBER,
    "decay_step_size": _INTEGER,
    "last_batch_iteration": _INTEGER,
    "lr_range_test_min_lr": _RATE,
    "lr_range_test_step_rate": _NUMBER,
    "lr_range_test_step_size": _INTEGER,
    "total_num_steps": _INTEGER,
    "warmup_max_lr": (*_RATE, "null"),
    "warmup_min_lr": _RATE,
    "warmup_min_ratio": _NUMBER,
    "warmup_num_steps": _INTEGER,
}
"""Parameters of DeepSpeed's own schedulers. A rate may be an array, with an item for each parameter group."""


def not_numbers(document: Document) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the paths of values with which DeepSpeed cannot calculate, with the types that it accepts there.

    Numbers in text and "auto" are left to other rules. Booleans count as 0 and 1.
    """
    for path, kinds in _expected(document):
        node = document.node(*path)
        if node is not None and not _fits(node, kinds):
            yield path, kinds


def _fits(node: Node, kinds: tuple[str, ...]) -> bool:
    if node.kind == "string":
        return "boolean" in kinds or means_auto(node.value) or text_number(node.value) is not None
    return node.kind in ("number", "bool", *kinds)


def _expected(document: Document) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the paths that DeepSpeed reads with this configuration, with the types that it accepts there."""
    yield from _CALCULATED.items()
    if document.stage == 0 or document.scatters:
        yield ("gradient_predivide_factor",), _NUMBER
    if document.is_true("flops_profiler", "enabled"):
        yield from _PROFILER.items()
    for key in _parameters(document):
        yield ("optimizer", "params", key), _NUMBER
    known = keys().schedulers.get(document.string("scheduler", "type"), {})
    for key in _SCHEDULER.keys() & known.keys():
        yield ("scheduler", "params", key), _SCHEDULER[key]


def _parameters(document: Document) -> frozenset[str]:
    """Return the parameters of the optimizer that are numbers."""
    name = known_optimizer(document) or ""
    other = {"eps"} if name == "Adafactor" else set()  # two numbers
    return frozenset() if name in _UNTRIED else _OPTIMIZER & keys().optimizers.get(name, frozenset()) - other
