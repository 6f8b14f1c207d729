"""Backend for PyTorch's `DistributedDataParallel`: a communication hook replaces the all-reduce of its buckets.

The seam is `register_comm_hook` (torch/nn/parallel/distributed.py). A hook receives a bucket as soon as its gradients
are complete, and returns a future of their mean. The reducer (torch/csrc/distributed/c10d/reducer.cpp) waits for the
futures at the end of backward. Gradients are therefore encoded and sent as soon as they are complete, and all are
finished with the last bucket. Which gradients are sent together is up to this package (`plan`).
"""

from collections.abc import Iterator, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn import Parameter
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from deepspeed_compress.backends.announce import announce, gradient_texts
from deepspeed_compress.backends.ddp.batches import Batch, Plan, Unused
from deepspeed_compress.backends.groups import find_place_in
from deepspeed_compress.backends.limits import check_reduced_once, find_common_limits, find_foreign_optimizer, refuse
from deepspeed_compress.backends.sessions import Attached, Config, Target, attach_session, describe, read_section
from deepspeed_compress.backends.steps import forget_if_cleared, forget_when_cleared, unwrap
from deepspeed_compress.collectives.buckets import even_partition
from deepspeed_compress.collectives.payload import PendingMeans
from deepspeed_compress.compression.compressors.base import DTYPES
from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.config.schedules import OWN_MOMENTUM
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.monitor import ring_all_reduce
from deepspeed_compress.session.patches import leave_out_of_copies


def attach(
    model: DistributedDataParallel, config: Config, optimizer: Optimizer, scaler: GradScaler | None = None
) -> Attached:
    """Compress the gradients of `model`. Call it once, on all ranks of its process group, before the first backward.

    Args:
        model: torch's DDP module, with one process group and one device.
        config: a path or a dict, with the section `deepspeed_compress`.
        optimizer: the optimizer of the parameters of `model`, or a wrapper of it such as Accelerate's. Its steps also
            end the steps of compression.
        scaler: the `GradScaler` of the loss, if there is one.

    Returns:
        A handle that saves and loads the state of compression and reports on it.

    Raises:
        ConfigError: the section is missing or wrong.
        UnsupportedError: this model cannot be compressed correctly, or not with this section.

    Examples:
        >>> model = DistributedDataParallel(network)
        >>> compression = deepspeed_compress.ddp.attach(model, "ds_config.json", optimizer)
        >>> compression.save("checkpoint/step_100")
    """
    if not isinstance(model, DistributedDataParallel):
        remedy = "wrap the model in it, or call fsdp2.attach for a model of fully_shard"
        raise UnsupportedError(f"expected a DistributedDataParallel, got {type(model).__name__}; {remedy}")
    section, document = read_section(config)
    optimizer = unwrap(optimizer)
    target = Target(_trained(model), model.process_group)
    if not target.parameters:
        refuse(model, ["no parameter of it is trained"])
    refuse(model, [*find_common_limits(section, optimizer, target.device), *_limits(model, section, target, optimizer)])
    described = describe(section, document, target.group, target.described(), target.device)
    attached = attach_session(described, find_place_in(target.group, section), optimizer, scaler)
    with attached.session.patches.undone_on_failure():
        announce(attached.session, target.group, "DDP", partial(_figures, attached, target))
        _exchange(model, attached, target)
    leave_out_of_copies(model)
    return attached


def _exchange(model: DistributedDataParallel, attached: Attached, target: Target) -> None:
    """Install the hooks on `model` that the section requires. If this raises, nothing is left on the model."""
    patches = attached.session.patches
    if attached.session.config.gradients.method == "none":
        patches.on_undo(model.register_forward_pre_hook(partial(_count, attached, target)).remove)
        return
    unused = Unused(attached.session, target) if model.find_unused_parameters and not model.static_graph else None
    buckets = _Buckets(attached, Plan(target, model.bucket_bytes_cap), unused)
    before_forward = partial(_before_forward, attached, tuple(target.parameters.values()))
    patches.on_undo(model.register_forward_pre_hook(before_forward).remove)
    forget_when_cleared(model, attached.steps, patches)
    # Last, because DDP cannot unregister it.
    model.register_comm_hook(None, buckets.reduce)


