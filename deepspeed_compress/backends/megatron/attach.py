"""Compression of the model chunks of a rank: the gradients of its data-parallel group and those of its experts.

The state of compression may be stored inside Megatron's checkpoints (`megatron.core.dist_checkpointing`). Their state
dicts hold tensors, which may be resharded for another number of ranks, and objects, which may not. Residuals add up
over ranks and are not parts of one tensor. The files of a rank, as `save` writes them, are therefore stored as such an
object, and `load` reads them. Both use a temporary directory.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.nn import Parameter

from deepspeed_compress.backends import sessions
from deepspeed_compress.backends.groups import find_place_among, make_group
from deepspeed_compress.backends.limits import refuse
from deepspeed_compress.backends.megatron.activations.attach import attach_activations, measure_activations
from deepspeed_compress.backends.megatron.buckets import Share, name_parameters
from deepspeed_compress.backends.megatron.gradients import Gradients, count_gradients
from deepspeed_compress.backends.megatron.limits import check_version, find_limits
from deepspeed_compress.backends.megatron.steps import MegatronSteps, StepHook
from deepspeed_compress.backends.megatron.weights import PlainWeights, Weights, has_masters
from deepspeed_compress.backends.sessions import Config, describe, make_session, read_section
from deepspeed_compress.collectives.objects import gather_objects
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.config import CompressConfig, CompressedWeights
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.patches import Patches
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
            result_on_all(_nothing, problem=NOT_SAVED)

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
                result_on_all(_nothing)
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
    refuse(chunks[0] if chunks else None, _of_all(find_limits(chunks, optimizer, section)))
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
    hooks: list[StepHook] = [hook for one in present for hook in one.weights]
    if section.activations is not None:
        hooks += attach_activations(chunks, section.activations, dense.session.run, patches)
    steps = MegatronSteps([one.session for one in present], optimizer, chunks, hooks)
    for one in present:
        one.follow(steps)
    steps.begin(0)
    if section.activations is not None:
        measure_activations(chunks, section.activations, dense.session)
    return Attached(
        dense.attached(steps),
        None if experts is None else experts.attached(steps),
        any_experts=any(gather_objects(experts is not None)),
        weights=[weights for one in present for weights in one.compressed],
    )


@dataclass(frozen=True)
class _AttachedShare:
    """A share of the parameters with its session, the senders of its weights, and its place in checkpoints."""

    share: Share
    session: Session
    weights: Sequence[PlainWeights | Weights]
    place: Place

    def follow(self, steps: MegatronSteps) -> None:
        """Let Megatron's bucket groups reduce through the session from now on."""
        if self.session.config.gradients.method == "none":
            count_gradients(self.session, self.share.groups, self.share.group)
        else:
            Gradients(self.session, steps, self.share.groups, self.share.group)

    @property
    def compressed(self) -> list[Weights]:
        return [weight for weight in self.weights if isinstance(weight, Weights)]

    def attached(self, steps: MegatronSteps) -> sessions.Attached:
        return sessions.Attached(self.session, steps, self.place)


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
    weights = list(_weights(share, session))
    for weight in weights:
        if isinstance(weight, Weights):
            session.send_weights(ExactWeights(lambda: session.clock.step, weight.synchronise, session.meter))
    return _AttachedShare(share, session, weights, Place(rank, position, share.device))


def _weights(share: Share, session: Session) -> Iterator[PlainWeights | Weights]:
    """Yield the senders of a share's weights. Those with fp32 master weights are sent as differences if configured."""
    settings, run = session.config.weights, session.run
    if not isinstance(settings, CompressedWeights):
        yield PlainWeights(run.meter, share.weight_bytes(share.sources))
        return
    whole = make_group(dist.get_process_group_ranks(share.group))
    gather = partial(WeightReduction(settings, session.parameters, run).difference_gather, whole)
    with_masters = [source for source in share.sources if has_masters(source)]
    yield Weights(session, with_masters, share.names, gather)
    yield PlainWeights(run.meter, share.weight_bytes([one for one in share.sources if not has_masters(one)]))


def _of_all(problems: Iterable[str]) -> list[str]:
    """Return the problems of all ranks. Pipeline stages differ, and no rank may wait for one that has stopped."""
    found = gather_objects(list(problems))
    return list(dict.fromkeys(problem for each in found for problem in each))


def _nothing() -> None:
    """Stand in for saving and loading on a rank without experts."""
