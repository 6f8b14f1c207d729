"""Updated weights of ZeRO 1, ZeRO 2 and the bf16 optimizer: `all_gather_dp_groups` inside the optimizer's `step`.

Each rank updates the masters of its own part; DeepSpeed then rounds them into the buffer of weights and gathers it. We
send compressed differences instead (`communication.gather`). The function is a global of the module that `step` is
defined in, so it is exchanged there while a `step` of this optimizer runs, and serves the lists of this optimizer
alone. Outside of `step` (loading a universal checkpoint) DeepSpeed gathers as ever, exactly.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import torch
from deepspeed.runtime import bf16_optimizer
from deepspeed.runtime.zero import stage_1_and_2
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.communication.gather import DifferenceGather
from deepspeed_compress.communication.reduction import SETTINGS
from deepspeed_compress.compression.segments import PADDING
from deepspeed_compress.config import CompressedWeights, WeightsConfig
from deepspeed_compress.engine.weights.overlap import ArrivingWeights
from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.session.patches import Patches
from deepspeed_compress.session.probing import WeightTraffic

__all__ = ["GatherFactory", "Weights", "attach_weights", "check_weights", "flat_sizes"]


class GatherFactory(Protocol):
    """Makes the gather of one flat buffer: the first three parameters of `DifferenceGather`."""

    def __call__(self, group: ProcessGroup, sizes: Sequence[tuple[str, int]], dtype: torch.dtype) -> DifferenceGather:
        """`sizes`: (name, numel) in the order of the buffer; padding has the name `PADDING`."""


@dataclass(frozen=True)
class _Kind:
    """Where an optimizer has its weights: the module of its `step`, and its attributes, lists with an entry a group."""

    module: ModuleType
    parameters: str
    held: str
    masters: str


_KINDS: Mapping[type, _Kind] = MappingProxyType(
    {
        stage_1_and_2.DeepSpeedZeroOptimizer: _Kind(
            stage_1_and_2, "bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups"
        ),
        bf16_optimizer.BF16_Optimizer: _Kind(
            bf16_optimizer, "bf16_groups", "bf16_groups_flat", "fp32_groups_flat_partition"
        ),
    }
)


def check_weights(engine: Any) -> None:
    """UnsupportedError if no weights are sent after a step of `engine`."""
    if type(engine.optimizer) not in _KINDS:
        raise UnsupportedError(
            f"/deepspeed_compress/weights has no effect: with {type(engine.optimizer).__name__} every rank updates all "
            "weights by itself, and none are sent; remove the key, or use zero_optimization.stage 1, 2 or 3"
        )


def attach_weights(
    engine: Any,
    factory_of: Callable[[CompressedWeights], GatherFactory],
    written: CompressedWeights,
    in_force: Callable[[], WeightsConfig],
    patches: Patches,
) -> "Weights":
    """Compress the weights that `step` of the engine's optimizer sends, as `in_force` says in that step.

    `in_force` must answer alike on all ranks; uncompressed weights are exact. `written`: what the section says, with
    which all settings in force have in common whether forward begins before all weights are here. Nothing happens where
    the data-parallel group is a single rank. Raises UnsupportedError, as of `check_weights` and `ArrivingWeights`.
    """
    check_weights(engine)
    weights = Weights(engine, factory_of, written, in_force)
    if written.overlap:
        # In which round a parameter travels does not depend on how it is encoded.
        weights.arriving = ArrivingWeights(engine, weights.gathers, patches)
    patches.wrap(engine.optimizer, "step", weights.step)
    return weights


class Weights:
    """The weights of one engine's optimizer.

    No state outlives a step, so that settings may be others in the next one: its differences are taken to what all
    ranks hold then. During a step the rank keeps a copy of its own part of the weights as the others have them, since
    DeepSpeed overwrites it: numel / ranks elements of their type.
    """

    def __init__(
        self,
        engine: Any,
        factory_of: Callable[[CompressedWeights], GatherFactory],
        written: CompressedWeights,
        in_force: Callable[[], WeightsConfig],
    ) -> None:
        self._optimizer = engine.optimizer
        self._kind = _KINDS[type(engine.optimizer)]
        self._in_force = in_force
        self.arriving: ArrivingWeights | None = None
        """Where forward may begin before all weights are here."""
        groups, parameters = self._optimizer.real_dp_process_group, getattr(self._optimizer, self._kind.parameters)
        buffers = [
            (group, flat_sizes(held, some, engine.param_names), held.dtype)
            for group, held, some in zip(groups, self._held, parameters, strict=True)
        ]
        self._gathers_of = lru_cache(maxsize=SETTINGS)(partial(_make_gathers, factory_of, buffers))
        self.gathers = self._gathers_of(written)
        """Those of what is written."""

    def traffic(self) -> WeightTraffic:
        """What this rank sends and receives in a step."""
        gathers = [gather for gather in self.gathers if gather.group.size() > 1]
        own = [gather.own_numel for gather in gathers]
        return WeightTraffic(
            own=sum(own),
            sent=sum(numel * (gather.group.size() - 1) for numel, gather in zip(own, gathers, strict=True)),
            decoded=sum(gather.numel for gather in gathers),
            itemsize=max((held.element_size() for held in self._held), default=0),
            overlap=self.arriving is not None,
        )

    @property
    def _held(self) -> list[Tensor]:
        """The flat buffers of weights, one a parameter group."""
        return getattr(self._optimizer, self._kind.held)  # type: ignore[no-any-return]

    def _buffers(self, gathers: Sequence[DifferenceGather]) -> Iterator[tuple[int, DifferenceGather, Tensor, Tensor]]:
        """(number, gather, held weights, masters of the own part) of the groups that are sent."""
        masters = getattr(self._optimizer, self._kind.masters)
        for number, (gather, held, master) in enumerate(zip(gathers, self._held, masters, strict=True)):
            if gather.group.size() > 1:
                yield number, gather, held, master

    def _await(self) -> None:
        if self.arriving is not None:
            self.arriving.finish()

    def synchronise(self) -> None:
        """Weights on every rank become the masters, rounded to their type: what DeepSpeed alone would have.

        Before saving, so that exported weights are exact and resuming equals going on after the save; after loading,
        wherever the weights and the masters came from. All ranks must call it; a second call changes nothing.
        """
        self._await()
        for _, gather, held, master in self._buffers(self.gathers):
            gather.synchronise(held, master)

    def step(self, original: Any, *args: Any, **options: Any) -> Any:
        """DeepSpeed's `step`."""
        self._await()
        with self.taken_over():
            return original(*args, **options)

    @contextmanager
    def taken_over(self) -> Iterator[None]:
        """While this lasts, DeepSpeed gathers the weights of this optimizer through us."""
        module, pending = self._kind.module, [True]
        original = module.all_gather_dp_groups
        settings = self._in_force()
        send = self._difference(settings) if isinstance(settings, CompressedWeights) else self.synchronise

        def all_gather_dp_groups(groups_flat: list[Tensor], *args: Any, **options: Any) -> None:
            if groups_flat is not self._held:
                original(groups_flat, *args, **options)
                return
            send()
            pending.clear()

        module.all_gather_dp_groups = all_gather_dp_groups  # type: ignore[attr-defined]
        try:
            yield
        finally:
            module.all_gather_dp_groups = original  # type: ignore[attr-defined]
        if pending and not self._optimizer.overflow:
            raise SeamError(f"{module.__name__}: a step that was applied did not call all_gather_dp_groups")

    def _difference(self, settings: CompressedWeights) -> Callable[[], None]:
        """Keep the own parts as they are now; the returned function puts them back and sends the differences."""
        gathers = self._gathers_of(settings)
        kept = [gather.own(held).clone() for _, gather, held, _ in self._buffers(gathers)]

        def send() -> None:
            for (_, gather, held, _), own in zip(self._buffers(gathers), kept, strict=True):
                gather.own(held).copy_(own)
            self._send_differences(gathers)

        return send

    def _send_differences(self, gathers: Sequence[DifferenceGather]) -> None:
        if self.arriving is not None:
            self.arriving.begin(self._buffers(gathers))
            return
        for _, gather, held, master in self._buffers(gathers):
            gather.gather(held, master)


def _make_gathers(
    factory_of: Callable[[CompressedWeights], GatherFactory],
    buffers: Sequence[tuple[ProcessGroup, Sequence[tuple[str, int]], torch.dtype]],
    settings: CompressedWeights,
) -> list[DifferenceGather]:
    factory = factory_of(settings)
    return [factory(group, sizes, dtype) for group, sizes, dtype in buffers]


def flat_sizes(held: Tensor, parameters: Sequence[Tensor], names: Mapping[Tensor, str]) -> list[tuple[str, int]]:
    """(name, numel) of what lies in the flat buffer `held`, in order: `parameters` are views of it."""
    sizes: list[tuple[str, int]] = []
    end = 0
    for parameter in sorted((view for view in parameters if view.numel()), key=lambda view: view.data_ptr()):
        offset = (parameter.data_ptr() - held.data_ptr()) // held.element_size()
        assert end <= offset <= held.numel() - parameter.numel(), f"{names[parameter]} is not a part of its buffer"
        sizes += [(PADDING, offset - end), (names[parameter], parameter.numel())]
        end = offset + parameter.numel()
    return [(name, numel) for name, numel in [*sizes, (PADDING, held.numel() - end)] if numel]
