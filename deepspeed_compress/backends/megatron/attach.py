"""Compression of the model chunks of a rank: the gradients of its data-parallel group and those of its experts.

The state of compression may be stored inside Megatron's checkpoints (`megatron.core.dist_checkpointing`). Their state
dicts hold tensors, which may be resharded for another number of ranks, and objects, which may not. Residuals add up
over ranks and are not parts of one tensor. The files of a rank, as `save` writes them, are therefore stored as such an
object, and `load` reads them. Both use a temporary directory.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from deepspeed_compress.backends import sessions
from deepspeed_compress.backends.groups import find_place_among, make_group
from deepspeed_compress.backends.limits import refuse
from deepspeed_compress.backends.megatron.activations import attach_activations, measure_activations
from deepspeed_compress.backends.megatron.buckets import Share, name_parameters
from deepspeed_compress.backends.megatron.gradients import Gradients, count_gradients
from deepspeed_compress.backends.megatron.limits import check_version, find_limits
from deepspeed_compress.backends.megatron.weights import Weights, has_masters
from deepspeed_compress.backends.sessions import Config, describe, make_session, read_section
from deepspeed_compress.backends.steps import StepFollower
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import CompressConfig, CompressedWeights
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.residual_state import FinishedStep
from deepspeed_compress.session.session import ExactWeights, Session
from deepspeed_compress.session.state_files import NOT_SAVED, Place, result_on_all

EXPERTS = "experts"
"""Subdirectory for everything that concerns only experts."""


@dataclass(frozen=True)
class Attached:
    """Compression of the model chunks of this rank, for as long as they live.

    Attributes:
        dense: handle for all parameters except those of experts.
        experts: handle for experts, which have a separate data-parallel group; None on ranks without any.
        any_experts: True if any rank has experts.
        weights: weights that are sent as differences.
    """

    dense: sessions.Attached
    experts: sessions.Attached | None
    any_experts: bool
    weights: Sequence[Weights] = ()

    @property
    def session(self) -> Session:
        """Return the session of `dense`; that of experts is `experts.session`.

        It holds the settings in force and reports on them (`subscribe`, `settings`, `events`).
        """
        return self.dense.session

    def synchronise(self) -> None:
        """Make the weights exact on all ranks, as before an export. All ranks must call this."""
        for part in (self.dense, self.experts):
            if part is not None:
                part.session.synchronise()

    def detach(self) -> None:
        """Leave Megatron as it was before `attach`. All ranks must call this, between steps.

        Compressed weights are made exact first. Residuals are dropped.

        Raises:
            SeamError: other code has wrapped a method since; nothing is restored then.
        """
        self.synchronise()
        self.session.patches.undo()

    def save(self, directory: str | Path) -> None:
        """Write the state of compression into `directory`, two files per rank, and two more for its experts.

        All ranks of the job must call this, between steps.

        Raises:
            StateError: on all ranks, if one of them cannot write.
        """
        self.dense.save(directory)
        if self.experts is not None:
            self.experts.save(Path(directory) / EXPERTS)
        elif self.any_experts:
            result_on_all(lambda: None, problem=NOT_SAVED)

    def load(self, directory: str | Path) -> None:
        """Resume from the files that `save` wrote.

        All ranks of the job must call this before a step, after Megatron's checkpoint has been loaded. Errors are
        handled on all ranks according to `on_missing_state`.
        """
        for weight in self.weights:
            weight.forget()
        self.dense.load(directory)
        if self.experts is not None:
            self.experts.load(Path(directory) / EXPERTS)
        elif self.any_experts:
            try:
                result_on_all(lambda: None)
            except StateError:
                if self.session.config.on_missing_state == "error":
                    raise


def attach(ddp_modules: Any, optimizer: Any, config: Config) -> Attached:
    """Compress the gradients of Megatron's model chunks.

    All ranks of the job must call this once, before the first backward.

    Args:
        ddp_modules: a `megatron.core.distributed.DistributedDataParallel`, or a list of the model chunks of this rank.
        optimizer: result of `get_megatron_optimizer` for all of them. Its `step` also ends the step of compression.
        config: a path or a dict, with the section `deepspeed_compress`.

    Returns:
        A handle that saves and loads the state of compression and reports on it.

    Raises:
        ConfigError: the section is missing or wrong.
        SeamError: this version of Megatron is not supported.
        UnsupportedError: these modules cannot be compressed correctly, or not with this section.

    Examples:
        >>> compression = deepspeed_compress.megatron.attach(model, optimizer, "ds_config.json")
        >>> compression.save("checkpoints/iter_0000100")
    """
    section, document = read_section(config)
    chunks = list(ddp_modules) if isinstance(ddp_modules, list | tuple) else [ddp_modules]
    # Pipeline stages differ, and no rank may wait for one that has stopped.
    problems = gather_objects(list(find_limits(chunks, optimizer, section)))
    refuse(chunks[0] if chunks else None, dict.fromkeys(chain.from_iterable(problems)))
    check_version(chunks, section)
    names = {parameter: name for name, parameter in name_parameters(chunks).items()}
    patches = Patches()
    with patches.undone_on_failure():
        return _attach(chunks, optimizer, names, section, document, patches)


def _attach(
    chunks: Sequence[Any],
    optimizer: Any,
    names: Mapping[Parameter, str],
    section: CompressConfig,
    document: Mapping[str, Any],
    patches: Patches,
) -> Attached:
    """Attach all parts: weights, activations, steps, and gradients, in this order."""
    make = partial(_attach_share, section=section, document=document, patches=patches)
    dense, experts = (make(Share(chunks, names, experts)) for experts in (False, True))
    assert dense is not None, "all ranks reduce parameters that are no experts'"
    present = [one for one in (dense, experts) if one is not None]
    weights = [one.weights for one in present if one.weights is not None]
    before, after = [one.before_step for one in weights], [one.after_step for one in weights]
    if section.activations is not None:
        before += attach_activations(chunks, section.activations, dense.session.run, patches)
    after += [one.count_plain_weights for one in present]
    steps = _Steps([one.session for one in present], optimizer, chunks, before, after)
    for one in present:
        one.follow(steps)
    steps.begin(0)
    if section.activations is not None:
        measure_activations(chunks, section.activations, dense.session)
    return Attached(
        sessions.Attached(dense.session, steps, dense.place),
        None if experts is None else sessions.Attached(experts.session, steps, experts.place),
        any(gather_objects(experts is not None)),
        weights,
    )


@dataclass(frozen=True)
class _AttachedShare:
    """A share of the parameters with its session and its place in checkpoints.

    `weights` sends those of its weights that are sent as differences, and Megatron gathers all others.
    """

    share: Share
    session: Session
    place: Place
    weights: Weights | None

    def follow(self, steps: StepFollower) -> None:
        """Let Megatron's bucket groups reduce through the session from now on."""
        if self.session.config.gradients.method == "none":
            count_gradients(self.session, self.share.groups, self.share.group)
        else:
            Gradients(self.session, steps, self.share.groups, self.share.group)

    @cached_property
    def _plain_bytes(self) -> int:
        plain = [source for source in self.share.sources if self.weights is None or not has_masters(source)]
        return self.share.weight_bytes(plain)

    def count_plain_weights(self, applied: bool) -> None:
        """Count the bytes that a rank sends for the weights that Megatron gathers itself."""
        if applied:
            self.session.meter.count("bytes_weights", self._plain_bytes)


