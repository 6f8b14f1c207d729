"""Programs that try one feature each, in a rank. They return losses and weights, and raise if a promise is broken."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.gpu.feature_settings import INT4, INT8, Training
from tests.gpu.training import digest, network, train_step

SIZES = {"cuda": (256, 4), "cpu": (48, 3)}
"""Width and number of layers by device."""
Found = dict[str, Any]


class Skipped(Exception):  # noqa: N818 - no error, but a feature that cannot be tried here
    """Reason why a feature cannot be tried here."""


@dataclass(frozen=True)
class Place:
    """Place of a rank: its device and backend, and a directory that all ranks share."""

    device: str
    backend: str
    directory: str

    def path(self, name: str) -> Path:
        return Path(self.directory) / name


def train(training: Training, place: Place) -> Found:
    """Return the losses and weights of a training that needs only settings."""
    found = _run(training, place)
    if training.repeats and (again := _run(training, place)) != found:
        raise AssertionError(f"a second run has other bits: {again} instead of {found}")
    return found


def _run(training: Training, place: Place) -> Found:
    with engine_of(training, place) as (engine, batch):
        return _found(engine, take_steps(engine, batch, training.steps * training.accumulation))


def take_steps(engine: Any, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    return [float(train_step(engine, *batch)) for _ in range(steps)]


def _found(engine: Any, losses: list[float], figure: str = "") -> Found:
    return {"losses": losses, "weights": digest(engine), "figure": figure}


@contextmanager
def engine_of(training: Training, place: Place) -> Iterator[tuple[Any, tuple[Tensor, Tensor]]]:
    """Return an engine for a small network, and this rank's batch in the type of its weights."""
    width, layers = SIZES[place.device]
    model, batch = network(width, layers)
    engine = _engine(model, config_of(training, place))
    try:
        kind = next(engine.module.parameters()).dtype
        yield engine, (batch[0].to(kind), batch[1].to(kind))
    finally:
        engine.destroy()


def _engine(model: nn.Module, config: Mapping[str, Any], parameters: Any = None) -> Any:
    given = list(model.parameters()) if parameters is None else parameters
    return deepspeed_compress.initialize(model=model, model_parameters=given, config=config)[0]


def config_of(training: Training, place: Place) -> dict[str, Any]:
    width, _ = SIZES[place.device]
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": training.accumulation,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.95], "torch_adam": True}},
        "zero_optimization": {"stage": training.stage, "reduce_bucket_size": 2 * width * width},
        SECTION: {"monitor": {"announce": False}, **training.section},
        **training.extra,
    }


def auto(place: Place) -> Found:
    """Compare compressed with uncompressed steps, and train on with whichever is faster."""
    training = Training(2, {"preset": "auto", "auto": {"steps": 3}})
    with engine_of(training, place) as (engine, batch):
        losses = take_steps(engine, batch, 17)
        events = [one.kind for one in engine.compression.events]
        check(events == ["auto"], f"expected the event auto, got {events}")
        return _found(engine, losses, f"then {engine.compression.settings}")


def accumulate_without_sync(place: Place) -> Found:
    """Reduce gradients only in the last of several micro-steps."""
    with engine_of(Training(1, {"gradients": INT4}), place) as (engine, batch):
        losses = []
        for count in (3, 2, 1, 2):
            with engine.no_sync():
                for _ in range(count - 1):
                    engine.backward(engine(*batch))
            losses.append(float(train_step(engine, *batch)))
        return _found(engine, losses)


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
        kinds = [one.kind for one in engine.compression.events]
        check(kinds[:1] == ["anomaly"] and "return" in kinds, f"expected an anomaly and a return, got {kinds}")
        return _found(engine, losses)


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
        return _found(engine, losses + take_steps(engine, batch, 4))


def _step_with(engine: Any, batch: tuple[Tensor, Tensor], factor: float) -> None:
    engine.backward(engine(*batch) * factor)
    engine.step()


def residuals(engine: Any) -> dict[str, list[bytes]]:
    """Return the bytes of all residuals, without updates that a skipped step discards."""
    stores = engine.compression.stores.items()
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
        found = _found(engine, losses)
    with engine_of(training, place) as (engine, batch):
        check(engine.load_checkpoint(path)[0] is not None, "no checkpoint was found")
        again = _found(engine, losses[:3] + take_steps(engine, batch, 3))
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
        found = _found(engine, take_steps(engine, batch, training.steps))
    steps = [one.step for one in figures]
    check(dist.get_rank() > 0 or steps == [1, 2, 3, 4, 5, 6], f"expected figures of steps 1 to 6, got {steps}")
    check(all(one.ratio > 3 and one.compress_ms > 0 for one in figures), f"odd figures: {figures}")
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
        return _found(engine, losses)


def train_islands(place: Place) -> Found:
    """Train two islands of one rank, which exchange every second step."""
    islands = {"size": 1, "sync_every": 2, "exchange": {"method": "blockwise", "bits": 4}, "second_moments": {}}
    with engine_of(Training(1, {"gradients": {"method": "none"}, "islands": islands}), place) as (engine, batch):
        losses = []
        for step in range(1, 9):
            losses += take_steps(engine, batch, 1)
            equal = _is_equal_on_all(digest(engine))
            check(equal == (step % 2 == 0), f"after step {step} islands have {'equal' if equal else 'other'} weights")
        return _found(engine, losses)


def train_elastic(place: Place) -> Found:
    """Train an island of two ranks that exchanges in rounds, alone, and copy the anchor that others would take."""
    from deepspeed_compress.local_sgd.coordinator.server import island_server

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
            return _found(engine, losses)


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
            return _found(engine, losses)


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


