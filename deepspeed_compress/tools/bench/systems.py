"""Ways to train, made and ready to take steps: compute alone, DeepSpeed with and without the package, its peers."""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import Tensor

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.models import Layout, build_parallel, read_model_config
from deepspeed_compress.tools.bench import peers
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.peers import PEERS, Optimizer, TorchStepper
from deepspeed_compress.tools.bench.workload import Contender, Workload
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, Share, Stepper, share_of

__all__ = ["System", "compute_only", "make", "tokens"]

AT_ONCE = Optimizer()


@dataclass(frozen=True)
class System:
    """`stepper` takes optimizer steps on this rank's `share` of a batch. `session`: of the package, if it is there.

    It begins with `dense_steps` without compression. What is sent repeats after `period` steps.
    """

    stepper: Stepper
    share: Share
    close: Callable[[], object] = lambda: None
    session: Any = None
    dense_steps: int = 0
    period: int = 1

    @property
    def first_steps(self) -> int:
        """Those that are not measured: besides, ZeRO 3 records the order of layers, and memory is allocated."""
        return self.dense_steps + 2


def tokens(workload: Workload, share: Share) -> Tensor:
    """Random tokens [micro_batches, micro_size, seq_len], others on each rank of `share`."""
    vocabulary = read_model_config(Path(workload.model)).vocab_size
    generator = torch.Generator().manual_seed(workload.seed + 1 + share.rank)
    size = (share.micro_batches, share.micro_size, workload.seq_len)
    return torch.randint(vocabulary, size, generator=generator).to(device())


def make(workload: Workload, contender: Contender, optimizer: Optimizer = AT_ONCE, start: int = 0) -> System:
    """The contender on this rank. `optimizer`, and `start` as in `Peer`: of those that DeepSpeed does not train."""
    if contender.ds_config is not None:
        return _engine(workload, contender.ds_config)
    peer = PEERS[contender.kind]
    dense = 0 if peer.least_start is None else max(start, peer.least_start)
    stepper = peer.make(workload, optimizer, dense)
    return System(stepper, _whole(workload), stepper.close, stepper.session, dense, peer.period)


def compute_only(workload: Workload) -> System:
    """The whole model on one process with its share of the sequences, and nothing to communicate."""
    return System(TorchStepper(peers.alone(peers.bare_model(workload), 0), workload, AT_ONCE), _whole(workload))


def _whole(workload: Workload) -> Share:
    """Every rank has the whole model."""
    return Share(dist.get_rank(), dist.get_world_size(), *workload.share, dist.group.WORLD)


def _engine(workload: Workload, ds_config: Mapping[str, Any]) -> System:
    """An engine of DeepSpeed, of the package when `ds_config` has its section."""
    path, partition = Path(workload.model), workload.partition
    layout = Layout(
        workload.tensor,
        workload.pipeline,
        tuple(partition) if isinstance(partition, list) else partition,
        workload.recompute,
    )
    module: Any = build_parallel(path, read_model_config(path), workload.seed, layout)
    compressed = SECTION in ds_config
    initialize = deepspeed_compress.initialize if compressed else deepspeed.initialize
    # DeepSpeed may write into what it is given.
    made = initialize(model=module, model_parameters=list(module.parameters()), config=copy.deepcopy(dict(ds_config)))[
        0
    ]
    stepper = PipelineStepper(made) if workload.pipeline > 1 else PlainStepper(made)
    session: Any = made.compression if compressed else None
    section = session.config if compressed else None
    islands = section.islands if section is not None else None
    dense = 0 if section is None else max(section.schedule.warmup_steps, islands.warmup_steps if islands else 0)
    period = (islands.sync_steps if islands else None) or 1
    return System(stepper, share_of(made), made.destroy, session, dense, period)