def _attach_share(
    share: Share, section: CompressConfig, document: Mapping[str, Any], patches: Patches
) -> _AttachedShare | None:
    """Return a share with its session, or None if there is nothing to reduce. All ranks of the job must call this."""
    position, parameters = find_place_among(share.whole, section), share.described()
    if position is None or share.whole is None:
        return None
    if share.experts and section.monitor.path is not None:
        monitor = section.monitor.model_copy(update={"path": str(Path(section.monitor.path) / EXPERTS)})
        section = section.model_copy(update={"monitor": monitor})
    rank = dist.get_rank()
    described = describe(section, document, share.whole, parameters, share.device, writes=rank == 0)
    session = make_session(described, patches)
    return _AttachedShare(share, session, Place(rank, position, share.device), _send_differences(share, session))


def _send_differences(share: Share, session: Session) -> Weights | None:
    """Send the weights of a share that have fp32 master weights as differences, if configured; else return None."""
    if not isinstance(session.config.weights, CompressedWeights):
        return None
    whole = make_group(dist.get_process_group_ranks(share.group))
    reduction = WeightReduction(session.config.weights, session.parameters, session.run)
    with_masters = [source for source in share.sources if has_masters(source)]
    weights = Weights(session, with_masters, share.names, partial(reduction.difference_gather, whole))
    session.send_weights(ExactWeights(lambda: session.clock.step, weights.synchronise, session.meter))
    return weights


class _Steps(StepFollower):
    """Reports to `sessions` how every step of `optimizer` ended.

    The functions `before` are called before each of its steps, and `after`, with True if the step was applied.
    If gradients were reduced and then cleared (`zero_grad_buffer` of one of the `chunks`) before the optimizer stepped,
    as when Megatron repeats an iteration to check its result, the reductions are discarded.
    """

    def __init__(
        self,
        sessions: Sequence[Session],
        optimizer: Any,
        chunks: Sequence[Any],
        before: Sequence[Callable[[], None]],
        after: Sequence[Callable[[bool], None]],
    ) -> None:
        self._sessions, self._optimizer = sessions, optimizer
        self._before, self._after = before, after
        patches = sessions[0].patches
        patches.wrap(optimizer, "step", self._step)
        for chunk in chunks:
            patches.wrap(chunk, "zero_grad_buffer", self._zero_grad_buffer)

    @property
    def loss_scale(self) -> float:
        """Return the loss scale of the optimizer's scaler, or 1.0 without one.

        With a scaler, this waits for the GPU, as every such step of Megatron does.
        """
        parts = getattr(self._optimizer, "chained_optimizers", [self._optimizer])
        is_scaled = any(getattr(part, "grad_scaler", None) is not None for part in parts)
        return float(self._optimizer.get_loss_scale()) if is_scaled else 1.0

    def begin(self, step: int) -> None:
        self.count, self.reduced = step, False
        for session in self._sessions:
            session.begin(step, self.loss_scale)

    def forget(self) -> None:
        if self.reduced:
            self._end(False, None, self._sessions[0].clock.loss_scale)

    def _step(self, step: Callable[..., Any], *args: Any, **options: Any) -> Any:
        for prepare in self._before:
            prepare()
        result = step(*args, **options)
        applied, norm = bool(result[0]), result[1]
        for note in self._after:
            note(applied)
        self._end(applied, norm if applied else math.inf, self.loss_scale)
        return result

    def _zero_grad_buffer(self, zero_grad_buffer: Callable[..., None], *args: Any, **options: Any) -> None:
        zero_grad_buffer(*args, **options)
        self.forget()

    def _end(self, applied: bool, norm: Any, scale_after: float) -> None:
        self.count, self.reduced = self.count + 1, False
        for session in self._sessions:
            before = session.clock.loss_scale
            # The number of samples is unknown. Megatron returns 0 if it computes no norm.
            session.finish(FinishedStep(self.count, None, applied, before, scale_after, float(norm) if norm else None))
