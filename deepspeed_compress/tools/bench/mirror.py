"""A process group in which this process is rank 0 and all other ranks mirror it: no network and no waiting.

The work of a rank is done at its real cost, and what it sends comes back to it. This shows the cost of a compressed
step without a network limit. The training result is meaningless, because the other ranks' parts are copies.
"""

# mypy: disable-error-code="assignment, attr-defined, call-arg, override"
# torch's types describe process groups that are implemented in C++.

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _create_work_from_future
from torch.futures import Future

MIRROR = "mirror"
"""Name of the backend in torch.distributed."""


def join_mirror(size: int) -> None:
    """Create the default group of torch.distributed from this process and `size` - 1 mirror images."""
    if not hasattr(dist.Backend, "MIRROR"):
        dist.Backend.register_backend(MIRROR, _create, devices=["cpu", "cuda"])
    dist.init_process_group(MIRROR, store=dist.HashStore(), rank=0, world_size=size)


def _create(store: Any, rank: int, size: int, timeout: Any) -> "Mirror":
    return Mirror(rank, size)


def _done() -> Any:
    future: Future[Any] = Future()
    future.set_result(None)
    return _create_work_from_future(future)


@dataclass
class Letter:
    """Receive on the host. The message is read and written when it is waited for; if none was sent, it is zeros."""

    target: Tensor
    sent: Tensor | None = None
    read: bool = False

    def post(self, sent: Tensor) -> None:
        """Let the message be `sent`."""
        self.sent = sent

    def wait(self) -> bool:
        """Read the message."""
        if not self.read:
            reflect(self.sent, self.target)
            self.read = True
        return True


def reflect(sent: Tensor | None, output: Tensor) -> None:
    """Copy `sent` to `output`, or zeros if nothing was sent or if it has another length."""
    if sent is not None and sent.shape == output.shape:
        output.copy_(sent)
    else:
        output.zero_()


def _reflect_all(sent: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
    """Apply `reflect` to all pairs, in as few launches as a backend needs for a collective."""
    lengths = list(zip(map(Tensor.numel, sent), map(Tensor.numel, outputs), strict=True))
    equal, others = [one == other > 0 for one, other in lengths], [one != other > 0 for one, other in lengths]
    if any(equal):
        torch._foreach_copy_(list(compress(outputs, equal)), list(compress(sent, equal)))
    if any(others):
        torch._foreach_zero_(list(compress(outputs, others)))


class Mirror(dist.ProcessGroup):
    """Process group with the collectives that DeepSpeed and the package call, as copies on this rank's device.

    See torch's collectives of the same names. An all-to-all, or a send with its receive, returns what was sent, or
    zeros if it has another length.
    """

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._posted: dict[tuple[int, int], Letter] = {}

    def getBackendName(self) -> str:  # noqa: N802  (torch's name)
        return MIRROR

    def arrive(self, kind: str, size: float) -> Any:
        """Return the handle of a collective, whose data is there.

        Args:
            kind: Name of its cost in `planner.cluster.Links`: "reduce", "gather", "scatter", "exchange".
            size: Bytes of its whole buffer.
        """
        return _done()

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
            for tensor in tensors:
                tensor.mul_(self.size())
        return self.arrive("reduce", sum(tensor.nbytes for tensor in tensors))

    allreduce_coalesced = reduce = allreduce

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> Any:
        return _done()

    def barrier(self, opts: Any = None) -> Any:
        return _done()

    def allgather(self, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        for parts, mine in zip(outputs, inputs, strict=True):
            _reflect_all([mine] * len(parts), parts)
        return self.arrive("gather", sum(part.nbytes for parts in outputs for part in parts))

    def _allgather_base(self, output: Tensor, mine: Tensor, opts: Any = None) -> Any:
        # A copy, because `mine` may be a part of the output.
        reflected = mine.clone().view(-1)
        output.view(self.size(), -1).copy_(reflected)
        return self.arrive("gather", output.nbytes)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> Any:
        torch.mul(whole.view(self.size(), *output.shape)[self.rank()], self.size(), out=output)
        return self.arrive("scatter", whole.nbytes)

    # Names of the same methods in torch 2.13 and later.
    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base

    def alltoall(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None) -> Any:
        _reflect_all(inputs, outputs)
        return self._exchanged(sum(one.nbytes for one in inputs) - inputs[self.rank()].nbytes)

    def alltoall_base(
        self, output: Tensor, sent: Tensor, outputs: Sequence[int], inputs: Sequence[int], opts: Any = None
    ) -> Any:
        """Exchange parts of buffers. Neighboring parts that are as long as the message are copied at once."""
        own = inputs[self.rank()] if inputs else len(sent) // self.size()
        others = sent.nbytes * (len(sent) - own) // max(1, len(sent))
        if outputs == inputs:
            output.copy_(sent)
            return self._exchanged(others)
        output.zero_()
        targets, sources = list(accumulate(outputs, initial=0)), list(accumulate(inputs, initial=0))
        same = [one == other and one > 0 for one, other in zip(outputs, inputs, strict=True)]
        for is_same, peers in groupby(range(self.size()), same.__getitem__):
            run = list(peers)
            if is_same:
                first, end = run[0], run[-1] + 1
                output[targets[first] : targets[end]] = sent[sources[first] : sources[end]]
        return self._exchanged(others)

    def _exchanged(self, others: int) -> Any:
        """Return the handle of an exchange in which `others` bytes are for other ranks."""
        return self.arrive("exchange", others * self.size() / max(1, self.size() - 1))

    def recv(self, tensors: Sequence[Tensor], source: int, tag: int) -> Any:
        letter = self._posted[source, tag] = Letter(tensors[0])
        return letter

    def send(self, tensors: Sequence[Tensor], target: int, tag: int) -> Any:
        """Send to the last receive that was posted, in the order that `exchange` uses."""
        if (letter := self._posted.pop((target, tag), None)) is not None:
            letter.post(tensors[0])
            self.deliver(letter)
        return _done()

    def deliver(self, letter: Letter) -> None:
        """Deliver a message that was sent to a receive on the host."""
        letter.wait()
