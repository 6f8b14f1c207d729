"""Part 3, as far as there is no GPU: every method is looked at, and what waits is named."""

from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import torch.distributed as dist

from deepspeed_compress.collectives.exchange import Link, exchange
from deepspeed_compress.config import SECTION, AnyCompressedGradients, parse_section
from deepspeed_compress.tools.gpu_check import synchronisation
from deepspeed_compress.tools.gpu_check.findings import Task
from deepspeed_compress.tools.gpu_check.mirror import Late, Mirror
from deepspeed_compress.tools.gpu_check.synchronisation import SECTIONS, WEIGHTS, place_of

TASK = Task("cpu", 60, Path())


def test_every_method_is_looked_at() -> None:
    looked = {parse_section({SECTION: {"gradients": dict(one)}}).gradients.method for one in SECTIONS.values()}
    known = {
        name for model in get_args(AnyCompressedGradients) for name in get_args(model.model_fields["method"].annotation)
    }
    assert looked == known


def test_every_exchange_goes_through() -> None:
    found = list(synchronisation.findings(TASK))
    assert [one.what for one in found] == [*SECTIONS, *WEIGHTS]
    assert {(one.verdict, one.why) for one in found} == {("not run", "needs CUDA; the exchange itself goes through")}


def test_a_method_that_raises_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synchronisation, "SECTIONS", {"odd": {"method": "no such"}, "bf16": {"method": "bf16"}})
    monkeypatch.setattr(synchronisation, "WEIGHTS", {})
    odd, other = synchronisation.findings(TASK)
    assert (odd.verdict, other.verdict) == ("fail", "not run")
    assert "no such" in odd.why


def test_what_waits_is_named_by_our_line() -> None:
    group: Any = Mirror(0, 2)
    with pytest.raises(AttributeError) as caught:
        Link(group).start([None, None], [torch.ones(1), None], 0)  # type: ignore[list-item]
    place = place_of(caught.value)
    assert place.startswith("collectives/exchange.py:")
    assert "incoming[one].numel()" in place


def test_a_mirror_gives_back_what_it_is_sent() -> None:
    group: Any = Mirror(0, 2)
    outgoing = [torch.empty(0, dtype=torch.uint8), torch.arange(9, dtype=torch.uint8)]
    for length, expected in ((9, outgoing[1]), (7, torch.zeros(7, dtype=torch.uint8))):
        incoming = [outgoing[0], torch.full((length,), 5, dtype=torch.uint8)]
        exchange(group, outgoing, incoming)
        assert incoming[1].equal(expected)
        group.alltoall([outgoing[0], incoming[1].fill_(5)], outgoing).wait()
        assert incoming[1].equal(expected)


def test_a_late_message_is_there_when_it_was_waited_for() -> None:
    group: Any = Mirror(0, 2)
    group.late = Late("cpu", 1)
    nothing = torch.empty(0, dtype=torch.uint8)
    sent, received = torch.arange(9, dtype=torch.uint8), torch.full((9,), 5, dtype=torch.uint8)
    pending = Link(group).start([nothing, sent], [nothing, received], 0)
    assert received.tolist() == [5] * 9
    pending.finish()
    assert received.equal(sent)


def test_what_was_never_sent_are_zeros() -> None:
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
