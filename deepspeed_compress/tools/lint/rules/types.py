"""Rules on types: values that are refused, silently converted, misinterpreted, or in place of a section."""

import operator
from collections.abc import Iterator, Mapping, Sequence

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document, Member
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import Key, keys, known_values
from deepspeed_compress.tools.lint.rule import READ_RAW, ZERO, Context, Findings, corrected, finding, rule
from deepspeed_compress.tools.lint.rules.optimizer import known_optimizer
from deepspeed_compress.tools.lint.rules.schedulers import OWN, scheduler_name
from deepspeed_compress.tools.lint.values import AUTO, integer, listed, means_auto, number, show, text_number, truth

_NUMERIC = frozenset({"integer", "number"})
_JSON_KINDS = {"object": "object", "array": "array", "string": "string", "bool": "boolean", "null": "null"}
_STAGE: Path = (ZERO, "stage")


def _kind(member: Member) -> str:
    node = member.value
    if node.kind == "number":
        return "integer" if isinstance(node.value, int) or float(node.value).is_integer() else "number"
    return _JSON_KINDS[node.kind]


def misfits(document: Document, *, strict: bool) -> Iterator[tuple[Path, Key, Member]]:
    """Yield known keys whose value is not of the expected kind. "auto" is left to other rules."""
    for path, key, member in known_values(document, strict=strict):
        expected = {*key.kinds, *(("integer",) if "number" in key.kinds else ())}
        if key.kinds and "any" not in expected and _kind(member) not in expected and not means_auto(member.value.value):
            yield path, key, member


@rule("DSC010", "warning")
def text_converted(document: Document, context: Context) -> Findings:
    """A boolean or a number is written as text, in a section that converts it.

    DeepSpeed's models read "true" as true, and "3" as 3 (pydantic, runtime/config_utils.py). Other readers of the same
    file, such as Accelerate, do not convert text: with the stage "3", it prepares no model for stage 3
    (accelerate/utils/deepspeed.py).

    Wrong: {"train_batch_size": 8, "bf16": {"enabled": "true"}}
    Right: {"train_batch_size": 8, "bf16": {"enabled": true}}
    Proof: accepts other readers of the file may take the text for false
    """
    for path, key, member in misfits(document, strict=True):
        value = member.value.value
        meant: float | None = truth(value) if "boolean" in key.kinds else None
        if meant is None and _NUMERIC & {*key.kinds} and path not in READ_RAW:
            found = text_number(value) if "number" in key.kinds else integer(value)
            meant = found if not key.choices or found in key.choices else None
        if isinstance(value, str) and meant is not None:
            what = f"{show(value)} is text (allowed: {' or '.join(key.kinds)})"
            yield corrected(document, path, what, meant, f"Write {show(meant)}")


@rule("DSC011", "error")
def truthy_string(document: Document, context: Context) -> Findings:
    """A boolean is written as text, in a section that treats "false" as true.

    Outside of its models, DeepSpeed does not convert values (get_scalar_param, runtime/config_utils.py), so any text
    that is not empty counts as true. wall_clock_breakdown and flops_profiler.enabled fail with text.

    Wrong: {"train_batch_size": 8, "prescale_gradients": "false"}
    Right: {"train_batch_size": 8, "prescale_gradients": false}
    Proof: accepts gradients are scaled before they are reduced, although the file says false
    """
    for path, key, member in misfits(document, strict=False):
        if "boolean" in key.kinds and member.value.kind == "string" and path[-1] != "pipeline_stage":
            meant = truth(member.value.value)
            what = f"{show(member.value.value)} is text, and any text counts as true (allowed: true, false)"
            correction = fix("Write a boolean", replace(document, path, meant)) if meant is not None else None
            yield finding(path, what, "true or false" if meant is None else show(meant), correction)


@rule("DSC013", "error")
def numeric_string_untyped(document: Document, context: Context) -> Findings:
    """A number is written as text, in a section that does not convert it.

    Outside of its models, DeepSpeed calculates with values without converting them (runtime/config.py). A learning rate
    in quotes fails at the first step. tensor_parallel.autotp_size is compared before its model converts it
    (deepspeed/__init__.py).

    Wrong: {"train_batch_size": 8, "gradient_accumulation_steps": "4"}
    Right: {"train_batch_size": 8, "gradient_accumulation_steps": 4}
    Proof: raises TypeError
    """
    texts = [path for path, key, _ in misfits(document, strict=False) if _NUMERIC & {*key.kinds}]
    for path in (*texts, *document.parameter_paths, *READ_RAW):
        meant = text_number(document.get(*path))
        if meant is not None:
            what = f"{show(document.get(*path))} is text, with which DeepSpeed cannot calculate (allowed: a number)"
            yield corrected(document, path, what, meant, "Write a number")


