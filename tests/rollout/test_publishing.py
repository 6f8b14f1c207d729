"""A receiver holds the bits of the newest version, whatever it has missed and whatever is damaged."""

import copy
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepspeed_compress.errors import RolloutError
from deepspeed_compress.rollout import DirectoryStore, Published, Publisher, Receiver


class Tied(nn.Module):
    """A model with a tied head, frozen parameters, and an empty one."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(50, 16, dtype=dtype)
        self.layer = nn.Linear(16, 16, dtype=dtype)
        self.head = nn.Linear(16, 50, bias=False, dtype=dtype)
        self.head.weight = self.embedding.weight
        self.frozen = nn.Parameter(torch.ones(7, dtype=dtype), requires_grad=False)
        self.empty = nn.Parameter(torch.empty(0, dtype=dtype))


def step(model: nn.Module, lr: float = 1e-4) -> None:
    """Move every trained value by about `lr`."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter += lr * torch.randn_like(parameter)


def assert_equal(receiver: nn.Module, trainer: nn.Module) -> None:
    for own, theirs in zip(receiver.parameters(), trainer.parameters(), strict=True):
        assert torch.equal(own, theirs.to(torch.bfloat16).to(own.dtype))


class Pair:
    """A trained model with its publisher, and a store."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.store, self.options = path, DirectoryStore(path), options
        self.model = Tied()
        self.publisher = Publisher(self.model, self.store, **options)

    def publish(self, versions: int = 1, lr: float = 1e-4) -> None:
        """Take a step and publish it, for each of `versions`."""
        for _ in range(versions):
            step(self.model, lr)
            self.publisher.publish()

    def send(self, full: bool = False) -> Published:
        """Publish the weights as they are."""
        published = self.publisher.publish(full)
        assert published is not None
        return published

    def restart(self) -> None:
        self.publisher = Publisher(self.model, self.store, **self.options)

    def receiver(self, dtype: torch.dtype = torch.bfloat16) -> Receiver:
        return Receiver(Tied(dtype), self.store)

    def check(self, receiver: Receiver) -> None:
        assert_equal(receiver._module, self.model)

    def blobs(self, kind: str) -> list[str]:
        return sorted(name for name in self.store.names() if f".{kind}" in name)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    torch.manual_seed(1)
    return Pair(tmp_path / "store")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_receiver_follows_version_by_version(pair: Pair, dtype: torch.dtype) -> None:
    receiver = pair.receiver(dtype)
    assert not receiver.update()
    for version in range(1, 6):
        published = pair.send()
        assert receiver.update()
        assert not receiver.update()
        assert (receiver.version, receiver.digest) == (version, published.digest)
        pair.check(receiver)
        step(pair.model)


def test_only_the_first_version_is_sent_whole(pair: Pair) -> None:
    first = pair.send()
    step(pair.model, 1e-5)
    second = pair.send()
    assert first.full_bytes > 0
    assert first.changed == 1.0
    assert second.full_bytes == 0
    assert 0 < second.changed < 0.1


def test_a_late_receiver_applies_all_changes_that_it_has_missed(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish()
    receiver.update()
    pair.publish(10, lr=1e-6)
    for name in pair.blobs("full"):
        pair.store.delete(name)
    receiver.update()
    pair.check(receiver)


def test_a_late_receiver_takes_a_full_copy_that_is_smaller_than_the_changes(tmp_path: Path) -> None:
    pair = Pair(tmp_path, full_every=12)
    receiver = pair.receiver()
    pair.publish()
    receiver.update()
    pair.publish(13, lr=1.0)
    assert [name[:12] for name in pair.blobs("full")] == ["000000000001", "000000000013"]
    for name in pair.blobs("changes")[:-1]:
        pair.store.delete(name)
    receiver.update()
    pair.check(receiver)


def test_a_new_receiver_takes_the_newest_full_copy_and_the_changes_after_it(tmp_path: Path) -> None:
    pair = Pair(tmp_path, full_every=4, keep_full=10)
    pair.publish(10)
    for name in pair.blobs("full")[:-1]:
        pair.store.delete(name)
    receiver = pair.receiver()
    receiver.update()
    pair.check(receiver)


@pytest.mark.parametrize("keep", [1, 2])
def test_the_store_stays_bounded_and_has_a_full_copy(tmp_path: Path, keep: int) -> None:
    pair = Pair(tmp_path, full_every=3, keep_full=keep)
    pair.publish(20)
    assert len(pair.blobs("full")) == keep
    assert len(pair.blobs("manifest")) <= 3 * keep
    receiver = pair.receiver()
    receiver.update()
    pair.check(receiver)


def test_every_counts_calls(tmp_path: Path) -> None:
    pair = Pair(tmp_path, every=3)
    published = [pair.publisher.publish() is not None for _ in range(7)]
    assert published == [True, False, False, True, False, False, True]
    assert pair.publisher.publish(full=True) is not None


def damage(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


class Unreliable(DirectoryStore):
    """Store whose answers pass through a function of the name, the number of the request, and the data."""

    def __init__(self, path: Path, answer: Callable[[str, int, bytes], bytes]) -> None:
        super().__init__(path)
        self._answer, self.requests = answer, list[str]()

    def get(self, name: str) -> bytes:
        self.requests.append(name)
        return self._answer(name, self.requests.count(name), super().get(name))


def test_a_damaged_part_is_fetched_again(pair: Pair) -> None:
    pair.publish(3)
    store = Unreliable(
        pair.path, lambda name, count, data: damage(data) if count == 1 and "manifest" not in name else data
    )
    receiver = Receiver(Tied(torch.bfloat16), store)
    receiver.update()
    pair.check(receiver)


def test_a_change_that_stays_damaged_is_replaced_by_a_full_copy(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish()
    receiver.update()
    pair.publish(1)
    pair.publisher.publish(full=True)
    pair.path.joinpath(pair.blobs("changes")[-2]).write_bytes(b"damaged")
    receiver.update()
    pair.check(receiver)


def test_a_version_without_an_intact_way_leaves_the_held_one(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish()
    receiver.update()
    before, version = copy.deepcopy(receiver._module), receiver.version
    pair.publish(1)
    for name in (*pair.blobs("changes"), *pair.blobs("full")):
        pair.path.joinpath(name).write_bytes(damage(pair.store.get(name)))
    with pytest.raises(RolloutError, match="has arrived damaged 3 times"):
        receiver.update()
    assert receiver.version == version
    assert_equal(receiver._module, before)


def test_a_module_that_other_code_has_changed_is_repaired_by_a_full_copy(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish()
    receiver.update()
    with torch.no_grad():
        receiver._module.layer.weight[0, 0] += 1  # type: ignore[union-attr,index,operator]
    pair.publish(1)
    receiver.update()
    pair.check(receiver)


def test_a_restarted_publisher_continues_the_chain_if_its_model_is_the_newest_version(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish(2)
    receiver.update()
    pair.restart()
    again = pair.send()
    assert (again.version, again.full_bytes, again.change_bytes) == (2, 0, 0)
    assert not receiver.update()
    step(pair.model)
    following = pair.send()
    assert (following.version, following.full_bytes) == (3, 0)
    receiver.update()
    pair.check(receiver)


def test_a_restarted_publisher_publishes_a_full_copy_on_request(pair: Pair) -> None:
    pair.publish(2)
    pair.restart()
    again = pair.send(full=True)
    assert again.version == 3
    assert again.full_bytes > 0


def test_a_restarted_publisher_sends_a_full_copy_of_another_model(pair: Pair) -> None:
    receiver = pair.receiver()
    pair.publish(2)
    receiver.update()
    step(pair.model)
    pair.restart()
    again = pair.send()
    assert again.version == 3
    assert again.full_bytes > 0
    receiver.update()
    pair.check(receiver)


def test_a_version_that_could_not_be_stored_is_followed_by_a_full_copy(pair: Pair, monkeypatch: Any) -> None:
    pair.publish(1)
    step(pair.model)

    def full_disk(name: str, data: bytes) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(pair.store, "put", full_disk)
        with pytest.raises(RolloutError, match="rank 0: OSError: No space left on device"):
            pair.publisher.publish()
    published = pair.send()
    assert published.full_bytes > 0
    receiver = pair.receiver()
    receiver.update()
    pair.check(receiver)


def test_an_asynchronous_version_has_the_weights_of_the_call(tmp_path: Path) -> None:
    pair = Pair(tmp_path, asynchronous=True)
    receiver = pair.receiver()
    assert pair.publisher.publish() is None
    for version in range(1, 6):
        before = copy.deepcopy(pair.model)
        step(pair.model)
        published = pair.publisher.wait()
        assert published is not None
        assert published.version == version
        receiver.update()
        assert_equal(receiver._module, before)
        pair.publisher.publish()
    assert pair.publisher.wait() is not None
    assert pair.publisher.wait() is None


def test_an_update_waits_for_requests_and_requests_wait_for_it(pair: Pair) -> None:
    receiver = pair.receiver()
    with pytest.raises(RolloutError, match="holds no version"), receiver.request():
        pass
    pair.publish()
    receiver.update()
    pair.publish(1)
    update = threading.Thread(target=receiver.update, daemon=True)
    with receiver.request() as version:
        update.start()
        update.join(0.1)
        assert update.is_alive()
        assert receiver.version == version
        with pytest.raises(RolloutError, match="would wait for itself"):
            receiver.update()
    update.join(10)
    with receiver.request() as version:
        assert version == 2
    pair.check(receiver)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda model: setattr(model, "extra", nn.Parameter(torch.ones(3))),
            "that are not published: extra",
        ),
        (lambda model: delattr(model, "layer"), 'no parameter "layer.weight"'),
        (lambda model: setattr(model, "layer", nn.Linear(16, 17)), r'"layer.weight" has the shape \(17, 16\)'),
        (lambda model: model.to(torch.float16), r"has the type torch.float16, which does not hold all values"),
    ],
)
def test_a_module_that_does_not_fit_is_refused_unchanged(
    pair: Pair, change: Callable[[nn.Module], Any], message: str
) -> None:
    pair.publish()
    module = Tied(torch.bfloat16)
    change(module)
    with pytest.raises(RolloutError, match=message):
        Receiver(module, pair.store).update()


def test_a_publisher_after_a_damaged_manifest_publishes_a_full_copy(pair: Pair) -> None:
    pair.publish(2)
    pair.path.joinpath(pair.blobs("manifest")[-1]).write_bytes(b"{")
    with pytest.raises(RolloutError, match="the manifest of version 2 is malformed"):
        pair.receiver().update()
    pair.restart()
    published = pair.send()
    assert (published.version, published.full_bytes > 0) == (3, True)
    receiver = pair.receiver()
    receiver.update()
    pair.check(receiver)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lossy_versions_are_the_same_for_all_receivers_and_their_errors_do_not_accumulate(
    dtype: str, tmp_path: Path
) -> None:
    """A version is off by half of a level at most, as each step has moved values by about 0.1."""
    pair = Pair(tmp_path, dtype=dtype, bits=4, full_every=5)
    early = pair.receiver(torch.float32)
    for version in range(1, 13):
        pair.publish(lr=0.1)
        early.update()
        late = pair.receiver(torch.float32)
        late.update()
        assert distance(early._module, late._module) == 0
        error = distance(early._module, pair.model)
        assert error < 0.05
        assert error > 0.01 or version == 1
    assert len(pair.blobs("full")) == 2


def distance(one: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between parameters."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((a - b).detach().abs().max().item() for a, b in pairs if a.numel())
