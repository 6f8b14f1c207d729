"""Rules on the numbers of steps of learning rate schedulers."""

from collections.abc import Callable, Mapping

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import keys
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import finding
from deepspeed_compress.tools.lint.rules.schedulers import PARAMS, WARMUPS, parameter, scheduler_name
from deepspeed_compress.tools.lint.values import show


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
        steps, (is_allowed, allowed, instead) = parameter(document, key), _STEPS[key]
        if steps is not None and not is_allowed(steps):
            yield finding((*PARAMS, key), f"{show(steps)} is refused (allowed: {allowed})", instead)


@rule("DSC526", "warning")
def warmup_exceeds_total(document: Document, context: Context) -> Findings:
    """The warm-up is longer than the whole training.

    The scheduler only warns (runtime/lr_schedules.py). warmup_num_steps is 1000 by default.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 200, "total_num_steps": 100}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupDecayLR",
        "params": {"warmup_max_lr": 0.0001, "warmup_num_steps": 10, "total_num_steps": 100}}}
    Proof: warns is less than warmup_num_steps
    """
    total = parameter(document, "total_num_steps")
    warmup = document.number(*PARAMS, "warmup_num_steps", default=1000.0)
    if scheduler_name(document) in WARMUPS and total is not None and warmup is not None and 0 < total < warmup:
        given = "" if document.has(*PARAMS, "warmup_num_steps") else ", its default"
        what = f"{show(total)} is less than warmup_num_steps {int(warmup)}{given}: the rate never decays"
        yield finding((*PARAMS, "total_num_steps"), what, f"more than {int(warmup)}, or fewer steps of warm-up")


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
    total = parameter(document, "total_num_steps")
    if scheduler_name(document) in WARMUPS and total is not None and total <= 0:
        what = f"{show(total)} steps: the rate falls to its minimum as soon as the warm-up ends"
        instead = 'the number of steps of the run, or "auto" with Hugging Face'
        yield finding((*PARAMS, "total_num_steps"), what, instead)