@rule("DSC014", "error")
def fractional_integer(document: Document, context: Context) -> Findings:
    """A whole number is expected, and the value is a fraction.

    DeepSpeed's models refuse fractions for integers (runtime/config_utils.py). A usual cause is a bucket size that was
    computed from the hidden size.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494.4}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 15099494}}
    Proof: raises int_from_float
    """
    for path, key, member in misfits(document, strict=True):
        if member.value.kind == "number" and "integer" in key.kinds and _kind(member) == "number" and path != _STAGE:
            what = f"{show(member.value.value)} is a fraction (allowed: whole numbers)"
            found = number(member.value.value)
            yield finding(path, what, "a whole number" if found is None else show(round(found)))


@rule("DSC015", "error")
def not_a_number(document: Document, context: Context) -> Findings:
    """A number is expected where DeepSpeed does not check it, and the value is something else.

    Outside of its models, DeepSpeed calculates with numbers without a check (runtime/config.py), which fails at the
    start or at the first step.

    Wrong: {"train_batch_size": 8, "gradient_accumulation_steps": []}
    Right: {"train_batch_size": 8, "gradient_accumulation_steps": 4}
    Proof: raises TypeError
    """
    # Numbers in text and "auto" are left to other rules. Booleans count as 0 and 1.
    for path, kinds in _numbers_expected(document):
        node = document.node(*path)
        reported = node is not None and (means_auto(node.value) or text_number(node.value) is not None)
        if node is not None and not reported and node.kind not in ("number", "bool", *kinds):
            what = f"{show(node.value)} has the wrong type (allowed: {' or '.join(kinds)})"
            yield finding(path, what, f"a value of type {' or '.join(kinds)}")


_NUMBERS = frozenset(
    {
        *("lr", "eps", "weight_decay", "momentum", "lr_decay", "initial_accumulator_value", "muon_lr", "adam_lr"),
        *("alpha", "rho", "lambd", "t0", "momentum_decay", "beta2_decay", "d"),
    }
)
"""Parameters of optimizers that are numbers."""
_UNTRIED = frozenset({"lamb", "lion", "lion+offload", "adagrad+offload"})
"""Optimizers whose kernels do not run on a CPU."""
_ENDS = ("_lr", "lr_rate", "_step_rate", "_ratio", "_steps", "_size", "_count", "_iteration")
"""Ends of the names of DeepSpeed's scheduler parameters that are numbers."""
_MAY_BE_NULL = frozenset({"warmup_max_lr", "cycle_second_step_size", "cycle_second_stair_count"})


def _numbers_expected(document: Document) -> Iterator[tuple[Path, Sequence[str]]]:
    """Yield the paths of values with which DeepSpeed calculates, with the types that it accepts there.

    Which keys accept null and arrays was found by running DeepSpeed with each.
    """
    reduced, profiled = document.stage == 0 or document.scatters, document.is_true("flops_profiler", "enabled")
    for path, known, _ in known_values(document, strict=False):
        is_read = profiled if path[0] == "flops_profiler" else len(path) == 1
        unused = path[0] == "gradient_predivide_factor" and not reduced
        if is_read and not unused and {"integer", "number"} & {*known.kinds}:
            yield path, known.kinds
    name = known_optimizer(document) or ""
    for key in keys().optimizers.get(name, frozenset()) & _NUMBERS if name not in _UNTRIED else ():
        if (name, key) != ("Adafactor", "eps"):  # two numbers
            yield ("optimizer", "params", key), ("number",)
    for key in document.section("scheduler", "params") if scheduler_name(document) in OWN else ():
        if key.endswith(_ENDS):
            # A rate may be an array, with an item for each parameter group.
            also = (*(["array"] if key.endswith("_lr") else []), *(["null"] if key in _MAY_BE_NULL else []))
            yield ("scheduler", "params", key), ("number", *also)