def _trained(model: DistributedDataParallel) -> dict[str, Parameter]:
    """Return the parameters whose gradients `model` reduces: those that were trained when it was made.

    torch cannot list those of a model with sparse gradients. It is refused, unless only its bytes are counted.
    """
    every = dict(model.module.named_parameters())
    if any(map(_sparse, model.modules())):
        return {name: parameter for name, parameter in every.items() if parameter.requires_grad}
    buckets = model.reducer._get_zeros_like_grad_buckets()
    reduced = {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
    return {name: parameter for name, parameter in every.items() if id(parameter) in reduced}


def _limits(
    model: DistributedDataParallel, section: CompressConfig, target: Target, optimizer: Optimizer
) -> Iterator[str]:
    """Yield what is wrong with this model, or with the section for it."""
    if section.weights.method != "none":
        what = f'"{section.weights.method}" has no effect, because DDP sends no weights (allowed: "none")'
        yield f'/{SECTION}/weights/method: {what}. Write "method": "none", or remove weights'
    yield from find_foreign_optimizer(optimizer, target.parameters.values())
    if section.gradients.method == "none":
        return
    if model._comm_hooks:
        yield "it already has a communication hook, from its own mixed precision or from other code; remove that hook"
    if model._delay_all_reduce_params or vars(model).get("skip_all_reduce_unused_params"):
        yield "it leaves parameters out of its buckets (delay_all_reduce_named_params, skip_all_reduce_unused_params)"
    others = {str(parameter.dtype) for parameter in target.parameters.values()} - set(map(str, DTYPES.values()))
    if others:
        allowed = ", ".join(map(str, DTYPES.values()))
        yield f"it has gradients in {', '.join(sorted(others))} (allowed: {allowed}); write model.float()"
    if any(_sparse(module) for module in model.modules()):
        yield "it has embeddings with sparse gradients; make them with sparse=False"
    if model.find_unused_parameters and not model.static_graph:
        yield from _limits_of_unused(section)


def _limits_of_unused(section: CompressConfig) -> Iterator[str]:
    """Yield what is wrong with the section if parameters may be unused.

    DDP drops the mean of a parameter that no rank has used, so it must be possible to put it back into the residuals.
    """
    gradients = section.gradients
    without = "make the model without find_unused_parameters, or with static_graph=True"
    if gradients.method in OWN_MOMENTUM | {"powersgd"}:
        what = f'"{gradients.method}" with unused parameters (allowed: any method but dgc, demo and powersgd)'
        yield f"/{SECTION}/gradients/method: {what}; {without}"
    if getattr(gradients, "hierarchy", None) is not None:
        yield f"/{SECTION}/gradients/hierarchy: with unused parameters (allowed: no hierarchy); {without}"


def _sparse(module: nn.Module) -> bool:
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def _figures(attached: Attached, target: Target) -> list[str]:
    """Return texts about one reduction per step."""
    if attached.session.config.gradients.method == "none":
        return []
    parameters, ranks = target.described(), target.group.size()
    partition = even_partition([(name, parameters.numel(name)) for name in parameters.shapes], ranks)
    alone = ring_all_reduce(sum(parameter.nbytes for parameter in target.parameters.values()), ranks)
    return gradient_texts(attached.session, parameters, [partition], True, alone)


def _count(attached: Attached, target: Target, model: DistributedDataParallel, inputs: object) -> None:
    """Count the bytes of method "none", with which DDP sends all gradients for each synchronized forward pass."""
    if torch.is_grad_enabled() and model.require_backward_grad_sync:
        size = sum(parameter.nbytes for parameter in target.parameters.values())
        attached.session.meter.count_engine_reduction(ring_all_reduce(size, target.group.size()))


def _before_forward(
    attached: Attached, parameters: Sequence[Parameter], model: DistributedDataParallel, inputs: object
) -> None:
    if model._join_config.enable:
        # Ranks that have run out of data would take part in reductions, but not in steps.
        raise UnsupportedError("join() cannot be combined with compression: give all ranks the same number of steps")
    forget_if_cleared(attached.steps, parameters)


class _Buckets:
    """The hook that reduces the gradients of one model.

    It must not hold the model, because the model's C++ reducer, which garbage collection cannot traverse, holds the
    hook.
    """

    def __init__(self, attached: Attached, plan: Plan, unused: Unused | None) -> None:
        self._session, self._steps = attached.session, attached.steps
        self._plan = plan
        self._unused = unused
        self._open: dict[int, Batch] = {}
        self._arrived: set[int] = set()
        self._sent: list[tuple[Batch, PendingMeans | None]] = []
        self._means: list[tuple[Tensor, torch.futures.Future[Tensor]]] = []

    # DDP checks the annotations.
    def reduce(
        self,
        state: object,
        bucket: dist.GradBucket,  # type: ignore[name-defined]
    ) -> torch.futures.Future[torch.Tensor]:
        """Reduce the bucket to the mean over all ranks. This is the communication hook.

        A pass ends with its last parameter, and one that failed ends where a parameter comes again. The numbers of
        buckets do not tell: with a static graph, DDP gives all buckets of its first pass the number 0.
        """
        parameters, buffer = bucket.parameters(), bucket.buffer()
        if not self._arrived or not self._arrived.isdisjoint(map(id, parameters)):
            self._begin()
        self._arrived.update(map(id, parameters))
        for parameter, gradient in zip(parameters, bucket.gradients(), strict=True):
            self._add(parameter, gradient)
        # A future with devices also waits for pending work of their streams.
        mean = torch.futures.Future[Tensor](devices=[buffer.device] if buffer.is_cuda else None)
        self._means.append((buffer, mean))
        if len(self._arrived) == len(self._plan.places):
            self._finish()
        return mean

    def _begin(self) -> None:
        """Prepare for the first bucket of a backward pass."""
        remedy = "run all backward passes except the last in no_sync()"
        check_reduced_once(self._steps.reduced, self._session.config, remedy)
        self._steps.gradients_reduced()
        self._clear()

    def _add(self, parameter: Parameter, gradient: Tensor) -> None:
        number, position = self._plan.places[id(parameter)]
        if number not in self._open:
            partition = self._plan.batches[number]
            flat = gradient.new_empty(partition.numel)
            self._open[number] = Batch(partition, flat, missing=partition.numel)
        self._open[number].add(position, gradient)
        # Send in the order of the plan, on which random numbers depend.
        while len(self._sent) in self._open and not self._open[len(self._sent)].missing:
            self._send(self._open.pop(len(self._sent)))

    def _send(self, batch: Batch) -> None:
        self._session.meter.count("bytes_uncompressed", ring_all_reduce(batch.flat.nbytes, self._plan.ranks))
        pending = self._session.gradients.start_everywhere(batch.flat, batch.partition, 1.0 / self._plan.ranks)
        self._sent.append((batch, pending))

    def _finish(self) -> None:
        """Finish all reductions. All means are sent back before the first of them is waited for."""
        for _, pending in self._sent:
            if pending is not None:
                pending.send_back()
        for batch, pending in self._sent:
            if pending is not None:
                pending.finish(batch.flat)
        if self._unused is not None:
            self._unused.take_back([batch for batch, _ in self._sent])
        for batch, _ in self._sent:
            batch.hand_back()
        for buffer, mean in self._means:
            mean.set_result(buffer)
        self._clear()

    def _clear(self) -> None:
        """Forget the last backward pass."""
        for one in (self._arrived, self._open, self._sent, self._means):
            one.clear()
