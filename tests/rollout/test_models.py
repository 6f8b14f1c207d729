"""Models that publishers and receivers refuse by name, and values that they hold bit for bit."""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.errors import ConfigError, RolloutError, UnsupportedError
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from deepspeed_compress.rollout.changes import apply, encode_lossy
from tests.support.forks import run_forks

KINDS: Mapping[torch.dtype, Any] = {torch.bfloat16: "bf16", torch.float16: "fp16"}


class Values(nn.Module):
    """A model of one tensor of any shape."""

    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.values = nn.Parameter(values)


def nans(dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return every number of 16 bits, with all NaNs and both zeros, and a length that is no multiple of a vector's."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    return torch.cat([every, every[-3:]]).view(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("is_wide", [False, True])
def test_every_number_of_16_bits_arrives(is_wide: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """In a wider module, NaNs have other bits."""
    wide, kind, every = torch.float32 if is_wide else dtype, KINDS[dtype], nans(dtype)
    every = every[~every.isnan()] if is_wide else every
    trained, store = Values(torch.zeros_like(every)), DirectoryStore(tmp_path)
    publisher, receiver = Publisher(trained, store, kind), Receiver(Values(torch.zeros(len(every), dtype=wide)), store)
    for values in (every, every.roll(1), torch.zeros_like(every), every):
        trained.values.data.copy_(values)
        publisher.publish()
        assert receiver.update()
        held = receiver._module.get_parameter("values")
        assert torch.equal(held.view(torch.uint8), values.to(wide).view(torch.uint8))


def test_shapes_without_a_dimension_and_without_order_arrive(tmp_path: Path) -> None:
    trained = nn.ModuleList([Values(torch.tensor(1.5)), Values(torch.randn(6, 4).t()), Values(torch.empty(0, 3))])
    trained[0].values.requires_grad_(False)
    plain = nn.ModuleList([Values(torch.zeros(one.values.shape)) for one in trained])
    publisher, receiver = Publisher(trained, DirectoryStore(tmp_path)), Receiver(plain, DirectoryStore(tmp_path))
    for _ in range(2):
        publisher.publish()
        assert receiver.update()
        for own, theirs in zip(plain.parameters(), trained.parameters(), strict=True):
            assert torch.equal(own, theirs.bfloat16().float())
        with torch.no_grad():
            for parameter in trained.parameters():
                parameter += 1


class Codes(nn.Parameter):
    """Parameter of packed codes, as those of bitsandbytes."""


def described(codes: Tensor) -> nn.Parameter:
    found = nn.Parameter(codes)
    found.quant_state = "nf4"  # type: ignore[attr-defined]
    return found


@pytest.mark.parametrize("pack", [Codes, described])
def test_packed_codes_are_refused_in_any_type(pack: Callable[[Tensor], nn.Parameter], tmp_path: Path) -> None:
    """Their bits would be rounded to the type of the published weights."""
    trained = Values(torch.zeros(3))
    trained.values = pack(torch.randn(3))
    with pytest.raises(UnsupportedError, match='"values" is quantized'):
        Publisher(trained, DirectoryStore(tmp_path)).publish()


def test_parameters_without_values_are_refused(tmp_path: Path) -> None:
    store, meta = DirectoryStore(tmp_path), Values(torch.empty(3, device="meta"))
    with pytest.raises(UnsupportedError, match='parameter "values" is on the meta device'):
        Publisher(meta, store)
    Publisher(Values(torch.ones(3)), store).publish()
    with pytest.raises(RolloutError, match='"values" is on the meta device or not contiguous'):
        Receiver(meta, store).update()


def test_parts_of_a_frozen_layer_are_refused(tmp_path: Path) -> None:
    """Each rank holds another part under the same name."""
    part = Values(torch.zeros(8))
    part.values.ds_optim_param = True
    with pytest.raises(UnsupportedError, match='parameter "values" is divided over the ranks by LoRAConfig'):
        Publisher(part, DirectoryStore(tmp_path))


def test_parameters_that_are_split_without_a_record_are_refused(tmp_path: Path) -> None:
    """As by AutoTP of older versions of DeepSpeed, which the message names."""
    split = Values(torch.zeros(2, 2))
    split.values.tensor_model_parallel = True
    with pytest.raises(UnsupportedError, match="nothing tells how, as AutoTP does since DeepSpeed"):
        Publisher(split, DirectoryStore(tmp_path))


def test_one_parameter_for_two_that_are_published_is_refused(tmp_path: Path) -> None:
    store, tied = DirectoryStore(tmp_path), nn.ModuleList([Values(torch.ones(3)), Values(torch.ones(3))])
    Publisher(tied, store).publish()
    tied[1].values = tied[0].values
    with pytest.raises(RolloutError, match=r'"0\.values" and "1\.values" are one parameter'):
        Receiver(tied, store).update()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_model_that_has_got_or_lost_parameters_is_refused(asynchronous: bool, tmp_path: Path) -> None:
    model, store = nn.ModuleList([Values(torch.ones(3)), Values(torch.ones(4))]), DirectoryStore(tmp_path)
    publisher = Publisher(model, store, asynchronous=asynchronous)
    publisher.publish()
    publisher.wait()
    before = copy.deepcopy(model)
    model.append(Values(torch.ones(2)))
    with pytest.raises(RolloutError, match=r"added, removed or resized .*: 2\.values; make a new Publisher"):
        publisher.publish() or publisher.wait()
    del model[1:]
    with pytest.raises(RolloutError, match=r"added, removed or resized .*: 1\.values; make a new Publisher"):
        publisher.publish() or publisher.wait()
    again = Publisher(model, store).publish()
    assert again is not None
    assert again.full_bytes > 0
    Receiver(model, store).update()
    with pytest.raises(RolloutError, match=r"that are not published: 1\.values"):
        Receiver(before, store).update()


def change_one_rank(rank: int, path: Path) -> str:
    dist.init_process_group("gloo")
    model = nn.ModuleList([Values(torch.ones(3))])
    publisher = Publisher(model, DirectoryStore(path))
    publisher.publish()
    if rank == 1:
        model.append(Values(torch.ones(2)))
    with pytest.raises(RolloutError) as raised:
        publisher.publish()
    return str(raised.value)


def test_an_error_of_one_rank_is_raised_on_all(tmp_path: Path) -> None:
    assert all("rank 1: UnsupportedError: param" in text for text in run_forks(2, change_one_rank, tmp_path))


def received(store: DirectoryStore, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the three values that a new receiver takes from `store`."""
    model = Values(torch.zeros(3, dtype=dtype))
    Receiver(model, store).update()
    return model.values.detach()


def test_two_publishers_on_one_store_notice_each_other(tmp_path: Path) -> None:
    first, second = (Values(torch.full((3,), value)) for value in (1.0, 2.0))
    store = DirectoryStore(tmp_path)
    mine = Publisher(first, store)
    mine.publish()
    Publisher(second, store).publish()
    with pytest.raises(RolloutError, match="another publisher has written version 2 to the same store"):
        mine.publish()
    assert torch.equal(received(store), second.values)


class Interrupted(DirectoryStore):
    """Store that calls a function once, after it has stored the next blob."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.interrupt: Callable[[], object] = lambda: None

    def put(self, name: str, data: bytes) -> None:
        super().put(name, data)
        interrupt, self.interrupt = self.interrupt, lambda: None
        interrupt()


def test_a_publisher_that_another_one_interrupts_does_not_replace_its_parts(tmp_path: Path) -> None:
    first, second = (Values(torch.full((3,), value)) for value in (1.0, 2.0))
    store = Interrupted(tmp_path)
    mine = Publisher(first, store)
    mine.publish()
    store.interrupt = Publisher(second, DirectoryStore(tmp_path)).publish
    with pytest.raises(RolloutError, match="another publisher has written version 2"):
        mine.publish(full=True)
    assert torch.equal(received(store), second.values)


def test_a_value_that_is_too_large_for_fp16_is_refused(tmp_path: Path) -> None:
    publisher = Publisher(Values(torch.tensor([1.0, -65520.0])), DirectoryStore(tmp_path), dtype="fp16")
    with pytest.raises(RolloutError, match='parameter "values" has values above 65,504, the largest number of fp16'):
        publisher.publish()


def test_infinities_of_training_and_values_that_round_to_the_largest_number_are_published_as_fp16(
    tmp_path: Path,
) -> None:
    trained, store = Values(torch.tensor([65519.0, -torch.inf, torch.nan])), DirectoryStore(tmp_path)
    Publisher(trained, store, dtype="fp16").publish()
    assert str(received(store, torch.float16).tolist()) == "[65504.0, -inf, nan]"


@pytest.mark.parametrize(
    ("option", "value"), [("every", 0), ("full_every", 0), ("keep_full", 0), ("bits", 3), ("dtype", "bfloat16")]
)
def test_options_that_cannot_be_are_refused(option: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"{option} {value!r}"):
        Publisher(Values(torch.ones(3)), DirectoryStore(tmp_path), **{option: value})


def test_a_lossy_change_leads_to_no_infinity() -> None:
    """The largest code of a block may be a rounding error above the largest fp16 number."""
    old = torch.zeros(256, dtype=torch.float16)
    old[0] = 32000
    for value in range(65504, 65024, -32):
        new = old.clone()
        new[0], new[1] = value, -value
        expected, held = new.clone(), old.clone()
        apply(encode_lossy(old, expected, 4), held)
        assert torch.equal(held, expected)
        assert held.isfinite().all()
