"""Weights that ranks of different nodes or islands have in common, those that they do not, and memory nobody wrote."""

from collections.abc import Mapping
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.linear import LoRAConfig, OptimizedLinear
from torch import nn

from deepspeed_compress.config import SECTION
from deepspeed_compress.local_sgd.deepspeed.exchanged_parameters import digest_parameters
from tests.support.forks import run_forks
from tests.support.jobs import WIDTH, Job, data, make_engine, run, weights

NODES: Mapping[str, Any] = {"gradients": {"method": "none"}, "parallelism": {"shard_within": 2}}
ISLANDS: Mapping[str, Any] = {"gradients": {"method": "none"}, "islands": {"size": 2, "sync_every": 2}}
OWN_DEFAULTS: Mapping[str, Any] = {"stage3_param_persistence_threshold": 100_000}
"""DeepSpeed's own value, with which small parameters are persistent."""


class Adapted(nn.Module):
    """A frozen layer, a different part of which is on each rank of the job, with an adapter."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        sharded = LoRAConfig(lora_r=2, lora_alpha=4, base_weight_sharding=ranks)
        self.base = OptimizedLinear(WIDTH, 8, lora_config=sharded, dtype=torch.float32, device="cpu")
        self.head = nn.Linear(8, 1)
        whole = torch.randn(8 * WIDTH)
        self.base.weight.data.copy_(whole.view(ranks, -1)[rank])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.base(x)))


def adapt(rank: int, job: Job) -> tuple[bool, list[float]]:
    """Return whether making an engine leaves the frozen layer as it is, and the losses."""
    deepspeed.init_distributed("gloo")
    model = Adapted(rank, dist.get_world_size())
    before = model.base.weight.detach().clone()
    engine = make_engine(
        model, job.config(), [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    return torch.equal(before, model.base.weight), run(engine, data(rank, job))


@pytest.mark.parametrize(("section", "stage"), [(NODES, 1), (ISLANDS, 0), (ISLANDS, 1)])
def test_parts_of_a_frozen_layer_stay_on_their_ranks(section: Any, stage: int) -> None:
    plain, found = (run_forks(4, adapt, Job(stage, section=one)) for one in (None, section))
    # Islands train on other means than the whole job.
    steps = 4 if section is NODES else 1
    for (is_same, ours), (_, theirs) in zip(found, plain, strict=True):
        assert is_same
        assert ours[:steps] == pytest.approx(theirs[:steps], rel=1e-5)


def frozen_model(rank: int, job: Job, garbage: float, frozen: float = 1.0) -> nn.Module:
    """Return a model, sharded over pairs of ranks, with frozen parameters of odd sizes and `garbage` in their padding.

    The last parts of the frozen parameters are `frozen`.
    """
    pairs = [dist.new_group([place, place + 1]) for place in range(0, dist.get_world_size(), 2)]
    file = {key: value for key, value in job.config().items() if key != SECTION}
    with deepspeed.zero.Init(config_dict_or_path=file, data_parallel_group=pairs[rank // 2]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, 9).requires_grad_(False), nn.Linear(9, 1))
    for parameter in model.parameters():
        part = parameter.ds_tensor
        numel = max(0, parameter.ds_numel - rank % 2 * part.ds_numel)
        part[numel:] = garbage
        if not parameter.requires_grad and rank % 2:
            part[:numel] = frozen
    return model


def start_sharded(rank: int, job: Job) -> dict[str, list[float]]:
    """Return the weights of nodes or islands that differ on every second rank, after a step."""
    deepspeed.init_distributed("gloo")
    model = frozen_model(rank, job, float(rank), frozen=float(rank))
    engine = make_engine(
        model, job.config(), [parameter for parameter in model.parameters() if parameter.requires_grad]
    )
    run(engine, data(rank, job)[:2])
    return weights(engine)


@pytest.mark.parametrize("threshold", [0, 100_000])
@pytest.mark.parametrize("section", [NODES, ISLANDS])
def test_ranks_that_disagree_about_changed_parts_begin_with_those_of_the_first(section: Any, threshold: int) -> None:
    job = Job(3, section=section, zero={"stage3_param_persistence_threshold": threshold})
    first, *others = run_forks(4, start_sharded, job, timeout=90)
    assert first["1.bias"][5:] == [1.0] * 4
    assert others == [first] * 3


def digest(rank: int, job: Job) -> tuple[str, str]:
    """Return the digests of a model's parts with two contents of their padding."""
    deepspeed.init_distributed("gloo")
    models = (frozen_model(rank, job, garbage) for garbage in (1.0, float("nan")))
    first, second = (digest_parameters(list(model.parameters())) for model in models)
    return first, second


def test_a_digest_does_not_depend_on_padding() -> None:
    for one, other in run_forks(2, digest, Job(3, zero=OWN_DEFAULTS)):
        assert one == other
