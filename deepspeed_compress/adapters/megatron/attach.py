"""Compression of the model chunks of a rank: the gradients of its data-parallel group, and those of its experts."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from deepspeed_compress.adapters import sessions
from deepspeed_compress.adapters.groups import find_place_among, make_group
from deepspeed_compress.adapters.limits import refuse
from deepspeed_compress.adapters.megatron.buckets import name_parameters
from deepspeed_compress.adapters.megatron.checkpoints import load_files, request_files, saved_files
from deepspeed_compress.adapters.megatron.gradients import Gradients, count_gradients
from deepspeed_compress.adapters.megatron.limits import check_version, find_limits
from deepspeed_compress.adapters.megatron.shares import Share
from deepspeed_compress.adapters.megatron.steps import MegatronSteps
from deepspeed_compress.adapters.megatron.weights import PlainWeights, Weights, has_masters
from deepspeed_compress.adapters.sessions import Config, Exchanged, make_session, read_section
from deepspeed_compress.communication.reducer import Run
from deepspeed_compress.communication.reduction import Parameters, WeightReduction
from deepspeed_compress.config import CompressConfig, CompressedWeights
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.exact import ExactWeights
from deepspeed_compress.session.memories import Place, on_all_ranks, save_on_all
from deepspeed_compress.session.session import Session

__all__ = ["Attached", "attach"]

EXPERTS = "experts"
"""Directory, in that of everything else, of what concerns experts alone."""


@dataclass(frozen=True)
class Attached:
    """Compression of the model chunks of this rank, for as long as they live.

    `dense`: of all parameters but experts'. `experts`: of those, which have a data-parallel group of their own; None on
    ranks without any. `any_experts`: whether another rank has some. `weights`: those that are sent in differences.
    """

    dense: sessions.Attached
    experts: sessions.Attached | None
    any_experts: bool
    weights: Sequence[Weights] = ()

    @property
    def session(self) -> Session:
        """What is in force, and tells of it (`subscribe`, `settings`, `events`); experts' is `experts.session`."""
        return self.dense.session

    def synchronise(self) -> None:
        """Make the weights on all ranks exact, as before they are exported. All ranks must call it."""
        for part in (self.dense, self.experts):
            if part is not None:
                part.session.synchronise()

    def save(self, directory: str | Path) -> None:
        """Write what is remembered into `directory`, two files a rank, and two for its experts. All ranks of the job
        must call it, between steps. StateError on all of them if one cannot write."""
        self.dense.save(directory)
        if self.experts is not None:
            self.experts.save(Path(directory) / EXPERTS)
        elif self.any_experts:
            save_on_all(_nothing)

    def load(self, directory: str | Path) -> None:
        """Go on from what `save` has written. All ranks of the job must call it, before a step, and after Megatron's
        own checkpoint has been loaded. What is wrong is told as `on_missing_state` says, on all ranks."""
        for one in self.weights:
            one.forget()
        self.dense.load(directory)
        if self.experts is not None:
            self.experts.load(Path(directory) / EXPERTS)
        elif self.any_experts:
            problem = on_all_ranks(_nothing)
            if problem and self.session.config.on_missing_state == "error":
                raise StateError(problem)

    def sharded_state_dict(self, checkpoint: str | Path | None = None) -> dict[str, Any]:
        """What is remembered, for Megatron's own checkpoints. All ranks of the job must call it, between steps.

        Args:
            checkpoint: None to save; else the directory from which the state dict will be loaded.

        Returns:
            An entry of the state dict that `megatron.core.dist_checkpointing.save` or `load` gets. Bytes are copied, so
            training may go on while Megatron writes. Nothing where `checkpoint` was written without this package.

        Raises:
            StateError: on all ranks, where one cannot say what it remembers.

        Examples:
            >>> dist_checkpointing.save({**state_dict, **compression.sharded_state_dict()}, directory)
            >>> request = {**state_dict, **compression.sharded_state_dict(directory)}
            >>> compression.load_state_dict(dist_checkpointing.load(request, directory))
        """
        return saved_files(self.save) if checkpoint is None else request_files(Path(checkpoint))

    def load_state_dict(self, loaded: Mapping[str, Any]) -> None:
        """Go on from a state dict that Megatron has loaded, of which `sharded_state_dict` was a part. Otherwise as
        `load`."""
        load_files(loaded, self.load)


