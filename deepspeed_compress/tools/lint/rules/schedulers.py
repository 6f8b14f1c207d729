"""Rules on learning rate schedulers, and on their numbers of steps."""

from collections.abc import Callable, Mapping

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import closest, keys
from deepspeed_compress.tools.lint.rule import Context, Findings, finding, key_finding, meant, rule
from deepspeed_compress.tools.lint.values import listed, number, show

_TYPE = ("scheduler", "type")
PARAMS = ("scheduler", "params")
WARMUPS = frozenset({"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
OWN = WARMUPS | {"LRRangeTest", "OneCycle"}


def scheduler_name(document: Document) -> str:
    """Return the scheduler's type, or an empty string."""
    return document.string(*_TYPE)


def _runs(document: Document) -> bool:
    """Return True if the scheduler's type is known."""
    return scheduler_name(document) in keys().schedulers


@rule("DSC520", "error")
def unknown_scheduler(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know scheduler.type.

    DeepSpeed looks up the exact name among its own schedulers and those of torch (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmUpLR", "params": {"warmup_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Proof: raises does not recognize LR scheduler
    """
    value = document.get(*_TYPE)
    if value is not None and not _runs(document):
        what = f"{show(value)} is neither a scheduler of DeepSpeed nor of torch"
        yield finding(_TYPE, what, meant(scheduler_name(document), keys().schedulers, '"WarmupLR", for instance'))


@rule("DSC522", "error")
def scheduler_without_params(document: Document, context: Context) -> Findings:
    r"""The section scheduler has no params.

    DeepSpeed unpacks params without a check (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR"}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {}}}
    Proof: raises argument after \*\* must be a mapping
    """
    if _runs(document) and document.get(*PARAMS) is None:
        yield finding(_TYPE, 'a scheduler without "params" fails', '"params": {} as well')


@rule("DSC523", "error")
def unknown_scheduler_parameter(document: Document, context: Context) -> Findings:
    """The scheduler does not have a parameter.

    DeepSpeed passes scheduler.params on to the constructor (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Proof: raises unexpected keyword argument
    """
    known = keys().schedulers.get(scheduler_name(document), {})
    for key in document.section("scheduler", "params") if known else ():
        if key not in known:
            what = f'"{key}" is not a parameter of {scheduler_name(document)}'
            yield key_finding((*PARAMS, key), what, meant(key, known, "nothing: remove the key"))


@rule("DSC524", "error")
def missing_scheduler_parameter(document: Document, context: Context) -> Findings:
    """The scheduler lacks a parameter that it needs.

    WarmupDecayLR and WarmupCosineLR need total_num_steps (runtime/lr_schedules.py). Those of torch need others.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 100, "total_num_steps": 1000}}}
    Proof: raises missing 1 required positional argument
    """
    known, given = keys().schedulers.get(scheduler_name(document), {}), document.section("scheduler", "params")
    # A misspelled name is reported as such.
    misspelled = {closest(key, known) for key in given if key not in known}
    for key, required in known.items():
        if required and key not in given and key not in misspelled and document.get(*PARAMS) is not None:
            what = f'"{key}" is missing, which {scheduler_name(document)} needs'
            yield finding((*PARAMS, key), what, f'"{key}" into params')


@rule("DSC528", "warning")
def decay_at_default_rate(document: Document, context: Context) -> Findings:
    """WarmupDecayLR or LRRangeTest without a rate of its own starts from 0.001.

    WarmupLR uses the optimizer's rate by default. These two have defaults of their own (runtime/lr_schedules.py):
    warmup_max_lr and lr_range_test_min_lr are 0.001.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 10, "total_num_steps": 100}}}
    Proof: accepts the learning rate is ten times the one of the optimizer
    """
    rate, key = document.number("optimizer", "params", "lr"), _DEFAULTED.get(scheduler_name(document), "")
    missing = not document.has(*PARAMS, key) and document.get(*PARAMS) is not None
    if key and missing and rate != 0.001:
        asked = f"the optimizer's {show(rate)}" if rate is not None else "that of the optimizer"
        what = f"{scheduler_name(document)} without {key} trains at 0.001, not at {asked}"
        yield finding((*PARAMS, key), what, f'"{key}": {show(rate) if rate is not None else "..."}')


_DEFAULTED = {"WarmupDecayLR": "warmup_max_lr", "LRRangeTest": "lr_range_test_min_lr"}
"""Parameters that default to 0.001, whatever the optimizer's learning rate is."""


