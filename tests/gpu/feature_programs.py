"""Programs that try one feature of DeepSpeed engines each. They raise an error if the feature breaks a promise."""

import math
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor

from tests.gpu.feature_settings import INT4, Training
from tests.gpu.feature_training import SIZES, Found, Place, Skipped, check, describe, engine_of, take_steps
from tests.gpu.training import digest, network, train_step


def auto(place: Place) -> Found:
    """Compare compressed with uncompressed steps, and train on with whichever is faster."""
    training = Training(2, {"preset": "auto", "auto": {"steps": 3}})
    with engine_of(training, place) as (engine, batch):
        losses = take_steps(engine, batch, 23)
        events = [event.kind for event in engine.compression.events]
        check(events == ["auto"], f"expected the event auto, got {events}")
        return describe(engine, losses, f"then {engine.compression.settings}")


def accumulate_without_sync(place: Place) -> Found:
    """Reduce gradients only in the last of several micro-steps."""
    with engine_of(Training(1, {"gradients": INT4}), place) as (engine, batch):
        losses = []
        for count in (3, 2, 1, 2):
            with engine.no_sync():
                for _ in range(count - 1):
                    engine.backward(engine(*batch))
            losses.append(float(train_step(engine, *batch)))
        return describe(engine, losses)


def survive_nan(place: Place) -> Found:
    """Skip a step in which one rank has a gradient that is not finite."""
    training = Training(2, {"gradients": INT4, "guard": {"cooldown_steps": 2}})
    with engine_of(training, place) as (engine, batch):
        losses = take_steps(engine, batch, 3)
        before = digest(engine), residuals(engine)
        _step_with(engine, batch, math.nan if dist.get_rank() == 1 else 1.0)
        check(engine.skipped_steps == 1, f"expected one skipped step, got {engine.skipped_steps}")
        check(before == (digest(engine), residuals(engine)), "a skipped step has changed weights or residuals")
        losses += take_steps(engine, batch, 6)
        kinds = [event.kind for event in engine.compression.events]
        check(kinds[:1] == ["anomaly"] and "return" in kinds, f"expected an anomaly and a return, got {kinds}")
        return describe(engine, losses)


def scale_losses(place: Place) -> Found:
    """Train in fp16, with a loss scale that falls when a gradient is not finite."""
    if place.device == "cpu":
        # Every CPU supports fp16, but DeepSpeed accepts only those that are fast at it.
        get_accelerator().is_fp16_supported = lambda: True
    extra = {"bf16": {"enabled": False}, "fp16": {"enabled": True, "initial_scale_power": 8, "hysteresis": 1}}
    with engine_of(Training(2, {"gradients": INT4, "weights": INT4}, extra), place) as (engine, batch):
        losses = take_steps(engine, batch, 2)
        before, scale = digest(engine), engine.optimizer.cur_scale
        _step_with(engine, batch, math.inf if dist.get_rank() == 1 else 1.0)
        check(engine.optimizer.cur_scale == scale / 2, f"the scale went from {scale} to {engine.optimizer.cur_scale}")
        check(before == digest(engine), "a skipped step has changed weights")
        return describe(engine, losses + take_steps(engine, batch, 4))


def _step_with(engine: Any, batch: tuple[Tensor, Tensor], factor: float) -> None:
    engine.backward(engine(*batch) * factor)
    engine.step()


def residuals(engine: Any) -> dict[str, list[bytes]]:
    """Return the bytes of all residuals, without updates that a skipped step discards."""
    stores = engine.compression.residuals.by_name.items()
    return {
        name: [payload.contiguous().view(torch.uint8).cpu().numpy().tobytes() for _, payload in store.payloads()]
        for name, store in stores
    }


def resume(place: Place) -> Found:
    """Save in the background while training goes on, and resume."""
    path = str(place.path("checkpoint"))
    training = Training(2, {"gradients": INT4, "weights": INT4, "checkpointing": {}})
    with engine_of(training, place) as (engine, batch):
        losses = take_steps(engine, batch, 3)
        engine.save_checkpoint(path)
        losses += take_steps(engine, batch, 3)
        found = describe(engine, losses)
    with engine_of(training, place) as (engine, batch):
        check(engine.load_checkpoint(path)[0] is not None, "no checkpoint was found")
        again = describe(engine, losses[:3] + take_steps(engine, batch, 3))
    check(again == found, f"a resumed run has other bits: {again} instead of {found}")
    return found


