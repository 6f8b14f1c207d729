"""Assembly of ZeRO's partitions of fp32 master weights and optimizer states from the files of another number of ranks.

The model state files list the parameters of each flat buffer in order (`param_shapes`), so everything is found by name.
The result is what the optimizer's `state_dict` would return.
"""

import copy
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from typing import Any

import torch
from deepspeed.checkpoint.constants import (
    BASE_OPTIMIZER_STATE,
    FP32_FLAT_GROUPS,
    GROUP_PADDINGS,
    OPTIMIZER_STATE_DICT,
    PARTITION_COUNT,
    SINGLE_PARTITION_OF_FP32_GROUPS,
)
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import Tensor

from deepspeed_compress.errors import StateError

MASTER = "fp32"
"""Name of the fp32 master weights among the optimizer's states."""
_PADDINGS = "param_alignment_paddings"
"""Key of DeepSpeed's files since 0.19.7 (`PARAM_ALIGNMENT_PADDINGS`)."""


@dataclass(frozen=True)
class Piece:
    """Elements `begin` to `begin + numel` of the parameter `name`, which `start` at that index in a flat part."""

    name: str
    begin: int
    start: int
    numel: int


def even_piece(name: str, numel: int, rank: int, ranks: int, start: int) -> tuple[Piece, int]:
    """Return the part of an evenly sharded parameter that `rank` holds, and the room that it occupies from `start`.

    The parameter has `numel` elements on `ranks` ranks. The last ranks may hold fewer elements or none, and pad their
    room (as ZeRO 3 does).
    """
    share = -(-numel // ranks)
    begin = min(rank * share, numel)
    return Piece(name, begin, start, min(share, numel - begin)), share


class Fragments:
    """Values of one kind that were read, such as fp32 master weights, by parameter.

    Tensors are views until `cut` copies them.
    """

    def __init__(self) -> None:
        self._read: dict[str, list[tuple[int, Tensor]]] = {}

    def add(self, pieces: Iterable[Piece], part: Tensor) -> None:
        """Add `pieces` of the flat `part` of one rank."""
        for piece in pieces:
            values = part.narrow(0, piece.start, piece.numel)
            self._read.setdefault(piece.name, []).append((piece.begin, values))

    def cut(self, pieces: Sequence[Piece], size: int) -> Tensor:
        """Return a new flat part of `size` elements that holds `pieces`, with zeros between them.

        Raises:
            StateError: elements of a piece have not been read.
        """
        found = {piece.name: self._read.get(piece.name, []) for piece in pieces}
        dtype = next((values.dtype for some in found.values() for _, values in some), torch.float32)
        part = torch.zeros(size, dtype=dtype)
        for piece in pieces:
            target = part.narrow(0, piece.start, piece.numel)
            filled = sum(_copy(target, piece.begin, begin, values) for begin, values in found[piece.name])
            if filled != piece.numel:
                raise StateError(
                    f"the checkpoint has {filled} of the elements {piece.begin} to {piece.begin + piece.numel} of "
                    f"{piece.name}: it belongs to another model, or one of its files belongs to another save"
                )
        return part


def _copy(target: Tensor, first: int, begin: int, values: Tensor) -> int:
    """Copy the overlap of `values`, from element `begin` on, to `target`, from element `first` on. Return its size."""
    low, high = max(first, begin), min(first + target.numel(), begin + values.numel())
    if low < high:
        target[low - first : high - first] = values[low - begin : high - begin]
    return max(0, high - low)


@dataclass(frozen=True)
class _Part:
    """One rank's partition of a parameter group, or of a sub-group under ZeRO 3.

    Attributes:
        pieces: the places of the parameters in the partition.
        values: flat tensors of equal size, by name: master weights and optimizer states.
        shared: values that are equal on all ranks, such as the step.
    """

    pieces: Sequence[Piece]
    values: Mapping[str, Tensor]
    shared: Mapping[str, Any]


def state_of_zero_12(
    engine: Any, rank: int, found: Sequence[dict[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the optimizer state of ZeRO 1 or 2 for one rank, assembled from the states of all ranks that saved it.

    Args:
        engine: an engine with a DeepSpeedZeroOptimizer or BF16_Optimizer.
        rank: the rank in the engine's data-parallel group.
        found: the saved states of all ranks, in order.
        shapes: the shapes of the saved parameter groups' parameters, in the order of their flat buffers.

    Raises:
        StateError: the saved partitions do not make up the state.
    """
    _expect(found[0], SINGLE_PARTITION_OF_FP32_GROUPS, "ZeRO 1 or 2")
    optimizer, names = engine.optimizer, engine.param_names
    _expect_no_muon(engine.optimizer, found[0])
    bf16 = isinstance(optimizer, BF16_Optimizer)
    groups = optimizer.bf16_groups if bf16 else optimizer.round_robin_bit16_groups
    masters = optimizer.fp32_groups_flat_partition if bf16 else optimizer.single_partition_of_fp32_groups
    # Before 0.19.7, DeepSpeed did not align parameters.
    paddings = None if bf16 else getattr(optimizer, "round_robin_bit16_padding", None)
    # Not from DeepSpeed's `param_slice_mappings`, which have another order with round_robin_gradients.
    buffers = find_places([{names[one]: one.numel() for one in group} for group in groups], paddings)
    wanted = [
        (find_pieces(buffer, rank * master.numel(), master.numel()), master.numel())
        for buffer, master in zip(buffers, masters, strict=True)
    ]
    saved = find_places(_sizes(shapes), found[0].get(_PADDINGS))
    parts = _cut(list(_parts_12(found, saved)), wanted)
    state = {
        **found[0],
        SINGLE_PARTITION_OF_FP32_GROUPS: [part.values[MASTER] for part in parts],
        BASE_OPTIMIZER_STATE: _optimizer_state(parts, found[0][BASE_OPTIMIZER_STATE]["param_groups"]),
        PARTITION_COUNT: optimizer.partition_count,
        GROUP_PADDINGS: [0] * len(parts),
    }
    return state if paddings is None else {**state, _PADDINGS: paddings}


def state_of_zero_3(
    engine: Any, rank: int, found: Sequence[dict[str, Any]], shapes: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the optimizer state of ZeRO 3 for one rank; see `state_of_zero_12`. Groups are sub-groups here."""
    _expect(found[0], FP32_FLAT_GROUPS, "ZeRO 3")
    optimizer, ranks = engine.optimizer, engine.seq_dp_world_size
    groups = [{engine.param_names[one]: one.ds_numel for one in group} for group in optimizer.fp16_groups]
    parts = _cut(list(_parts_3(found, _sizes(shapes))), [_even_pieces(group, rank, ranks) for group in groups])
    return {
        **found[0],
        FP32_FLAT_GROUPS: [part.values[MASTER] for part in parts],
        OPTIMIZER_STATE_DICT: _optimizer_state(parts, _sub_groups(optimizer, found[0])),
        PARTITION_COUNT: optimizer.partition_count,
    }


def _sub_groups(optimizer: Any, found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the saved parameter groups with the current sub-groups, which have other numbers of parameters."""
    optimizer._set_fp32_optimizer_param_groups()
    own = optimizer.optimizer.state_dict()["param_groups"]
    optimizer._clear_fp32_optimizer_param_groups()
    saved = found[OPTIMIZER_STATE_DICT]["param_groups"]
    return [{**one, "params": other["params"]} for one, other in zip(saved, own, strict=True)]


def _expect(state: Mapping[str, Any], key: str, stage: str) -> None:
    if key not in state or isinstance(state.get(BASE_OPTIMIZER_STATE), list):
        raise StateError(
            f"its files are not those of {stage}, or were written with elastic_checkpoint, so they cannot be resharded "
            "for another number of ranks; load it with the settings and the number of ranks that saved it"
        )


def _expect_no_muon(optimizer: Any, state: Mapping[str, Any]) -> None:
    groups = state[BASE_OPTIMIZER_STATE]["param_groups"]
    if any(group.get("use_muon") for group in groups) and not isinstance(optimizer, BF16_Optimizer):
        raise StateError(
            "Muon's momentum under ZeRO 1 and 2 has whole matrices on several ranks, so it cannot be resharded for "
            "another number of ranks; load it with the number of ranks that saved it"
        )


def _sizes(shapes: Sequence[Mapping[str, Any]]) -> list[dict[str, int]]:
    return [{name: shape.numel() for name, shape in group.items()} for group in shapes]


def find_places(
    groups: Sequence[Mapping[str, int]], paddings: Sequence[Sequence[int]] | None = None
) -> list[list[tuple[str, int, int]]]:
    """Return (name, offset in its flat buffer, numel) of every parameter, by group. Paddings follow the parameters."""
    found = []
    for index, group in enumerate(groups):
        after = paddings[index] if paddings else [0] * len(group)
        ends = accumulate(map(add, group.values(), after), initial=0)
        found.append([(name, place, numel) for (name, numel), place in zip(group.items(), ends, strict=False)])
    return found


def find_pieces(buffer: Sequence[tuple[str, int, int]], first: int, size: int) -> list[Piece]:
    """Return the pieces of parameters in the partition of `size` elements from `first` on."""
    cut = [(name, place, max(place, first), min(place + numel, first + size)) for name, place, numel in buffer]
    return [Piece(name, low - place, low - first, high - low) for name, place, low, high in cut if low < high]


def _even_pieces(sizes: Mapping[str, int], rank: int, ranks: int) -> tuple[list[Piece], int]:
    """Return the pieces of a ZeRO 3 sub-group on `rank`, one parameter after the other, and the partition's size."""
    pieces, start = [], 0
    for name, numel in sizes.items():
        piece, room = even_piece(name, numel, rank, ranks, start)
        pieces.append(piece)
        start += room
    return pieces, start


def _parts_12(found: Sequence[Mapping[str, Any]], buffers: Sequence[Sequence[tuple[str, int, int]]]) -> Iterator[_Part]:
    for rank, state in enumerate(found):
        base = state[BASE_OPTIMIZER_STATE]
        for index, buffer in enumerate(buffers):
            master, number = state[SINGLE_PARTITION_OF_FP32_GROUPS][index], base["param_groups"][index]["params"][0]
            size = found[0][SINGLE_PARTITION_OF_FP32_GROUPS][index].numel() + found[0][GROUP_PADDINGS][index]
            states = base["state"].get(number, {})
            yield _part(find_pieces(buffer, rank * size, size), master, states, (size, master.numel()))


def _parts_3(found: Sequence[Mapping[str, Any]], sizes: Sequence[Mapping[str, int]]) -> Iterator[_Part]:
    for rank, state in enumerate(found):
        for index, group in enumerate(sizes):
            pieces, size = _even_pieces(group, rank, len(found))
            master = state[FP32_FLAT_GROUPS][index]
            yield _part(pieces, master, state[OPTIMIZER_STATE_DICT]["state"].get(index, {}), (size,))


def _part(pieces: Sequence[Piece], master: Tensor, states: Mapping[str, Any], sizes: Sequence[int]) -> _Part:
    """Return a partition with its master weights and optimizer states.

    Raises:
        StateError: a state is neither a single number nor as large as the partition.
    """
    one = {name for name, value in states.items() if not isinstance(value, Tensor) or value.dim() == 0}
    for name in states.keys() - one:
        if states[name].dim() != 1 or states[name].numel() not in sizes:
            raise StateError(
                f"the state {name!r} of the optimizer, of shape {tuple(states[name].shape)}, cannot be resharded for "
                f"another number of ranks (allowed: one number, or one for each of the {sizes[0]} elements of a part)"
            )
    flat = {name: value for name, value in states.items() if name not in one}
    return _Part(pieces, {MASTER: master.detach(), **flat}, {name: states[name] for name in one})


def _cut(parts: Sequence[_Part], wanted: Sequence[tuple[Sequence[Piece], int]]) -> list[_Part]:
    """Return the partitions `wanted`, each given as pieces and a size, assembled from `parts`."""
    fragments: defaultdict[str, Fragments] = defaultdict(Fragments)
    owners = {piece.name: part for part in reversed(parts) for piece in part.pieces}
    for part in parts:
        for name, values in part.values.items():
            fragments[name].add(part.pieces, values)
    found = []
    for pieces, size in wanted:
        like = next((owners[piece.name] for piece in pieces if piece.name in owners), next(iter(owners.values())))
        values_of = {name: fragments[name].cut(pieces, size) for name in like.values}
        # Optimizers count steps in a separate tensor for each partition.
        found.append(_Part(pieces, values_of, copy.deepcopy(like.shared)))
    return found


def _optimizer_state(parts: Sequence[_Part], groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state in the format of a torch optimizer's `state_dict`, with the partitions as its parameters."""
    states = {
        index: {**part.shared, **{name: values for name, values in part.values.items() if name != MASTER}}
        for index, part in enumerate(parts)
    }
    return {"state": {index: state for index, state in states.items() if state}, "param_groups": list(groups)}