@rule("DSC529", "warning")
def scheduler_replaces_rate(document: Document, context: Context) -> Findings:
    """The scheduler's learning rate is not the optimizer's.

    WarmupLR, WarmupDecayLR, OneCycle and LRRangeTest set the rate of every step (runtime/lr_schedules.py), as CyclicLR
    and OneCycleLR of torch do, so that the optimizer's is never used. WarmupCosineLR multiplies it, and WarmupLR
    without warmup_max_lr takes it.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.001, "warmup_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Proof: accepts the learning rate of the optimizer has no effect
    """
    rate, given = document.number("optimizer", "params", "lr"), _RATES.get(scheduler_name(document), ())
    own = [(key, value) for key in given for value in _numbers(document.get(*PARAMS, key))]
    if rate is not None and own and own[-1][0] == given[-1] and rate not in [value for _, value in own]:
        key, value = own[-1]
        what = f"{show(value)} replaces the optimizer's learning rate {show(rate)}"
        yield finding((*PARAMS, key), what, f"{show(rate)}, or the same number in both places")


_RATES: Mapping[str, tuple[str, ...]] = {
    "WarmupLR": ("warmup_max_lr",),
    "WarmupDecayLR": ("warmup_max_lr",),
    "OneCycle": ("cycle_min_lr", "cycle_max_lr"),
    "LRRangeTest": ("lr_range_test_min_lr",),
    "CyclicLR": ("base_lr", "max_lr"),
    "OneCycleLR": ("max_lr",),
}
"""Parameters with the learning rates of schedulers that do not use the optimizer's."""


def _numbers(value: object) -> list[float]:
    """Return the number, or the numbers of parameter groups."""
    found = map(number, value if isinstance(value, list) else [value])
    return [each for each in found if each is not None]


@rule("DSC533", "error")
def torch_scheduler_with_zero(document: Document, context: Context) -> Findings:
    """A scheduler of torch is used with ZeRO, fp16 or bf16.

    The scheduler receives the optimizer that DeepSpeed has wrapped (runtime/engine.py), which is not one of torch.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "CosineAnnealingLR", "params": {"T_max": 100}}}
    Proof: raises is not an Optimizer
    """
    wrapped = document.stage in (1, 2, 3) or document.fp16 or document.bf16
    if _runs(document) and scheduler_name(document) not in OWN and wrapped:
        name = show(scheduler_name(document))
        what = f"{name} is a scheduler of torch, which refuses an optimizer of ZeRO, fp16 or bf16"
        instead = f"one of {listed(sorted(OWN))}, or make it in the program"
        yield finding(_TYPE, what, instead)


def _is_whole(steps: float) -> bool:
    return steps > 0 and steps == int(steps)


_Steps = tuple[Callable[[float], bool], str, str]
_STEPS: Mapping[str, _Steps] = {
    "warmup_num_steps": (_is_whole, "whole numbers from 1", "1 for no warm-up"),
    "lr_range_test_step_size": (_is_whole, "whole numbers from 1", "2000, for instance"),
    "cycle_first_step_size": (lambda steps: steps > 0, "numbers above 0", "2000, for instance"),
    "cycle_second_step_size": (lambda steps: steps >= 0, "0 or more", "2000, for instance"),
}
"""Numbers of steps that a scheduler checks, with the test, its description, and what to write instead."""


