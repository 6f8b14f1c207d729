"""Checkpoints of an engine with balanced ownership (`ownership`), stored in the parameter order of the program.

DeepSpeed writes and reads flat partitions without the names of their parameters, so a run without this package would
misread partitions in another order. Ranks exchange their elements when a file is written and when it is read. The bits
in the file equal those of an engine in the given order with the same values. A direct call of the optimizer's
`state_dict`, which one rank may make without the others, keeps the order of memory.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from deepspeed.checkpoint import constants
from deepspeed.utils.tensor_fragment import fragment_address
from torch import Tensor

from deepspeed_compress.backends.deepspeed.ownership import DEALT, GivenOrder
from deepspeed_compress.checkpointing.deepspeed.zero_parts import find_pieces, find_places
from deepspeed_compress.collectives.reorder import Reordering
from deepspeed_compress.errors import StateError
from deepspeed_compress.session.patches import Patches, replaced

Move = Callable[[Tensor, torch.device], Tensor]


def keep_file_order(engine: Any, given: GivenOrder) -> None:
    """Have `engine` write and read checkpoints in the order `given`. Does nothing if the order was not changed.

    This lasts for as long as the engine exists, even after `detach`, because its parameters stay where they are.
    """
    if not given:
        return
    files, patches = _Files(engine, given), Patches()
    patches.replace(engine, DEALT, files)
    patches.wrap(engine, "_get_zero_param_shapes", files.shapes)
    patches.wrap(engine, "_save_zero_checkpoint", files.save)
    patches.wrap(engine, "_load_zero_checkpoint", files.load)


class _Files:
    """Translation between this rank's partitions in memory and those in files, for one engine."""

    def __init__(self, engine: Any, given: GivenOrder) -> None:
        self._optimizer = engine.optimizer
        self._device = torch.device(engine.device)
        self._names = [[engine.param_names[parameter] for parameter in group] for group in given]
        self._sizes = [_sizes(engine, group) for group in given]
        # Before 0.19.7, DeepSpeed divides with `/`, so they are whole numbers of type float.
        self._shares = [int(size) for size in self._optimizer.partition_size]
        held = [_sizes(engine, group) for group in self._optimizer.bit16_groups]
        self._reorderings = [
            Reordering(group, before, after, share)
            for group, before, after, share in zip(
                self._optimizer.real_dp_process_group, held, self._sizes, self._shares, strict=True
            )
        ]

    def shapes(self, original: Callable[[], list[Mapping[str, Any]]]) -> list[Mapping[str, Any]]:
        """Return DeepSpeed's `_get_zero_param_shapes` in the order of files.

        Tools that consolidate weights rely on it.
        """
        return [
            OrderedDict((name, shapes[name]) for name in names)
            for names, shapes in zip(self._names, original(), strict=True)
        ]

    def save(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call DeepSpeed's `_save_zero_checkpoint`, whose call of `state_dict` gets the order of files."""
        with replaced(self._optimizer, state_dict=partial(self._written, self._optimizer.state_dict)):
            return original(*args, **options)

    def load(self, original: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call DeepSpeed's `_load_zero_checkpoint`, whose call of `load_state_dict` converts from file order."""
        with replaced(self._optimizer, load_state_dict=partial(self._read, self._optimizer.load_state_dict)):
            return original(*args, **options)

    def _written(self, original: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the optimizer's `state_dict` in the order of files. Collective."""
        moves: list[Move] = [reordering.forward for reordering in self._reorderings]
        return {**self._moved(original(), moves), constants.PARAM_SLICE_MAPPINGS: self._slices()}

    def _read(self, original: Callable[..., Any], state_dict_list: Any = None, *args: Any, **options: Any) -> Any:
        """Call `load_state_dict` with this rank's entry of `state_dict_list` in the order of memory. Collective.

        Universal checkpoints are stored by name, and have no such list.
        """
        rank = self._optimizer.dp_process_group.rank()
        if state_dict_list is not None and _fits(state_dict_list, self._optimizer):
            moves: list[Move] = [reordering.backward for reordering in self._reorderings]
            state_dict_list = list(state_dict_list)
            state_dict_list[rank] = self._moved(state_dict_list[rank], moves)
        return original(state_dict_list, *args, **options)

    def _moved(self, state: dict[str, Any], moves: Sequence[Move]) -> dict[str, Any]:
        """Return a copy of `state` in which master weights and optimizer states are reordered with `moves`.

        DeepSpeed removes the padding of the master weights, so it is added for the move.
        """
        masters = [
            move(torch.cat([master.detach(), master.new_zeros(padding)]), self._device)[: master.numel()]
            for move, master, padding in zip(
                moves, state[constants.SINGLE_PARTITION_OF_FP32_GROUPS], state[constants.GROUP_PADDINGS], strict=True
            )
        ]
        base = dict(state[constants.BASE_OPTIMIZER_STATE])
        base["state"] = {
            index: {
                name: self._moved_state(name, value, self._shares[index], moves[index])
                for name, value in values.items()
            }
            for index, values in sorted(base["state"].items())
        }
        return {**state, constants.SINGLE_PARTITION_OF_FP32_GROUPS: masters, constants.BASE_OPTIMIZER_STATE: base}

    def _moved_state(self, name: str, value: Any, share: int, move: Move) -> Any:
        if not isinstance(value, Tensor) or value.numel() == 1:
            return value
        if value.shape != (share,):
            raise StateError(
                f'/deepspeed_compress/ownership: "balanced" cannot move the state {name!r} of the optimizer, of shape '
                f'{tuple(value.shape)} (allowed: one number, or one for each of {share} elements); write "contiguous"'
            )
        return move(value, self._device)

    def _slices(self) -> list[Mapping[str, fragment_address]]:
        """Return the slice of each parameter in this rank's partition of files, by parameter group.

        The format is that of DeepSpeed's `_create_param_mapping`.
        """
        buffers = find_places([dict(sizes) for sizes in self._sizes])
        parts = zip(buffers, self._optimizer.real_dp_process_group, self._shares, strict=True)
        pieces = [find_pieces(buffer, group.rank() * share, share) for buffer, group, share in parts]
        return [
            OrderedDict((one.name, fragment_address(numel=one.numel, start=one.start)) for one in some)
            for some in pieces
        ]


def _sizes(engine: Any, group: Sequence[Any]) -> list[tuple[str, int]]:
    return [(engine.param_names[parameter], parameter.numel()) for parameter in group]


def _fits(states: Sequence[Any], optimizer: Any) -> bool:
    """Return True if the states were saved by the current number of ranks. DeepSpeed refuses or ignores others."""
    return len(states) == optimizer.dp_process_group.size() and (
        list(states[optimizer.dp_process_group.rank()][constants.PARTITION_COUNT]) == list(optimizer.partition_count)
    )
