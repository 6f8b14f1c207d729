"""Rules on values of optimizer parameters, and values that DeepSpeed calculates with without checking their type."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from deepspeed_compress.diagnostics import Path
from deepspeed_compress.tools.lint.document import Document, Node
from deepspeed_compress.tools.lint.keys import keys, known_values
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import finding
from deepspeed_compress.tools.lint.rules.optimizer import known_optimizer
from deepspeed_compress.tools.lint.rules.schedulers import OWN, scheduler_name
from deepspeed_compress.tools.lint.values import means_auto, number, show, text_number

_PARAMS = ("optimizer", "params")


@rule("DSC505", "error")
def betas_range(document: Document, context: Context) -> Findings:
    """The betas are not two numbers from 0 to below 1.

    DeepSpeed's own Adam does not check them (ops/adam/fused_adam.py), and training diverges or fails at its first step.
    The optimizers of torch refuse them.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 1.5]}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "betas": [0.9, 0.95]}}}
    Proof: accepts the running means grow without bound
    """
    path = (*_PARAMS, "betas")
    value = document.get(*path)
    # Numbers in text have their own rule.
    if document.has(*path) and not means_auto(value) and text_number(value) is None and not _are_betas(value):
        what = f"{show(value)} are not two numbers from 0 to below 1 (allowed: a list of them)"
        yield finding(path, what, "[0.9, 0.999], for instance")


def _are_betas(value: object) -> bool:
    numbers = map(number, value) if isinstance(value, list) else ()
    return [beta is not None and 0 <= beta < 1 for beta in numbers] == [True, True]


_NOT_NEGATIVE = (
    *("lr", "eps", "weight_decay", "momentum", "lr_decay", "alpha", "rho", "momentum_decay"),
    "initial_accumulator_value",
)


@rule("DSC506", "error")
def negative_optimizer_parameter(document: Document, context: Context) -> Findings:
    """A parameter of the optimizer is negative.

    The optimizers of torch refuse negative rates. With DeepSpeed's own, the loss rises (ops/adam/fused_adam.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": -0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    Proof: raises Invalid learning rate
    """
    for key in _NOT_NEGATIVE:
        value = document.number(*_PARAMS, key)
        accepted = key == "alpha" and document.get("optimizer", "type") == "ASGD"  # an exponent
        if value is not None and value < 0 and not accepted:
            yield finding((*_PARAMS, key), f"{show(value)} is negative (allowed: 0 or more)", show(-value))


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Value of a parameter that optimizers refuse."""

    optimizers: tuple[str, ...]
    key: str
    is_refused: Callable[[Mapping[str, Any]], bool]
    """Test of all the parameters, which include `key`."""
    what: str
    instead: str


def _lacks_momentum(params: Mapping[str, Any]) -> bool:
    return number(params.get("momentum", 0)) == 0 or number(params.get("dampening", 0)) not in (None, 0)


_ADAM = ("adam", "adamw", "adam+offload", "adamw+offload")
_METHODS = ("gram", "standard")
_REFUSALS = (
    _Refusal(
        _ADAM,
        "amsgrad",
        lambda params: bool(params["amsgrad"]),
        "asks for AMSGrad, which DeepSpeed's Adam does not have (allowed: false)",
        'false, or "torch_adam": true as well',
    ),
    _Refusal(
        ("SGD",),
        "nesterov",
        lambda params: bool(params["nesterov"]) and _lacks_momentum(params),
        "needs momentum above 0 and no dampening",
        '"momentum": 0.9 as well, or false',
    ),
    _Refusal(
        ("muon",),
        "ns_method",
        lambda params: params["ns_method"] not in _METHODS,
        'is not a method of Newton-Schulz (allowed: "gram", "standard")',
        '"gram" or "standard"',
    ),
)


@rule("DSC514", "error")
def refused_optimizer_parameter(document: Document, context: Context) -> Findings:
    """The optimizer refuses the value of a parameter.

    DeepSpeed's Adam has no AMSGrad (ops/adam/fused_adam.py, ops/adam/cpu_adam.py), Nesterov's momentum needs a
    momentum, and Muon knows two methods (runtime/zero/muon/original_muon.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "amsgrad": true}}}
    Right: {"train_batch_size": 8,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.0001, "amsgrad": true, "torch_adam": true}}}
    Proof: raises does not support the AMSGrad variant
    """
    name, params = known_optimizer(document), document.params("optimizer")
    for refusal in _REFUSALS:
        value = params.get(refusal.key)
        is_read = name in refusal.optimizers and refusal.key in params and not means_auto(value)
        if is_read and refusal.is_refused(params):
            yield finding((*_PARAMS, refusal.key), f"{show(value)} {refusal.what}", refusal.instead)


@rule("DSC515", "error")
def optimizer_with_closure(document: Document, context: Context) -> Findings:
    """LBFGS needs a closure, which DeepSpeed does not pass.

    LBFGS evaluates the model several times per step. The engine calls the optimizer without a closure
    (runtime/engine.py), and the first step fails.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "LBFGS", "params": {"lr": 0.1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}}
    Proof: accepts the first step ends with TypeError
    """
    if known_optimizer(document) == "LBFGS":
        what = '"LBFGS" needs a closure, and the first step fails without one (allowed: AdamW, for instance)'
        yield finding(("optimizer", "type"), what, '"AdamW", for instance')


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


def not_numbers(document: Document) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the paths of values with which DeepSpeed cannot calculate, with the types that it accepts there.

    Which keys accept null and arrays was found by running DeepSpeed with each. Numbers in text and "auto" are left to
    other rules. Booleans count as 0 and 1.
    """
    for path, kinds in _expected(document):
        node = document.node(*path)
        if node is not None and not _fits(node, kinds):
            yield path, kinds


def _fits(node: Node, kinds: tuple[str, ...]) -> bool:
    if node.kind == "string":
        return means_auto(node.value) or text_number(node.value) is not None
    return node.kind in ("number", "bool", *kinds)


def _expected(document: Document) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the paths of numbers, with the types that DeepSpeed accepts there."""
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
    for key in document.params("scheduler") if scheduler_name(document) in OWN else ():
        if key.endswith(_ENDS):
            # A rate may be an array, with an item for each parameter group.
            also = (*(["array"] if key.endswith("_lr") else []), *(["null"] if key in _MAY_BE_NULL else []))
            yield ("scheduler", "params", key), ("number", *also)