def attach(ddp_modules: Any, optimizer: Any, config: Config) -> Attached:
    """Compress the gradients of Megatron's model chunks. All ranks of the job call it, once, before the first backward.

    Args:
        ddp_modules: `megatron.core.distributed.DistributedDataParallel`, or a list of the model chunks of this rank.
        optimizer: of `get_megatron_optimizer`, for all of them. Its `step` ends the step of the compression too.
        config: a path or a dict, with the section `deepspeed_compress`.

    Returns:
        What saves and loads the memories of compression, and tells what it does.

    Raises:
        ConfigError: the section is missing or wrong.
        SeamError: this version of Megatron is not known.
        UnsupportedError: these modules cannot be compressed rightly, or not with this section.

    Examples:
        >>> compression = deepspeed_compress.megatron.attach(model, optimizer, "ds_config.json")
        >>> compression.save("checkpoints/iter_0000100")
    """
    section, document = read_section(config)
    chunks = list(ddp_modules) if isinstance(ddp_modules, list | tuple) else [ddp_modules]
    refuse(chunks[0] if chunks else None, _of_all(find_limits(chunks, optimizer, section)))
    check_version(chunks)
    names = {parameter: name for name, parameter in name_parameters(chunks).items()}
    dense, experts = (_made(Share(chunks, names, experts), section, document) for experts in (False, True))
    assert dense is not None, "all ranks reduce parameters that are no experts'"
    present = [one for one in (dense, experts) if one is not None]
    steps = MegatronSteps(
        [one.session for one in present], optimizer, chunks, [around for one in present for around in one.weights]
    )
    for one in present:
        one.follow(steps)
    steps.begin(0)
    return Attached(
        dense.attached(steps),
        None if experts is None else experts.attached(steps),
        any_experts=_on_any(experts is not None),
        weights=[weights for one in present for weights in one.compressed],
    )


@dataclass(frozen=True)
class _Made:
    """A share of the parameters, its session, what sends its weights, and where it saves."""

    share: Share
    session: Session
    weights: Sequence[PlainWeights | Weights]
    place: Place

    def follow(self, steps: MegatronSteps) -> None:
        """From now on Megatron's bucket groups reduce through the session."""
        if self.session.config.gradients.method == "none":
            count_gradients(self.session, self.share.groups, self.share.group)
        else:
            Gradients(self.session, steps, self.share.groups, self.share.group)
        for weights in self.compressed:
            self.session.exact = ExactWeights(steps, weights.synchronise)

    @property
    def compressed(self) -> list[Weights]:
        return [one for one in self.weights if isinstance(one, Weights)]

    def attached(self, steps: MegatronSteps) -> sessions.Attached:
        return sessions.Attached(self.session, steps, self.place)


def _made(share: Share, section: CompressConfig, document: Mapping[str, Any]) -> _Made | None:
    """The session of a share; None where there is nothing to reduce. All ranks of the job must call it."""
    position, parameters = find_place_among(share.whole, section), share.described()
    if position is None or share.whole is None:
        return None
    if share.experts and section.monitor.path is not None:
        beside = section.monitor.model_copy(update={"path": str(Path(section.monitor.path) / EXPERTS)})
        section = section.model_copy(update={"monitor": beside})
    rank = dist.get_rank()
    exchanged = Exchanged(share.whole, parameters, share.device, position)
    session = make_session(exchanged, section, document, writes=rank == 0)
    weights = list(_weights(share, session, section, parameters))
    return _Made(share, session, weights, Place(rank, position, share.device))


def _weights(
    share: Share, session: Session, section: CompressConfig, parameters: Parameters
) -> Iterator[PlainWeights | Weights]:
    """What sends the weights of a share: in differences those that have masters, if the section says so."""
    if not isinstance(section.weights, CompressedWeights):
        yield PlainWeights(session, share.weight_bytes(share.sources))
        return
    whole, run = (
        make_group(dist.get_process_group_ranks(share.group)),
        Run(session.clock, session.meter, section.seed, session.pace),
    )
    gather = partial(WeightReduction(section.weights, parameters, run).difference_gather, whole)
    with_masters = [source for source in share.sources if has_masters(source)]
    yield Weights(session, with_masters, share.names, gather)
    yield PlainWeights(session, share.weight_bytes([source for source in share.sources if not has_masters(source)]))


def _of_all(problems: Iterable[str]) -> list[str]:
    """The problems of all ranks: stages differ, and none may wait for another that has stopped."""
    found: list[list[str]] = [[]] * dist.get_world_size()
    dist.all_gather_object(found, list(problems))
    return list(dict.fromkeys(problem for each in found for problem in each))


def _on_any(here: bool) -> bool:
    found = [False] * dist.get_world_size()
    dist.all_gather_object(found, here)
    return any(found)


def _nothing() -> None:
    """What a rank without experts saves and loads of them."""
