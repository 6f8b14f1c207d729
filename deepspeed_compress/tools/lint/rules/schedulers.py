"""Learning-rate schedulers."""

from collections.abc import Iterator

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.edits import fix, rename, replace
from deepspeed_compress.tools.lint.hit import Hit
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, Rule, accepts, ignores, raises, warns
from deepspeed_compress.tools.lint.rules.common import (
    AUTO,
    bf16,
    fp16,
    listed,
    number,
    params,
    show,
    stage,
    trained,
    zero,
)

_FAMILY = "schedulers"
_TYPE = ("scheduler", "type")
_PARAMS = ("scheduler", "params")
_WARMUPS = frozenset({"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
_OWN = _WARMUPS | {"LRRangeTest", "OneCycle"}
_TYPES = ("log", "linear")


def _name(document: Document) -> str:
    value = document.get(*_TYPE)
    return value if isinstance(value, str) else ""


def _value(document: Document, key: str) -> float | None:
    return number(document.get(*_PARAMS, key))


def _runs(document: Document) -> bool:
    """Whether the scheduler is made: not without an optimizer in the file, unless the program has one."""
    return _name(document) in keys().schedulers


def _unknown(document: Document, context: Context) -> Iterator[Hit]:
    name = _name(document)
    if name and name not in keys().schedulers:
        close = closest(name, keys().schedulers)
        what = f"{show(name)} is neither a scheduler of DeepSpeed nor of torch"
        correction = fix(f"Write {close}", replace(document, _TYPE, close), safe=False) if close else None
        yield Hit(_TYPE, what, f'"{close}", if you meant that' if close else '"WarmupLR", for instance', fix=correction)


def _no_type(document: Document, context: Context) -> Iterator[Hit]:
    if isinstance(document.get("scheduler"), dict) and not document.has(*_TYPE):
        yield Hit(("scheduler",), 'without "type" the scheduler is ignored', '"type": "WarmupLR" besides', "key")


def _no_params(document: Document, context: Context) -> Iterator[Hit]:
    if _runs(document) and document.get(*_PARAMS) is None:
        yield Hit(_TYPE, 'a scheduler without "params" fails', '"params": {} besides')


def _unknown_parameter(document: Document, context: Context) -> Iterator[Hit]:
    known = keys().schedulers.get(_name(document), {})
    for key in params(document, "scheduler") if known else ():
        if key not in known:
            close = closest(key, known)
            what = f'"{key}" is no parameter of {_name(document)}'
            free = close is not None and not document.has(*_PARAMS, close)
            path = (*_PARAMS, key)
            correction = fix(f"Rename to {close}", rename(document, path, close or ""), safe=False) if free else None
            write = f'"{close}", if you meant that' if close else "nothing: remove the key"
            yield Hit(path, what, write, "key", correction)


def _missing_parameter(document: Document, context: Context) -> Iterator[Hit]:
    known, given = keys().schedulers.get(_name(document), {}), params(document, "scheduler")
    # A mistyped name is reported as such.
    meant = {closest(key, known) for key in given if key not in known}
    for key, required in known.items():
        if required and key not in given and key not in meant and document.get(*_PARAMS) is not None:
            yield Hit((*_PARAMS, key), f'"{key}" is missing, which {_name(document)} needs', f'"{key}" into params')


def _warmup_steps(document: Document, context: Context) -> Iterator[Hit]:
    steps = _value(document, "warmup_num_steps")
    if _name(document) in _WARMUPS and steps is not None and (steps <= 0 or steps != int(steps)):
        what = f"{show(steps)} is refused (allowed: whole numbers from 1)"
        yield Hit((*_PARAMS, "warmup_num_steps"), what, "1 for no warm-up")


def _warmup_exceeds(document: Document, context: Context) -> Iterator[Hit]:
    total, default = _value(document, "total_num_steps"), 1000.0
    warmup = _value(document, "warmup_num_steps") if document.has(*_PARAMS, "warmup_num_steps") else default
    if _name(document) in _WARMUPS and total is not None and warmup is not None and 0 < total < warmup:
        given = "" if document.has(*_PARAMS, "warmup_num_steps") else ", its default"
        what = f"{show(total)} is less than warmup_num_steps {int(warmup)}{given}: the rate never decays"
        yield Hit((*_PARAMS, "total_num_steps"), what, f"more than {int(warmup)}, or fewer steps of warm-up")


def _warmup_type(document: Document, context: Context) -> Iterator[Hit]:
    value = document.get(*_PARAMS, "warmup_type", default="log")
    if _name(document) in _WARMUPS and value not in (*_TYPES, AUTO):
        yield Hit(
            (*_PARAMS, "warmup_type"), f"{show(value)} is taken for log (allowed: log, linear)", '"linear" or "log"'
        )


def _default_rate(document: Document, context: Context) -> Iterator[Hit]:
    rate = number(document.get("optimizer", "params", "lr"))
    missing = not document.has(*_PARAMS, "warmup_max_lr") and document.get(*_PARAMS) is not None
    if _name(document) == "WarmupDecayLR" and missing and rate != 0.001:
        asked = f"the optimizer's {show(rate)}" if rate is not None else "that of the optimizer"
        what = f"WarmupDecayLR without warmup_max_lr trains at 0.001, not at {asked}"
        yield Hit((*_PARAMS, "warmup_max_lr"), what, f'"warmup_max_lr": {show(rate) if rate is not None else "..."}')


def _other_rate(document: Document, context: Context) -> Iterator[Hit]:
    rate, top = number(document.get("optimizer", "params", "lr")), _value(document, "warmup_max_lr")
    if _name(document) in ("WarmupLR", "WarmupDecayLR") and rate is not None and top is not None and rate != top:
        what = f"{show(top)} replaces the optimizer's learning rate {show(rate)}"
        yield Hit((*_PARAMS, "warmup_max_lr"), what, f"{show(rate)}, or the same number in both places")


def _falling_warmup(document: Document, context: Context) -> Iterator[Hit]:
    low, high = _value(document, "warmup_min_lr"), _value(document, "warmup_max_lr")
    if _name(document) in _WARMUPS and low is not None and high is not None and low > high:
        what = f"{show(low)} is more than warmup_max_lr {show(high)}: the rate falls during warm-up"
        yield Hit((*_PARAMS, "warmup_min_lr"), what, f"{show(high)} or less")


def _without_optimizer(document: Document, context: Context) -> Iterator[Hit]:
    if _runs(document) and not document.has("optimizer") and context.framework == "deepspeed":
        what = "without an optimizer, here or from the program, the scheduler is ignored"
        yield Hit(("scheduler",), what, '"optimizer": {...}, or pass one to deepspeed.initialize', "key")


def _with(name: str | None, **keys: object) -> str:
    scheduler = {"type": name, "params": keys} if name else {"params": keys}
    return trained(scheduler=scheduler)


_PLAIN = _with("WarmupLR", warmup_max_lr=0.0001, warmup_num_steps=100)


def _no_steps(document: Document, context: Context) -> Iterator[Hit]:
    total = _value(document, "total_num_steps")
    if _name(document) in _WARMUPS and total is not None and total <= 0:
        what = f"{show(total)} steps: the rate falls to its least as soon as the warm-up ends"
        yield Hit((*_PARAMS, "total_num_steps"), what, 'the number of steps of the run, or "auto" with Hugging Face')


def _of_torch(document: Document, context: Context) -> Iterator[Hit]:
    """DeepSpeed gives a scheduler its own optimizer, and those of torch want one of torch."""
    wrapped = stage(document) in (1, 2, 3) or fp16(document) or bf16(document)
    if _runs(document) and _name(document) not in _OWN and wrapped:
        what = f"{show(_name(document))} is of torch, which refuses an optimizer of ZeRO, fp16 or bf16"
        write = f"one of {listed(sorted(_OWN))}, or make it in the program"
        yield Hit(_TYPE, what, write)


RULES = (
    Rule(
        "DSC520",
        "unknown-scheduler",
        "error",
        _FAMILY,
        "scheduler.type is not known.",
        "DeepSpeed looks the name up among its own schedulers and torch's, with its case (runtime/engine.py).",
        _with("WarmUpLR", warmup_num_steps=100),
        _PLAIN,
        _unknown,
        raises("does not recognize LR scheduler"),
    ),
    Rule(
        "DSC521",
        "scheduler-without-type",
        "warning",
        _FAMILY,
        "A scheduler section without a type.",
        "DeepSpeed takes it for no scheduler at all (runtime/config.py).",
        _with(None, warmup_num_steps=100),
        _PLAIN,
        _no_type,
        ignores(),
    ),
    Rule(
        "DSC522",
        "scheduler-without-params",
        "error",
        _FAMILY,
        "A scheduler section without params.",
        "DeepSpeed unpacks params, and there is nothing to unpack (runtime/engine.py).",
        trained(scheduler={"type": "WarmupLR"}),
        trained(scheduler={"type": "WarmupLR", "params": {}}),
        _no_params,
        raises("argument after \\*\\* must be a mapping"),
    ),
    Rule(
        "DSC523",
        "unknown-scheduler-parameter",
        "error",
        _FAMILY,
        "A parameter that the scheduler does not have.",
        "DeepSpeed passes scheduler.params on to the constructor (runtime/engine.py).",
        _with("WarmupLR", warmup_steps=100),
        _PLAIN,
        _unknown_parameter,
        raises("unexpected keyword argument"),
    ),
    Rule(
        "DSC524",
        "missing-scheduler-parameter",
        "error",
        _FAMILY,
        "A parameter that the scheduler needs is missing.",
        "WarmupDecayLR and WarmupCosineLR need total_num_steps (runtime/lr_schedules.py); those of torch have others.",
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=100),
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=100, total_num_steps=1000),
        _missing_parameter,
        raises("missing 1 required positional argument"),
    ),
    Rule(
        "DSC525",
        "warmup-not-positive",
        "error",
        _FAMILY,
        "warmup_num_steps is no positive whole number.",
        "Checked by the scheduler (runtime/lr_schedules.py).",
        _with("WarmupLR", warmup_num_steps=0),
        _with("WarmupLR", warmup_num_steps=1),
        _warmup_steps,
        raises("warmup_num_steps must be a positive integer"),
    ),
    Rule(
        "DSC526",
        "warmup-exceeds-total",
        "warning",
        _FAMILY,
        "The warm-up is longer than the whole training.",
        "The scheduler only warns (runtime/lr_schedules.py). warmup_num_steps is 1000 where it is not given.",
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=200, total_num_steps=100),
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=10, total_num_steps=100),
        _warmup_exceeds,
        warns("is less than warmup_num_steps"),
    ),
    Rule(
        "DSC527",
        "unknown-warmup-type",
        "warning",
        _FAMILY,
        "warmup_type is neither log nor linear.",
        "The scheduler warns and takes log (runtime/lr_schedules.py).",
        _with("WarmupLR", warmup_num_steps=100, warmup_type="cosine"),
        _with("WarmupLR", warmup_num_steps=100, warmup_type="linear"),
        _warmup_type,
        warns("Using unknown warmup_type"),
    ),
    Rule(
        "DSC528",
        "decay-at-default-rate",
        "warning",
        _FAMILY,
        "WarmupDecayLR without warmup_max_lr trains at 0.001.",
        "Unlike WarmupLR, which takes the optimizer's rate, it has a default of its own (runtime/lr_schedules.py).",
        _with("WarmupDecayLR", warmup_num_steps=10, total_num_steps=100),
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=10, total_num_steps=100),
        _default_rate,
        accepts("the learning rate is ten times the one of the optimizer"),
    ),
    Rule(
        "DSC529",
        "scheduler-replaces-rate",
        "warning",
        _FAMILY,
        "The scheduler's learning rate is not the optimizer's.",
        "The scheduler sets the rate of every step (runtime/lr_schedules.py), so that the optimizer's is never used.",
        _with("WarmupLR", warmup_max_lr=0.001, warmup_num_steps=100),
        _PLAIN,
        _other_rate,
        accepts("the learning rate of the optimizer has no effect"),
    ),
    Rule(
        "DSC530",
        "falling-warmup",
        "warning",
        _FAMILY,
        "warmup_min_lr is above warmup_max_lr.",
        "The scheduler interpolates between the two without comparing them (runtime/lr_schedules.py).",
        _with("WarmupLR", warmup_min_lr=0.001, warmup_max_lr=0.0001, warmup_num_steps=100),
        _with("WarmupLR", warmup_min_lr=0.0, warmup_max_lr=0.0001, warmup_num_steps=100),
        _falling_warmup,
        accepts("the learning rate falls where it should rise"),
    ),
    Rule(
        "DSC531",
        "scheduler-without-optimizer",
        "info",
        _FAMILY,
        "A scheduler without an optimizer in the file.",
        "Schedulers are made only where there is an optimizer (runtime/engine.py); the program must pass one.",
        '{\n  "train_batch_size": 8,\n  "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}\n}\n',
        _with("WarmupLR", warmup_num_steps=100),
        _without_optimizer,
        accepts("the learning rate stays constant"),
        {"framework": "deepspeed"},
    ),
    Rule(
        "DSC532",
        "no-steps-to-decay",
        "error",
        _FAMILY,
        "total_num_steps is 0.",
        "The rate is multiplied by what is left of the steps (runtime/lr_schedules.py), which is nothing; Hugging Face "
        "compares the number with its own and stops.",
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=10, total_num_steps=0),
        _with("WarmupDecayLR", warmup_max_lr=0.0001, warmup_num_steps=10, total_num_steps=100),
        _no_steps,
        accepts("nothing is learned after the warm-up"),
    ),
    Rule(
        "DSC533",
        "torch-scheduler-with-zero",
        "error",
        _FAMILY,
        "A scheduler of torch with ZeRO, fp16 or bf16.",
        "The scheduler is given the optimizer that DeepSpeed has wrapped (runtime/engine.py), which is none of torch.",
        zero(1, also={"scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}}),
        trained(scheduler={"type": "CosineAnnealingLR", "params": {"T_max": 100}}),
        _of_torch,
        raises("is not an Optimizer"),
    ),
)
