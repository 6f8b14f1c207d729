"""Types: values that are refused, converted in silence, or taken for something else."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document, Member
from deepspeed_compress.tools.lint.edits import fix, replace
from deepspeed_compress.tools.lint.hit import Hit, Path
from deepspeed_compress.tools.lint.keys import Key, keys, known_values
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, raises
from deepspeed_compress.tools.lint.rules.common import (
    ZERO,
    config,
    integer,
    listed,
    means_auto,
    name,
    number,
    params,
    show,
    trained,
    truth,
    zero,
)

_FAMILY = "types"
_NUMERIC = frozenset({"integer", "number"})
_JSON_KINDS = {"object": "object", "array": "array", "string": "string", "bool": "boolean", "null": "null"}
# Kinds that have a rule of their own.
_SECTIONS = frozenset({"object"})
_STAGE: Path = (ZERO, "stage")


def _kind(member: Member) -> str:
    node = member.value
    if node.kind == "number":
        return "integer" if isinstance(node.value, int) or float(node.value).is_integer() else "number"
    return _JSON_KINDS[node.kind]


def _misfits(document: Document, *, strict: bool) -> Iterator[tuple[Path, Key, Member]]:
    """Known keys whose value has another kind than DeepSpeed expects; "auto" is a matter of other rules."""
    for path, key, member in known_values(document, strict=strict):
        expected = {*key.kinds, *(("integer",) if "number" in key.kinds else ())}
        if key.kinds and "any" not in expected and _kind(member) not in expected and not means_auto(member.value.value):
            yield path, key, member


def _boolean_text(path: Path, key: Key, member: Member) -> bool | None:
    """What a text in the place of a boolean says."""
    is_text = member.value.kind == "string" and "boolean" in key.kinds
    return truth(member.value.value) if is_text else None


def _numeric_text(value: object) -> float | None:
    """The number that a text says."""
    if not isinstance(value, str) or len(value) > 40:
        return None
    try:
        return number(integer(value) if integer(value) is not None else float(value))
    except ValueError:
        return None


def _string_boolean(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in _misfits(document, strict=True):
        meant = _boolean_text(path, key, member)
        # The Trainer stops at these.
        compared = context.framework == "hf" and path in (("fp16", "enabled"), ("bf16", "enabled"))
        if meant is not None and not compared:
            what = f"{show(member.value.value)} is text (allowed: true, false)"
            correction = fix("Write a boolean", replace(document, path, meant))
            yield Hit(path, what, show(meant), fix=correction)


def _truthy_string(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in _misfits(document, strict=False):
        if "boolean" in key.kinds and member.value.kind == "string" and path[-1] != "pipeline_stage":
            meant = truth(member.value.value)
            what = f"{show(member.value.value)} is text, and any text counts as true (allowed: true, false)"
            correction = fix("Write a boolean", replace(document, path, meant)) if meant is not None else None
            yield Hit(path, what, "true or false" if meant is None else show(meant), fix=correction)


def _numeric_string(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in _misfits(document, strict=True):
        meant = integer(member.value.value) if "number" not in key.kinds else _numeric_text(member.value.value)
        if member.value.kind == "string" and _NUMERIC & {*key.kinds} and meant is not None and not key.choices:
            what = f"{show(member.value.value)} is text (allowed: a number)"
            yield Hit(path, what, show(meant), fix=fix("Write a number", replace(document, path, meant)))


def _numeric_string_untyped(document: Document, context: Context) -> Iterator[Hit]:
    texts = [path for path, key, _ in _misfits(document, strict=False) if _NUMERIC & {*key.kinds}]
    texts += [(part, "params", key) for part in ("optimizer", "scheduler") for key in params(document, part)]
    for path in texts:
        meant = _numeric_text(document.get(*path))
        if meant is not None:
            what = f"{show(document.get(*path))} is text, with which DeepSpeed cannot calculate (allowed: a number)"
            yield Hit(path, what, show(meant), fix=fix("Write a number", replace(document, path, meant)))


def _fraction(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in _misfits(document, strict=True):
        if member.value.kind == "number" and "integer" in key.kinds and _kind(member) == "number" and path != _STAGE:
            what = f"{show(member.value.value)} is a fraction (allowed: whole numbers)"
            found = number(member.value.value)
            yield Hit(path, what, "a whole number" if found is None else show(round(found)))


def _wrong_type(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in _misfits(document, strict=True):
        if not (_SECTIONS & {*key.kinds} or path == _STAGE or _has_own_rule(path, key, member)):
            what = f"{show(member.value.value)} has the wrong type (allowed: {' or '.join(key.kinds)})"
            yield Hit(path, what, f"a value of type {' or '.join(key.kinds)}")


def _has_own_rule(path: Path, key: Key, member: Member) -> bool:
    value, kind = member.value.value, member.value.kind
    if kind == "string":
        meant = _numeric_text(value) if "number" in key.kinds else integer(value)
        return _boolean_text(path, key, member) is not None or bool(_NUMERIC & {*key.kinds} and meant is not None)
    boolean_number = kind == "number" and "boolean" in key.kinds and value in (0, 1)
    # True and false are 1 and 0 where a number is expected, but for fp16, which has a rule of its own.
    return boolean_number or (kind in ("bool", "number") and bool(_NUMERIC & {*key.kinds}))


def _not_a_section(document: Document, context: Context) -> Iterator[Hit]:
    for strict in (True, False):
        for path, key, member in _misfits(document, strict=strict):
            # "zero_optimization": true has a rule of its own, and null is no section for these.
            special = path == ("zero_optimization",) and member.value.kind == "bool"
            absent = path in (("bf16",), ("aio",)) and member.value.kind == "null"
            parameters = path in (("optimizer", "params"),) and member.value.kind == "null"
            if (
                key.kinds == ("object",)
                and (path in keys().sections or path in _PARAMS)
                and not (special or absent or parameters)
            ):
                what = f"{show(member.value.value)} is not an object (allowed: an object)"
                yield Hit(path, what, f'{{}} for the defaults, or leave "{path[-1]}" out')


_PARAMS: tuple[Path, ...] = (("optimizer", "params"), ("scheduler", "params"))


def _outside(value: float, limits: dict[str, float]) -> bool:
    return (
        value <= limits.get("above", float("-inf"))
        or value < limits.get("least", float("-inf"))
        or value >= limits.get("below", float("inf"))
        or value > limits.get("most", float("inf"))
    )


_WORDS = {"above": "above", "least": "at least", "below": "below", "most": "at most"}


def _out_of_range(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in known_values(document, strict=True):
        value = number(member.value.value)
        if value is not None and path != _STAGE and _outside(value, dict(key.limits)):
            allowed = " and ".join(f"{_WORDS[word]} {show(limit)}" for word, limit in key.limits.items())
            yield Hit(path, f"{show(value)} is out of range (allowed: {allowed})", f"a number {allowed}")


def _not_a_choice(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, member in known_values(document, strict=True):
        value = member.value.value
        if (
            member.value.kind == "string"
            and "string" in key.kinds
            and key.choices
            and value not in key.choices
            and not means_auto(value)
        ):
            what = f"{show(value)} is not known (allowed: {listed(key.choices)})"
            close = next((choice for choice in key.choices if str(choice).lower() == value.lower()), None)
            correction = fix("Write it as DeepSpeed does", replace(document, path, close)) if close else None
            yield Hit(path, what, show(close) if close else f"one of {listed(key.choices)}", fix=correction)


def _both_names(document: Document, context: Context) -> Iterator[Hit]:
    for path, key, _ in known_values(document, strict=True):
        if key.alias and document.has(*path[:-1], key.alias):
            what = f'"{path[-1]}" and "{key.alias}" are two names of one key (allowed: one of them)'
            yield Hit(path, what, f"only {name((*path[:-1], key.alias))}", "key")


RULES = (
    Rule(
        "DSC010",
        "string-boolean",
        "warning",
        _FAMILY,
        "Text where a boolean is expected, in a section that converts it.",
        'DeepSpeed\'s models read "true" as true (pydantic, runtime/config_utils.py), but other readers of the same '
        "file, such as Accelerate, compare with true and see text.",
        config(bf16={"enabled": "true"}),
        config(bf16={"enabled": True}),
        _string_boolean,
        accepts("who reads the file besides may take the text for false"),
    ),
    Rule(
        "DSC011",
        "truthy-string",
        "error",
        _FAMILY,
        'Text where a boolean is expected, in a section that takes "false" for true.',
        "Outside of its models DeepSpeed uses values as they are (get_scalar_param, runtime/config_utils.py): any text "
        "that is not empty is true. For wall_clock_breakdown and flops_profiler.enabled it fails.",
        config(prescale_gradients="false"),
        config(prescale_gradients=False),
        _truthy_string,
        accepts("gradients are scaled before they are reduced, although the file says false"),
    ),
    Rule(
        "DSC012",
        "numeric-string",
        "warning",
        _FAMILY,
        "Text where a number is expected, in a section that converts it.",
        "DeepSpeed's models convert text into numbers (runtime/config_utils.py), but Hugging Face, which compares and "
        "multiplies the values of the same file, does not.",
        zero(1, reduce_bucket_size="500000"),
        zero(1, reduce_bucket_size=500000),
        _numeric_string,
        accepts("who reads the file besides gets text"),
    ),
    Rule(
        "DSC013",
        "numeric-string-untyped",
        "error",
        _FAMILY,
        "Text where a number is expected, in a section that does not convert it.",
        "Outside of its models DeepSpeed calculates with values as they are (runtime/config.py), and a learning rate "
        "in quotes fails at the first step.",
        config(gradient_accumulation_steps="4"),
        config(gradient_accumulation_steps=4),
        _numeric_string_untyped,
        raises("TypeError"),
    ),
    Rule(
        "DSC014",
        "fractional-integer",
        "error",
        _FAMILY,
        "A fraction where a whole number is expected.",
        "The models of DeepSpeed refuse fractions for integers (runtime/config_utils.py); bucket sizes that were "
        "computed from the hidden size are the usual cause.",
        zero(3, stage3_prefetch_bucket_size=15099494.4),
        zero(3, stage3_prefetch_bucket_size=15099494),
        _fraction,
        raises("int_from_float"),
    ),
    Rule(
        "DSC015",
        "wrong-type",
        "error",
        _FAMILY,
        "A value of a type that DeepSpeed refuses.",
        "The models of DeepSpeed (runtime/config_utils.py) validate every value at the start.",
        config(comms_logger={"enabled": True, "prof_ops": "all_reduce"}),
        config(comms_logger={"enabled": True, "prof_ops": ["all_reduce"]}),
        _wrong_type,
        raises("list_type"),
    ),
    Rule(
        "DSC016",
        "out-of-range",
        "error",
        _FAMILY,
        "A number outside of the range that DeepSpeed accepts.",
        "The models of DeepSpeed give bounds for sizes and ratios (runtime/zero/config.py, offload_config.py).",
        zero(2, reduce_bucket_size=0),
        zero(2, reduce_bucket_size=500000000),
        _out_of_range,
        raises("greater_than"),
    ),
    Rule(
        "DSC017",
        "not-a-choice",
        "error",
        _FAMILY,
        "A word that is not one of those that DeepSpeed knows.",
        "Devices, strategies and backends are enumerations (runtime/zero/offload_config.py), compared with their case.",
        zero(3, offload_param={"device": "gpu"}),
        zero(3, offload_param={"device": "cpu"}),
        _not_a_choice,
        raises("Input should be 'none', 'cpu' or 'nvme'"),
    ),
    Rule(
        "DSC018",
        "not-a-section",
        "error",
        _FAMILY,
        "A plain value where a section, an object, is expected.",
        "DeepSpeed unpacks sections without looking (runtime/precision_config.py) and fails with a message about `**`.",
        trained(fp16=True),
        trained(fp16={"enabled": True}),
        _not_a_section,
        raises("must be a mapping"),
    ),
    Rule(
        "DSC019",
        "both-names-of-a-key",
        "error",
        _FAMILY,
        "A key stands under its name and under its alias.",
        "Keys such as stage3_prefetch_bucket_size have a second name without the prefix (runtime/zero/config.py); both "
        "together are refused as an unknown key.",
        zero(3, prefetch_bucket_size=1000, stage3_prefetch_bucket_size=1000),
        zero(3, stage3_prefetch_bucket_size=1000),
        _both_names,
        raises("extra_forbidden"),
    ),
)
