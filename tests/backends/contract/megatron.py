"""A small model under Megatron, and the cases of the contract that train it."""

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.support.attached import Case, Gradients, Run, Section, on
from tests.support.megatron import Options, start
from tests.support.methods import METHODS, WITHOUT_MOMENTUM
from tests.support.two_branches import FOUR_BITS, LOW_RANK, STOCHASTIC, WIDTH, batch


class Net(nn.Module):
    """Model with sizes that Megatron pads, and with layers that backward does not reach in the order of buckets."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last, self.middle = nn.Linear(WIDTH, 31), nn.Linear(17, 1), nn.Linear(31, 17)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class MegatronRun(Run):
    """A run of `Net`, under Megatron alone without a section. With `still`, weights stay."""

    replicated = False

    def __init__(self, options: Options, rank: int, given: Section | None, still: bool = False) -> None:
        if not dist.is_initialized():
            start()
        self.rank, self.dtype = rank, options.dtype
        if still:
            options = replace(options, optimizer={**options.optimizer, "lr": 0.0, "clip_grad": 0.0})
        [self.model], self.optimizer = options.wrap([Net().to(options.dtype)], options.config(num_layers=1))
        self.attached: Any = None
        if given is not None:
            section = {SECTION: {"monitor": {"announce": False}, **given}}
            self.attached = deepspeed_compress.megatron.attach(self.model, self.optimizer, section)

    def loss(self, step: int) -> Tensor:
        x, y = batch(self.rank, step)
        return (self.model(x.to(self.dtype)).float() - y).square().mean()

    def clear(self) -> None:
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def backward(self, step: int, factor: float = 1.0) -> float:
        """Run one micro-batch without synchronization, and one with it."""
        with self.model.no_sync():
            self.optimizer.scale_loss(self.loss(step + 100) / 2).backward()
        loss = self.loss(step) / 2 * factor
        self.optimizer.scale_loss(loss).backward()
        self.model.finish_grad_sync()
        return loss.item()

    def update(self) -> bool:
        applied: bool = self.optimizer.step()[0]
        return applied

    def weights(self) -> list[Tensor]:
        """Return the weights of all ranks, gathered if forward would gather them."""
        if self.model.ddp_config.overlap_param_gather:
            self.model.start_param_sync(force_sync=True)
        return [parameter.detach() for parameter in self.model.parameters()]

    def gradients(self) -> Gradients:
        found: Gradients = {}
        names = {parameter: name for name, parameter in self.model.module.named_parameters()}
        for group in self.model.bucket_groups:
            for bucket in group.buckets:
                share = bucket.grad_data.numel() // dist.get_world_size()
                for parameter in bucket.params_list:
                    grad = parameter.main_grad
                    begin, end = 0, grad.numel()
                    if self.model.ddp_config.use_distributed_optimizer:
                        offset = (grad.data_ptr() - bucket.grad_data.data_ptr()) // 4
                        first, last = share * dist.get_rank() - offset, share * (dist.get_rank() + 1) - offset
                        begin, end = max(begin, first), min(end, last)
                    if begin < end:
                        found[names[parameter], begin] = grad.flatten()[begin:end].clone()
        return found

    def steps(self) -> int:
        count: int = self.attached.dense.steps.count
        return count

    def save(self, directory: str) -> Any:
        self.attached.save(directory)
        return {key: value.clone() for key, value in self.model.state_dict().items()}, states(self.optimizer)

    def load(self, directory: str, kept: Any, residuals: bool) -> None:
        model, optimizers = kept
        self.model.load_state_dict(model)
        put(self.optimizer, optimizers)
        if residuals:
            self.attached.load(directory)


def states(optimizer: Any) -> list[dict[str, Any]]:
    """Return copies of the torch optimizers' states."""
    inner = [chained_optimizer.optimizer for chained_optimizer in optimizer.chained_optimizers]
    return [
        {"params": [p.detach().clone() for group in one.param_groups for p in group["params"]], "state": copied(one)}
        for one in inner
    ]


def copied(optimizer: Any) -> list[dict[str, Any]]:
    held = [p for group in optimizer.param_groups for p in group["params"]]
    return [{key: value.clone() for key, value in optimizer.state[p].items()} for p in held]


def put(optimizer: Any, saved: list[dict[str, Any]]) -> None:
    for chained_optimizer, given in zip(optimizer.chained_optimizers, saved, strict=True):
        held = [p for group in chained_optimizer.optimizer.param_groups for p in group["params"]]
        for parameter, value, state in zip(held, given["params"], given["state"], strict=True):
            parameter.data.copy_(value)
            chained_optimizer.optimizer.state[parameter] = {key: part.clone() for key, part in state.items()}


KINDS = [(distributed, overlap) for distributed in (False, True) for overlap in (False, True)]
"""Whether the optimizer is distributed, and whether messages overlap with computing."""


def options_of(kind: tuple[bool, bool], dtype: torch.dtype = torch.float32, **optimizer: Any) -> Options:
    """Return options of a kind of `KINDS`."""
    distributed, overlap = kind
    ddp = {"overlap_param_gather": overlap} if distributed else {}
    optimizer = {"overlap_param_gather": overlap and distributed, **optimizer}
    return Options(distributed, overlap, dtype, ddp=ddp, optimizer=optimizer)


@dataclass(frozen=True)
class Bucketed(Case):
    """A case under Megatron."""

    options: Options

    def run(self, rank: int, section: Section | None, still: bool = False) -> MegatronRun:
        return MegatronRun(self.options, rank, section, still)


def every(
    name: str, dtype: torch.dtype = torch.float32, optimizer: Section = MappingProxyType({}), **more: Any
) -> dict[str, Case]:
    return {f"{name} {kind}": Bucketed(options_of(kind, dtype, **optimizer), **more) for kind in KINDS}


SCALING = {"initial_loss_scale": 64.0, "min_loss_scale": 1.0, "loss_scale_window": 3, "hysteresis": 1}
SCALES = (64.0, 64.0, 32.0, 32.0, 32.0, 64.0)
NODES = {"gradients": {**FOUR_BITS["gradients"], "hierarchy": {"ranks_per_node": 2}}}
BOTH_WAYS = {**FOUR_BITS, "weights": {"method": "blockwise", "bits": 4, "block_size": 32}}
OWNED, OVERLAPPED = options_of((True, False)), options_of((True, True))
EXACT = {**every("fp32"), **every("bf16", torch.bfloat16)}
CONSERVED = {**on(2, every("")), **on(3, every(""))}
SKIPPED = every("fp16", torch.float16, SCALING, scales=SCALES)
RESUMED = {
    **every("random", section=STOCHASTIC),
    **every("int4", section=FOUR_BITS),
    **every("rank", section=LOW_RANK),
    "weights": Bucketed(options_of((True, False), torch.bfloat16), section=BOTH_WAYS),
    "weights overlapped": Bucketed(options_of((True, True), torch.bfloat16), section=BOTH_WAYS),
}
TRAINED = {
    f"{name} {kind}": Bucketed(options_of(kind, adam_beta1=0.0), section={"gradients": {"min_numel": 0, **given}})
    for name, given in {**METHODS, **WITHOUT_MOMENTUM}.items()
    for kind in ((True, True), (False, False))
    if "overrides" not in given
} | {"nodes": Bucketed(OVERLAPPED, section=NODES, ranks=4)}
OTHER_SIZES = (Bucketed(OWNED, ranks=3), Bucketed(OWNED))