def train_ddp(place: Place) -> Found:
    """Train under DDP in mixed precision, save, and resume."""
    from torch.nn.parallel import DistributedDataParallel

    def wrap(model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, bucket_cap_mb=0.25)

    return _without_deepspeed(place, wrap, deepspeed_compress.ddp.attach, {"gradients": INT4})


def train_fsdp2(place: Place) -> Found:
    """Train under FSDP2 in mixed precision with compressed weights, save, and resume."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13):
        raise Skipped(f"needs torch 2.13, not {torch.__version__}")
    mesh = init_device_mesh(place.device, (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def wrap(model: nn.Module) -> nn.Module:
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    return _without_deepspeed(place, wrap, deepspeed_compress.fsdp2.attach, {"gradients": INT4, "weights": INT8})


def _without_deepspeed(
    place: Place, wrap: Callable[[nn.Module], nn.Module], attach: Callable[..., Any], section: Mapping[str, Any]
) -> Found:
    """Train six steps, and the last three again from what was saved before them."""
    path = str(place.path(f"state_{attach.__module__}"))
    model, optimizer, attached, batch = _attached(place, wrap, attach, section)
    losses = _plain_steps(model, optimizer, batch, 3)
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    attached.save(path)
    losses += _plain_steps(model, optimizer, batch, 3)
    again, other, attached, batch = _attached(place, wrap, attach, section)
    again.load_state_dict(saved)
    attached.load(path)
    repeated = losses[:3] + _plain_steps(again, other, batch, 3)
    check(repeated == losses, f"a resumed run has the losses {repeated} instead of {losses}")
    return {"losses": losses, "weights": _digest_of(model.parameters())}


def _attached(
    place: Place, wrap: Callable[[nn.Module], nn.Module], attach: Callable[..., Any], section: Mapping[str, Any]
) -> tuple[nn.Module, Any, Any, tuple[Tensor, Tensor]]:
    model, batch = network(*SIZES[place.device])
    model = wrap(model.to(batch[0].device))
    # An optimizer without a state of its own.
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    attached = attach(model, {SECTION: {"monitor": {"announce": False}, **section}}, optimizer)
    return model, optimizer, attached, batch


def _plain_steps(model: nn.Module, optimizer: Any, batch: tuple[Tensor, Tensor], steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast(batch[0].device.type, torch.bfloat16):
            loss = model(*batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def _digest_of(parameters: Iterable[Any]) -> str:
    whole = [one.full_tensor() if hasattr(one, "full_tensor") else one for one in parameters]
    return str(hash(tuple(float(one.detach().double().sum()) for one in whole)))


def split_layers(place: Place) -> Found:
    """Train a Llama whose layers two ranks share, with compressed sums."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    section = {"gradients": {"method": "none"}, "activations": {"tensor": {"bits": 8}}}
    config = config_of(Training(1, section, {"tensor_parallel": {"autotp_size": 2}}), place)
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(1))
    tokens = tokens.to(get_accelerator().current_device_name())
    engine, losses = _engine(model, config), []
    for _ in range(6):
        loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    engine.destroy()
    # Each rank has weights of its own, but both compute the same losses.
    return {"losses": losses, "weights": str(losses)}


class _Experts(nn.Module):
    """Squared error of two linear layers with experts between them, which two ranks share."""

    def __init__(self, width: int) -> None:
        from deepspeed.moe.layer import MoE

        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        options = {"num_experts": 4, "ep_size": 2, "k": 2, "min_capacity": 0, "top2_2nd_expert_sampling": False}
        self.experts = MoE(width, nn.Linear(width, width), **options)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.first(x)
        return nn.functional.mse_loss(self.last(x + self.experts(x)[0].tanh()).float(), y.float())


def spread_experts(place: Place) -> Found:
    """Train experts that are spread over two ranks, with compressed tokens."""
    from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer

    width, _ = SIZES[place.device]
    _, (x, y) = network(*SIZES[place.device])
    torch.manual_seed(0)
    model = _Experts(width)
    section = {"gradients": INT4, "activations": {"experts": {"dispatch": {}, "combine": {}}}}
    groups = split_params_into_different_moe_groups_for_optimizer({"params": list(model.parameters()), "name": "all"})
    engine = _engine(model, config_of(Training(2, section), place), groups)
    losses = take_steps(engine, (x.bfloat16(), y.bfloat16()), 6)
    shared = [one for name, one in engine.module.named_parameters() if "deepspeed_experts" not in name]
    found = {"losses": losses, "weights": _digest_of(shared)}
    engine.destroy()
    return found


def train_pipeline(place: Place) -> Found:
    """Train a pipeline of two stages, with compressed activations between them."""
    from deepspeed.pipe import PipelineModule

    if place.device == "cuda" and place.backend == "gloo":
        raise Skipped("gloo does not send tensors of a GPU, as DeepSpeed's pipelines do; needs two GPUs")
    width, layers = SIZES[place.device]
    _, (x, y) = network(width, layers)
    torch.manual_seed(0)
    stack = [one for _ in range(layers + 1) for one in (nn.Linear(width, width), nn.GELU())]
    model = PipelineModule(stack, num_stages=2, loss_fn=nn.MSELoss())
    section = {"gradients": {"method": "none"}, "activations": {"pipeline": {"bits": 8}}}
    engine = _engine(model, config_of(Training(1, section, accumulation=2), place))
    losses = [float(engine.train_batch(iter([(x.bfloat16(), y.bfloat16())] * 2))) for _ in range(6)]
    engine.destroy()
    return {"losses": losses, "weights": str(losses)}


def check(holds: bool, problem: str) -> None:
    """Raise an AssertionError with `problem` unless it `holds`."""
    if not holds:
        raise AssertionError(problem)