_LIMITS = {
    "above": ("above", operator.gt),
    "least": ("at least", operator.ge),
    "below": ("below", operator.lt),
    "most": ("at most", operator.le),
}
"""Words for the limits of a key, with the comparisons that hold within them."""


@rule("DSC016", "error")
def out_of_range(document: Document, context: Context) -> Findings:
    """A number is outside of the range that DeepSpeed accepts.

    DeepSpeed's models have bounds for sizes and ratios (runtime/zero/config.py, offload_config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 0}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_bucket_size": 500000000}}
    Proof: raises greater_than
    """
    for path, key, member in known_values(document, strict=True):
        value = number(member.value.value)
        limits = [(*_LIMITS[name], limit) for name, limit in key.limits.items()]
        if value is not None and path != _STAGE and not all(holds(value, limit) for _, holds, limit in limits):
            allowed = " and ".join(f"{word} {show(limit)}" for word, _, limit in limits)
            yield finding(path, f"{show(value)} is out of range (allowed: {allowed})", f"a number {allowed}")


_CHOICES: Mapping[Path, tuple[str, ...]] = {
    ("gradient_allreduce_op",): ("mean", "sum"),
    ("checkpoint", "tag_validation"): ("warn", "ignore", "fail"),
    ("scheduler", "params", "warmup_type"): ("log", "linear"),
}
"""Words in sections that are not models of DeepSpeed, which compares them in any case."""


@rule("DSC017", "error")
def not_a_choice(document: Document, context: Context) -> Findings:
    """A word is not one of those that DeepSpeed knows.

    Words are checked when the configuration is read (runtime/config.py), except an unknown warmup_type, which means
    log (runtime/lr_schedules.py).

    Wrong: {"train_batch_size": 8, "gradient_allreduce_op": "average"}
    Right: {"train_batch_size": 8, "gradient_allreduce_op": "mean"}
    Proof: raises gradient_allreduce_op
    """
    for path, choices in _CHOICES.items():
        value = document.get(*path)
        word = value.lower() if isinstance(value, str) else value
        if document.has(*path) and word not in (*choices, AUTO):
            yield finding(path, f"{show(value)} is not known (allowed: {listed(choices)})", f"one of {listed(choices)}")


@rule("DSC018", "error")
def not_a_section(document: Document, context: Context) -> Findings:
    """A section is expected, and the value is not an object.

    DeepSpeed unpacks sections without a check (runtime/precision_config.py) and fails with a message about `**`. Its
    models refuse other values for offload_optimizer, offload_param and others (runtime/zero/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "fp16": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "fp16": {"enabled": true}}
    Proof: raises must be a mapping
    """
    for path, member in (*_plain_values(document), *_automatic_sections(document, context)):
        if (path, member.value.kind) not in _ACCEPTED and path not in _NEVER_READ:
            what = f"{show(member.value.value)} is not an object (allowed: an object)"
            yield finding(path, what, f'{{}} for the defaults, or leave "{path[-1]}" out')


_ACCEPTED: frozenset[tuple[Path, str]] = frozenset(
    {
        ((ZERO,), "bool"),  # has its own rule
        (("bf16",), "null"),
        (("aio",), "null"),
        (("checkpoint", "writer"), "null"),
        (("expert_parallel",), "null"),
        (("optimizer", "params"), "null"),
        ((ZERO, "leaf_module"), "null"),
    }
)
"""Sections for which DeepSpeed accepts a plain value, with the kind of that value."""
_NEVER_READ: frozenset[Path] = frozenset({("inference",), ("msamp",)})


def _plain_values(document: Document) -> Iterator[tuple[Path, Member]]:
    for strict in (True, False):
        for path, key, member in misfits(document, strict=strict):
            if "object" in key.kinds and {*key.kinds} <= {"object", "null"}:
                yield path, member


def _automatic_sections(document: Document, context: Context) -> Iterator[tuple[Path, Member]]:
    """Yield sections that are "auto" if nothing drops the value. With a framework, DSC700 and DSC702 report them."""
    if context.framework in (None, "lightning"):
        for path, key, member in known_values(document, strict=False):
            if key.kinds == ["object"] and means_auto(member.value.value) and path in keys().sections:
                yield path, member
