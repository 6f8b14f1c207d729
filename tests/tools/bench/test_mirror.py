"""The mirror: a process group whose other ranks send back what they receive."""

from typing import Any

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
