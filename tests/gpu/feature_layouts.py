"""Programs that try DDP, FSDP2, and models whose ranks hold different parts."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import Tensor, nn

import deepspeed_compress
from deepspeed_compress.config import SECTION
from tests.gpu.feature_settings import INT4, INT8, Training
from tests.gpu.feature_training import SIZES, Found, Place, Skipped, check, config_of, make_engine, take_steps
from tests.gpu.training import network


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
    whole = [parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter for parameter in parameters]
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
    engine, losses = make_engine(model, config), []
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
    engine = make_engine(model, config_of(Training(2, section), place), groups)
    losses = take_steps(engine, (x.bfloat16(), y.bfloat16()), 6)
    shared = [parameter for name, parameter in engine.module.named_parameters() if "deepspeed_experts" not in name]
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
    engine = make_engine(model, config_of(Training(1, section, accumulation=2), place))
    losses = [float(engine.train_batch(iter([(x.bfloat16(), y.bfloat16())] * 2))) for _ in range(6)]
    engine.destroy()
    return {"losses": losses, "weights": str(losses)}