@rule("DSC525", "error")
def steps_not_positive(document: Document, context: Context) -> Findings:
    """A number of steps is one that the scheduler refuses.

    The warm-up and the interval of LRRangeTest are positive whole numbers. The first half of OneCycle has more than 0
    steps (runtime/lr_schedules.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 1}}}
    Proof: raises warmup_num_steps must be a positive integer
    """
    for key in _STEPS.keys() & keys().schedulers.get(scheduler_name(document), {}).keys():
        steps, (is_allowed, allowed, instead) = document.number(*PARAMS, key), _STEPS[key]
        if steps is not None and not is_allowed(steps):
            yield finding((*PARAMS, key), f"{show(steps)} is refused (allowed: {allowed})", instead)


@rule("DSC526", "warning")
def warmup_exceeds_total(document: Document, context: Context) -> Findings:
    """The warm-up is longer than the whole training, so that no steps are left to decay.

    The scheduler only warns (runtime/lr_schedules.py). warmup_num_steps is 1000 by default.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 200, "total_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 10, "total_num_steps": 100}}}
    Proof: warns is less than warmup_num_steps
    """
    total = document.number(*PARAMS, "total_num_steps")
    warmup = document.number(*PARAMS, "warmup_num_steps", default=1000.0)
    if scheduler_name(document) in WARMUPS and total is not None and warmup is not None and 0 < total < warmup:
        given = "" if document.has(*PARAMS, "warmup_num_steps") else ", its default"
        what = f"{show(total)} is less than warmup_num_steps {int(warmup)}{given}: the rate never decays"
        yield finding((*PARAMS, "total_num_steps"), what, f"more than {int(warmup)}, or fewer steps of warm-up")


@rule("DSC530", "warning")
def falling_warmup(document: Document, context: Context) -> Findings:
    """warmup_min_lr is above warmup_max_lr.

    The scheduler interpolates between the two without comparing them (runtime/lr_schedules.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR",
        "params": {"warmup_min_lr": 0.001, "warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR",
        "params": {"warmup_min_lr": 0.0, "warmup_max_lr": 0.0001, "warmup_num_steps": 100}}}
    Proof: accepts the learning rate falls where it should rise
    """
    low, high = document.number(*PARAMS, "warmup_min_lr"), document.number(*PARAMS, "warmup_max_lr")
    if scheduler_name(document) in WARMUPS and low is not None and high is not None and low > high:
        what = f"{show(low)} is more than warmup_max_lr {show(high)}: the rate falls during warm-up"
        yield finding((*PARAMS, "warmup_min_lr"), what, f"{show(high)} or less")


@rule("DSC531", "info")
def scheduler_without_optimizer(document: Document, context: Context) -> Findings:
    """The file has a scheduler but no optimizer.

    DeepSpeed creates a scheduler only if there is an optimizer (runtime/engine.py). The program must pass one.

    Wrong:
        {
          "train_batch_size": 8,
          "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}
        }
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 100}}}
    Context: {"framework": "deepspeed"}
    Proof: accepts the learning rate stays constant
    """
    if _runs(document) and not document.has("optimizer") and context.framework == "deepspeed":
        what = "without an optimizer, here or from the program, the scheduler is ignored"
        yield key_finding(("scheduler",), what, '"optimizer": {...}, or pass one to deepspeed.initialize')


@rule("DSC532", "error")
def no_steps_to_decay(document: Document, context: Context) -> Findings:
    """total_num_steps is 0.

    The rate is multiplied by the fraction of the steps that remain (runtime/lr_schedules.py), which is zero. Hugging
    Face compares the number with its own and stops.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 10, "total_num_steps": 0}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 10, "total_num_steps": 100}}}
    Proof: accepts nothing is learned after the warm-up
    """
    total = document.number(*PARAMS, "total_num_steps")
    if scheduler_name(document) in WARMUPS and total is not None and total <= 0:
        what = f"{show(total)} steps: the rate falls to its minimum as soon as the warm-up ends"
        instead = 'the number of steps of the run, or "auto" with Hugging Face'
        yield finding((*PARAMS, "total_num_steps"), what, instead)
