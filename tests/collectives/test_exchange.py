"""The methods of exchange: all deliver the same messages, and the backend determines which one is used."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from deepspeed_compress.collectives import exchange
from deepspeed_compress.collectives.exchange import Link
from tests.support.threads import run_threads

RANKS = 3


def message(source: int, target: int) -> torch.Tensor:
    """Return a message with a different length for every pair, empty from a rank to the previous one."""
    length = 0 if target == source - 1 else 100 * source + 10 * target + 1
    return torch.arange(length, dtype=torch.uint8).add_(7 * source + target)


@pytest.mark.parametrize("start", [exchange._point_to_point, exchange._staged])
def test_every_message_arrives_at_its_target(start: Any) -> None:
    def work(group: ProcessGroupGloo, rank: int) -> list[torch.Tensor]:
        outgoing = [message(rank, peer) for peer in range(RANKS)]
        incoming = [torch.zeros_like(message(peer, rank)) for peer in range(RANKS)]
        pending = start(Link(group), outgoing, incoming, 5)
        pending.receive()
        pending.finish()
        return incoming

    for rank, incoming in enumerate(run_threads(RANKS, work)):
        for source in set(range(RANKS)) - {rank}:
            assert incoming[source].equal(message(source, rank)), f"{source} to {rank}"


class _Gathering:
    """A group of gloo with an all-gather of messages of any sizes, as NCCL's."""

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group, self.rank, self.size = group, group.rank, group.size

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> Any:
        for root, output in enumerate(outputs[0]):
            if output.numel():
                sent = output.copy_(inputs[0]) if root == self.rank() else output
                options = BroadcastOptions()
                options.rootRank = root
                self._group.broadcast([sent], options).wait()
        return self._group.barrier()


@pytest.mark.parametrize("on_gpu", [False, True])
def test_one_message_is_shared_with_all(on_gpu: bool) -> None:
    """Ranks have messages of 0, 8 and 16 bytes; their own stay where they are."""

    def work(group: ProcessGroupGloo, rank: int) -> list[list[int]]:
        sizes = [8 * peer for peer in range(RANKS)]
        messages = torch.zeros(sum(sizes), dtype=torch.uint8)
        parts = torch.split(messages, sizes)
        parts[rank].fill_(9 + rank)
        if on_gpu:
            # It has of a group only what the transport calls.
            started, _ = exchange._all_gather_split(Link(_Gathering(group)), messages, parts)  # type: ignore[arg-type]
            started.wait()
        else:
            Link(group).all_gather_split(messages, sizes, 3).finish()
        return [one.tolist() for one in parts]

    assert run_threads(RANKS, work) == [[[9 + peer] * 8 * peer for peer in range(RANKS)]] * RANKS


def test_a_staged_message_is_copied_when_it_is_waited_for() -> None:
    """On a GPU, the copy must be on the waiting stream."""

    def work(group: ProcessGroupGloo, rank: int) -> tuple[int, int]:
        outgoing, incoming = [torch.ones(9, dtype=torch.uint8)] * 2, list(torch.zeros(2, 9, dtype=torch.uint8))
        pending = exchange._staged(Link(group), outgoing, incoming, 0)
        group.barrier().wait()
        before = int(incoming[1 - rank].sum())
        pending.receive()
        pending.finish()
        return before, int(incoming[1 - rank].sum())

    assert run_threads(2, work) == [(0, 9)] * 2


@pytest.mark.parametrize(
    ("device", "backend", "start"),
    [
        ("cpu", "gloo", exchange._point_to_point),
        ("cpu", "mpi", exchange._point_to_point),
        ("cuda", "nccl", exchange._all_to_all),
        ("cuda", "gloo", exchange._staged),
    ],
)
def test_device_and_backend_determine_the_method(device: str, backend: str, start: Any) -> None:
    group: Any = SimpleNamespace(name=lambda: backend)
    assert exchange._choose_transport(group, torch.device(device)).start is start
