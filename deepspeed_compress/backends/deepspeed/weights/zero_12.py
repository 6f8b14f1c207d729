"""Weight gather of ZeRO 1, ZeRO 2 and the bf16 optimizer: `all_gather_dp_groups` inside the optimizer's `step`.

Each rank updates the fp32 master weights of its own part. DeepSpeed then rounds them into the weight buffer and gathers
it. We send compressed differences instead (`collectives.gather`). The function is a global of the module that defines
`step`. It is replaced there only while a `step` of this optimizer runs, and only for the buffers of this optimizer.
Outside `step` (when loading a universal checkpoint), DeepSpeed gathers exactly, as usual.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from deepspeed_compress.backends.deepspeed.weights.master_weights import FLAT_BUFFERS
from deepspeed_compress.backends.deepspeed.weights.overlap import ArrivingWeights
from deepspeed_compress.collectives.buckets import flat_sizes
from deepspeed_compress.collectives.gather import DifferenceGather
from deepspeed_compress.collectives.reduction import SETTINGS
from deepspeed_compress.config import CompressedWeights, WeightsConfig
from deepspeed_compress.errors import SeamError, UnsupportedError
from deepspeed_compress.session.patches import Patches, replaced
from deepspeed_compress.session.probing import WeightTraffic

GatherFactory = Callable[[ProcessGroup, Sequence[tuple[str, int]], torch.dtype], DifferenceGather]
"""Function that returns the gather of one flat buffer.

It receives the ranks that share the buffer, (name, numel) in its order with padding named `PADDING`, and its dtype.
"""


def check_weights(engine: Any) -> None:
    """Check that `step` of the engine's optimizer sends weights.

    Raises:
        UnsupportedError: every rank updates all weights.
    """
    if type(engine.optimizer) not in FLAT_BUFFERS:
        raise UnsupportedError(
            f"/deepspeed_compress/weights has no effect: {type(engine.optimizer).__name__} sends none; remove the key, "
            "or use ZeRO 1, 2 or 3 (1 with bf16 and data_types.grad_accum_dtype fp32 needs deepspeed>=0.18.5)"
        )


class Weights:
    """Weights that `step` of an engine's optimizer sends, compressed. Single-rank groups are left unchanged.

    No state outlives a step, so the settings may change between steps: differences are relative to the weights that all
    ranks hold at that time. During a step, the rank keeps a copy of its own part of the weights as the other ranks have
    it, because DeepSpeed overwrites it: numel / ranks elements of the buffer's dtype.

    Args:
        engine: the engine.
        factory_of: returns the factory of gathers for given settings.
        written: the settings in the section. All settings in force share its `overlap`.
        in_force: returns the settings of the running step; it must return the same on all ranks. Weights are exact if
            the settings say that they are not compressed. None leaves the step to DeepSpeed.
        patches: undoes the replacement.

    Raises:
        UnsupportedError: from `ArrivingWeights`.
    """

    def __init__(
        self,
        engine: Any,
        factory_of: Callable[[CompressedWeights], GatherFactory],
        written: CompressedWeights,
        in_force: Callable[[], WeightsConfig | None],
        patches: Patches,
    ) -> None:
        self._optimizer = engine.optimizer
        self._kind = FLAT_BUFFERS[type(engine.optimizer)]
        self._in_force = in_force
        groups, parameters = self._optimizer.real_dp_process_group, getattr(self._optimizer, self._kind.parameters)
        buffers = [
            (group, flat_sizes(held, [(engine.param_names[view], view) for view in views]), held.dtype)
            for group, held, views in zip(groups, self._held, parameters, strict=True)
        ]
        self._gathers_of = lru_cache(maxsize=SETTINGS)(
            lambda settings: [factory_of(settings)(*buffer) for buffer in buffers]
        )
        self.gathers = self._gathers_of(written)
        """Gathers for the settings in the section."""
        # The round of a parameter does not depend on how it is encoded, so these gathers serve for all settings.
        self.arriving = ArrivingWeights(engine, self.gathers, patches) if written.overlap else None
        """Weights in flight during forward; None if `step` waits for all weights."""
        patches.wrap(self._optimizer, "step", self.step)

    def traffic(self) -> WeightTraffic:
        """Return the number of elements that this rank sends and decodes in a step."""
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
        """Return the flat weight buffers, one per parameter group."""
        return getattr(self._optimizer, self._kind.held)  # type: ignore[no-any-return]

    def _buffers(self, gathers: Sequence[DifferenceGather]) -> Iterator[tuple[int, DifferenceGather, Tensor, Tensor]]:
        """Yield (number, gather, held weights, own part's master weights) of each group that has more than one rank."""
        masters = getattr(self._optimizer, self._kind.masters)
        for number, (gather, held, master) in enumerate(zip(gathers, self._held, masters, strict=True)):
            if gather.group.size() > 1:
                yield number, gather, held, master

    def _await(self) -> None:
        if self.arriving is not None:
            self.arriving.finish()

    def synchronise(self) -> None:
        """Set the weights on every rank to the master weights, rounded to the weights' dtype. Collective.

        The result is what DeepSpeed alone would have. Call this before saving, so that exported weights are exact and a
        resumed run equals one that continues after the save. Call it after loading, whatever was loaded. A second call
        changes nothing.
        """
        self._await()
        for _, gather, held, master in self._buffers(self.gathers):
            gather.synchronise(held, master)

    def step(self, original: Any, *args: Any, **options: Any) -> Any:
        """Run DeepSpeed's `step` with the weight gather replaced."""
        self._await()
        settings = self._in_force()
        if settings is None:
            return original(*args, **options)
        with self.taken_over(settings):
            return original(*args, **options)

    @contextmanager
    def taken_over(self, settings: WeightsConfig) -> Iterator[None]:
        """Replace DeepSpeed's gather of this optimizer's weights within the block, and send them as `settings` says.

        Raises:
            SeamError: a step was applied without calling `all_gather_dp_groups`.
        """
        module, pending = self._kind.module, [True]
        original = module.all_gather_dp_groups
        send = self._difference(settings) if isinstance(settings, CompressedWeights) else self.synchronise

        def all_gather_dp_groups(groups_flat: list[Tensor], *args: Any, **options: Any) -> None:
            if groups_flat is not self._held:
                original(groups_flat, *args, **options)
                return
            send()
            pending.clear()

        with replaced(module, all_gather_dp_groups=all_gather_dp_groups):
            yield
        if pending and not self._optimizer.overflow:
            raise SeamError(f"{module.__name__}: a step that was applied did not call all_gather_dp_groups")

    def _difference(self, settings: CompressedWeights) -> Callable[[], None]:
        """Copy this rank's own parts, and return a function that restores them and sends the differences."""
        gathers = self._gathers_of(settings)
        kept = [gather.own(held).clone() for _, gather, held, _ in self._buffers(gathers)]

        def send() -> None:
            for (_, gather, held, _), own in zip(self._buffers(gathers), kept, strict=True):
                gather.own(held).copy_(own)
            if self.arriving is not None:
                self.arriving.begin(self._buffers(gathers))
                return
            for _, gather, held, master in self._buffers(gathers):
                gather.gather(held, master)

        return send
