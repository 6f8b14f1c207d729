"""Programs that train under FSDP2, and the cases of the contract that use them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from tests.backends.contract import branches
from tests.backends.contract.branches import Branching, resumed, skipped, trained
from tests.support.attached import on
from tests.support.methods import WITHOUT_MOMENTUM
from tests.support.sharded import Setting
from tests.support.two_branches import FOUR_BITS, STOCHASTIC, Branches, look_first, loss_of, plain

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=True)
BF16_BOTH = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, cast_forward_inputs=True)
HSDP = (2, 2)


def tie(model: Branches) -> None:
    model.right.weight = model.left.weight


def freeze(model: Branches) -> None:
    model.left.requires_grad_(False)


def recompute(model: Branches) -> None:
    model.left, model.right = (checkpoint_wrapper(one) for one in (model.left, model.right))


# The programs: each makes the gradients of one optimizer step.
def accumulating(model: Any, rank: int, step: int) -> None:
    for micro, last in ((step, False), (step + 100, True)):
        model.set_requires_gradient_sync(last)
        loss_of(model, rank, micro).backward()


def reducing_twice(model: Any, rank: int, step: int) -> None:
    for micro, last in ((step, False), (step + 100, True)):
        model.set_is_last_backward(last)
        loss_of(model, rank, micro).backward()


def freezing_between(model: Any, rank: int, step: int) -> None:
    """Freeze a unit after it has accumulated gradients, which FSDP2 reduces all the same."""
    model.left.requires_grad_(True)
    for micro, last in ((step, False), (step + 100, True)):
        model.set_requires_gradient_sync(last)
        loss_of(model, rank, micro).backward()
        model.left.requires_grad_(False)


def clipping(model: Any, rank: int, step: int) -> None:
    plain(model, rank, step)
    nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def two_forwards(model: Any, rank: int, step: int) -> None:
    (loss_of(model, rank, step) + loss_of(model, rank, step + 100)).backward()


def two_backwards(model: Any, rank: int, step: int) -> None:
    losses = [loss_of(model, rank, micro) for micro in (step, step + 100)]
    for loss in losses:
        loss.backward()


def one_way(model: Any, rank: int, step: int) -> None:
    loss_of(model, rank, step, ("left", "right")[step % 2]).backward()


def each_its_way(model: Any, rank: int, step: int) -> None:
    model.set_reduce_scatter_unused_params(True)
    loss_of(model, rank, step, ("left", "right")[(step + rank) % 2]).backward()


def evaluating_between(model: Any, rank: int, step: int) -> None:
    model.eval()
    with torch.no_grad():
        loss_of(model, rank, step + 50)
    model.train()
    plain(model, rank, step)


def with_factor(model: Any, rank: int, step: int) -> None:
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            module.set_gradient_divide_factor(dist.get_world_size() / 2)
            module.set_force_sum_reduction_for_comms(True)
    plain(model, rank, step)


ALL = Setting(units=())
TOGETHER = Setting(units=("left right",))
KEPT, HALF = Setting(options={"reshard_after_forward": False}), Setting(options={"reshard_after_forward": 2})


def clear(model: Any, optimizer: Any, rank: int, step: int) -> None:
    """Clear gradients as a module does, which is noticed in the next forward pass."""
    model.zero_grad()
    loss_of(model, rank, step)


PROGRAMS: Mapping[str, Branching] = {
    "plain": Branching(Setting(), plain),
    "one unit": Branching(ALL, plain),
    "accumulating": Branching(Setting(), accumulating),
    "reducing twice": Branching(Setting(), reducing_twice),
    "freezing between": Branching(Setting(), freezing_between),
    "clipping": Branching(Setting(), clipping),
    "two forwards": Branching(KEPT, two_forwards),
    "two backwards": Branching(KEPT, two_backwards),
    "one way": Branching(Setting(), one_way),
    "one way of a unit": Branching(ALL, one_way),
    "each its way": Branching(ALL, each_its_way),
    "looking first": Branching(Setting(), look_first),
    "evaluating between": Branching(Setting(), evaluating_between),
    "factor": Branching(Setting(), with_factor, shares=(2.0, 0.5)),
    "tied": Branching(replace(TOGETHER, prepare=tie), plain),
    "frozen": Branching(Setting(prepare=freeze), plain),
    "checkpointed": Branching(Setting(prepare=recompute), plain),
    "kept": Branching(KEPT, plain),
    "offloaded": Branching(Setting(options={"offload_policy": CPUOffloadPolicy(pin_memory=False)}), plain),
}
OF_FOUR: Mapping[str, Branching] = {
    "half": Branching(HALF, plain),
    "copies": Branching(Setting(mesh=HSDP), plain, shares=(2.0, 1.0)),
    "copies accumulating": Branching(Setting(mesh=HSDP), accumulating, shares=(2.0, 1.0)),
    "copies reducing twice": Branching(Setting(mesh=HSDP), reducing_twice, shares=(2.0, 1.0)),
    "copies of one unit": Branching(replace(ALL, mesh=HSDP), one_way, shares=(2.0, 1.0)),
    "copies kept": Branching(replace(KEPT, mesh=HSDP), two_backwards, shares=(2.0, 1.0)),
    "copies with a factor": Branching(Setting(mesh=HSDP), with_factor, shares=(4.0, 0.5)),
}
MIXED: Mapping[str, Branching] = {
    "bf16": Branching(Setting(options={"mp_policy": BF16}), plain),
    "bf16 accumulating": Branching(Setting(options={"mp_policy": BF16}), accumulating),
    "bf16 reduced": Branching(Setting(options={"mp_policy": BF16_BOTH}), plain),
}
WITH_MOMENTUM = {
    name: replace(case, setting=replace(case.setting, momentum=0.9))
    for name, case in {**PROGRAMS, **OF_FOUR, **MIXED}.items()
}
EXACT = {
    **on(3, WITH_MOMENTUM, "plain", "accumulating", "freezing between", "one way of a unit", "tied"),
    **on(2, WITH_MOMENTUM, *MIXED),
    **on(4, WITH_MOMENTUM, "copies", "copies accumulating"),
}
CONSERVING = [name for name in PROGRAMS if name != "clipping"]
CONSERVED = {**on(2, PROGRAMS, *CONSERVING), **on(3, PROGRAMS, *CONSERVING), **on(4, OF_FOUR)}
SKIPPED = {**on(2, skipped(Setting(), clear)), **on(4, skipped(Setting(mesh=HSDP), clear))}
BOTH = {**FOUR_BITS, "weights": {"bits": 8, "block_size": 32}}
RESUMED = {
    **resumed(Setting()),
    "bf16": Branching(Setting(options={"mp_policy": BF16_BOTH}), section=STOCHASTIC),
    "copies": Branching(Setting(mesh=HSDP), section=BOTH, ranks=4),
}
METHODS = {**branches.METHODS, "clipped": {**WITHOUT_MOMENTUM["dgc"], "clip_norm": 1.0}}
MOST = ("int4_stochastic", "sign", "topk_int4", "randomk", "int8_memory", "dgc", "overrides", "clipped")
"""One method of each kind of message and residual; every method is trained without copies."""
INSIDE = {"gradients": {"min_numel": 0, "bits": 4, "hierarchy": {"ranks_per_node": 2, "inside": {"bits": 8}}}}
TRAINED = {
    **on(2, trained(Setting(), METHODS)),
    **on(4, trained(Setting(mesh=HSDP), {name: METHODS[name] for name in MOST})),
    "two levels": Branching(Setting(), section=INSIDE, ranks=4),
    "two levels of copies": Branching(Setting(mesh=HSDP), section=INSIDE, ranks=4),
}
OTHER_SIZES = (replace(PROGRAMS["plain"], ranks=4), Branching(TOGETHER))