def write_statistics(place: Place) -> Found:
    """Write figures of every step."""
    path = place.path("statistics")
    monitor = {"path": str(path), "every": 1, "cosine_every": 2, "announce": False}
    training = Training(2, {"gradients": INT4, "monitor": monitor}, steps=6)
    with engine_of(training, place) as (engine, batch):
        figures: list[Any] = []
        engine.compression.subscribe(figures.append)
        found = describe(engine, take_steps(engine, batch, training.steps))
    steps = [figure.step for figure in figures]
    check(dist.get_rank() > 0 or steps == [1, 2, 3, 4, 5, 6], f"expected figures of steps 1 to 6, got {steps}")
    check(all(figure.ratio > 3 and figure.compress_ms > 0 for figure in figures), f"odd figures: {figures}")
    if dist.get_rank() == 0:
        lines = (path / "compression.jsonl").read_text().splitlines()
        check(len(lines) == training.steps, f"expected {training.steps} lines, got {len(lines)}")
    return found


def publish(place: Place) -> Found:
    """Publish the weights after every step, and receive them on every rank."""
    if find_spec("zstandard") is None:
        raise Skipped("needs zstandard, which --wheels may bring")
    from deepspeed_compress.rollout import DirectoryStore, Receiver

    path, losses = place.path("rollout"), []
    rollout = {"directory": str(path), "every": 1, "full_every": 2}
    with engine_of(Training(2, {"gradients": INT4, "rollout": rollout}), place) as (engine, batch):
        policy = network(*SIZES[place.device])[0].to(batch[0].device, torch.bfloat16)
        receiver = Receiver(policy, DirectoryStore(path))
        for _ in range(4):
            losses += take_steps(engine, batch, 1)
            published = engine.rollout.wait()
            check(receiver.update(), "no new version was received")
            check(published is not None and receiver.digest == published.digest, "another digest was received")
            for own, received in zip(engine.module.parameters(), policy.parameters(), strict=True):
                check(torch.equal(own, received), "other weights were received")
            dist.barrier()
        return describe(engine, losses)


def train_islands(place: Place) -> Found:
    """Train two islands of one rank, which exchange every second step."""
    islands = {"size": 1, "sync_every": 2, "exchange": {"method": "blockwise", "bits": 4}, "second_moments": {}}
    with engine_of(Training(1, {"gradients": {"method": "none"}, "islands": islands}), place) as (engine, batch):
        losses = []
        for step in range(1, 9):
            losses += take_steps(engine, batch, 1)
            equal = _is_equal_on_all(digest(engine))
            check(equal == (step % 2 == 0), f"after step {step} islands have {'equal' if equal else 'other'} weights")
        return describe(engine, losses)


def train_elastic(place: Place) -> Found:
    """Train an island of two ranks that exchanges in rounds, alone, and copy the anchor that others would take."""
    from deepspeed_compress.local_sgd.coordinator.coordinator import island_server

    with _served(partial(island_server, None, "127.0.0.1", 0)) as address:
        elastic = {"rendezvous": address, "minimum": 1, "timeout": "5 s", "give_up": "20 s"}
        with engine_of(_island(elastic), place) as (engine, batch):
            losses = take_steps(engine, batch, 8)
            islands = engine.compression.islands
            check(any(one.kind == "exchange" for one in islands.history), f"no exchange in {list(islands.history)}")
            exchange = islands.exchange
            _, _, copy = exchange.shared_anchor.copy(exchange.version)
            payloads = [payload.cpu() for _, payload in exchange.stores.by_name["anchor"].payloads()]
            check(torch.equal(copy["anchor"].view(torch.uint8), torch.cat(payloads)), "the copy of the anchor differs")
            return describe(engine, losses)


def train_asynchronous(place: Place) -> Found:
    """Train an island of two ranks that pushes its changes to a parameter server."""
    from deepspeed_compress.local_sgd.parameter_server.server import Server

    with _served(partial(Server, None, "127.0.0.1", 0)) as address:
        elastic = {"rendezvous": address, "give_up": "20 s", "parameter_server": {}}
        with engine_of(_island(elastic), place) as (engine, batch):
            islands, losses = engine.compression.islands, []
            for _ in range(2):
                losses += take_steps(engine, batch, 4)
                islands.exchange.finish(20)
            kinds = {one.kind for one in islands.history}
            check(islands.exchange.version > 1, f"no push was taken, but {kinds}")
            return describe(engine, losses)


def _island(elastic: Mapping[str, Any]) -> Training:
    islands = {"sync_every": 2, "exchange": {"method": "blockwise", "bits": 4}, "elastic": elastic}
    return Training(1, {"gradients": INT4, "islands": islands})


@contextmanager
def _served(make: Callable[[], Any]) -> Iterator[str]:
    """Run a server in a thread of the first rank, and return its address on all ranks."""
    server = make() if dist.get_rank() == 0 else None
    if server is not None:
        threading.Thread(target=server.run, daemon=True).start()
    told = [server and f"127.0.0.1:{server.port}"]
    dist.broadcast_object_list(told, src=0)
    try:
        yield str(told[0])
    finally:
        if server is not None:
            server.stop()


def _is_equal_on_all(value: object) -> bool:
    gathered: list[object] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return all(one == gathered[0] for one in gathered)
