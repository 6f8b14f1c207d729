"""The mirror: a process group whose other ranks send back what they receive."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.collectives.exchange import exchange
from deepspeed_compress.tools.bench.mirror import Mirror


def test_a_mirror_returns_the_message_that_it_receives() -> None:
    group: Any = Mirror(0, 2)
    outgoing = [torch.empty(0, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)]
    for length, expected in ((9, outgoing[1]), (7, torch.zeros(7, dtype=torch.uint8))):
        incoming = [outgoing[0], torch.full((length,), 5, dtype=torch.uint8)]
        exchange(group, outgoing, incoming)
        assert incoming[1].equal(expected)
        group.alltoall([outgoing[0], incoming[1].fill_(5)], outgoing).wait()
        assert incoming[1].equal(expected)


def test_messages_that_were_never_sent_are_zeros() -> None:
    group: Any = Mirror(0, 2)
    nothing, received = torch.empty(0, dtype=torch.uint8), torch.full((9,), 5, dtype=torch.uint8)
    exchange(group, [nothing, nothing], [nothing, received])
    assert received.tolist() == [0] * 9


def test_a_mirror_has_as_many_ranks_as_it_says() -> None:
    group: Any = Mirror(0, 2)
    x, whole = torch.ones(3), torch.arange(6.0)
    group.allreduce([x]).wait()
    assert x.tolist() == [2, 2, 2]
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp.MAX
    group.allreduce([x], options).wait()
    assert x.tolist() == [2, 2, 2]
    group._allgather_base(whole, whole[:3]).wait()
    assert whole.tolist() == [0, 1, 2] * 2
    group._reduce_scatter_base(x, whole).wait()
    assert x.tolist() == [0, 2, 4]


class Counting(Mirror):
    """Mirror that records its exchanges."""

    def __init__(self, size: int) -> None:
        super().__init__(0, size)
        self.sizes: list[float] = []

    def arrive(self, kind: str, size: float) -> Any:
        self.sizes.append(size)
        return super().arrive(kind, size)


@pytest.mark.parametrize(
    ("inputs", "outputs", "expected"),
    [
        ([], [], [1, 1, 2, 2, 3, 3]),
        ([2, 2, 2], [2, 2, 2], [1, 1, 2, 2, 3, 3]),
        ([0, 3, 3], [0, 3, 3], [1, 1, 2, 2, 3, 3]),
        ([2, 3, 1], [3, 3, 0], [0, 0, 0, 2, 2, 3]),
    ],
)
def test_parts_of_an_exchange_come_back(inputs: list[int], outputs: list[int], expected: list[int]) -> None:
    mirror = Counting(3)
    group: Any = mirror
    sent, output = torch.tensor([1, 1, 2, 2, 3, 3]), torch.full((6,), 5)
    group.alltoall_base(output, sent, outputs, inputs).wait()
    assert output.tolist() == expected
    others = 8 * (6 - (inputs[0] if inputs else 2))
    assert mirror.sizes == [others * 3 / 2]
    group.alltoall([output[:2], output[2:3], output[3:]], [sent[:2], sent[2:3], sent[3:]]).wait()
    assert mirror.sizes[1] == 8 * 4 * 3 / 2
