"""Systems ready to take steps: pure computation, DeepSpeed with and without the package, and its peers.

With sequence parallelism, attention of transformers runs on Ulysses, and steps are on parts of sequences.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepspeed_compress.config import SECTION, CompressConfig
from deepspeed_compress.models import Layout, build_parallel, read_model_config
from deepspeed_compress.tools.bench.gauges import device
from deepspeed_compress.tools.bench.peers import PEERS, Optimizer, Peer, TorchStepper, add_adapters, bare_model
from deepspeed_compress.tools.bench.workload import Contender, Workload
from deepspeed_compress.training.setup import make_engine
from deepspeed_compress.training.stepper import PipelineStepper, PlainStepper, Share, Stepper, share_of

CONSTANT_RATE = Optimizer()


@dataclass(frozen=True)
class System:
    """System that trains the workload.

    Attributes:
        stepper: Stepper that takes optimizer steps on this rank's `share` of a batch.
        share: Share of this rank.
        close: Function that releases the system.
        session: The package's session if it is used, else None.
        dense_steps: Number of uncompressed steps at the start.
        period: Number of steps after which the traffic pattern repeats.
    """

    stepper: Stepper
    share: Share
    close: Callable[[], object] = lambda: None
    session: Any = None
    dense_steps: int = 0
    period: int = 1

    @property
    def first_steps(self) -> int:
        """Return the number of steps that are not measured.

        Two follow the dense ones, in which ZeRO 3 records the order of layers and memory is allocated.
        """
        return self.dense_steps + 2


def tokens(workload: Workload, share: Share) -> Tensor:
    """Return random tokens (micro_batches, micro_size, seq_len), different on each rank of `share`."""
    vocabulary = read_model_config(Path(workload.model)).vocab_size
    generator = torch.Generator().manual_seed(workload.seed + 1 + share.rank)
    size = (share.micro_batches, share.micro_size, workload.seq_len)
    return torch.randint(vocabulary, size, generator=generator).to(device())


def make(
    workload: Workload,
    contender: Contender,
    optimizer: Optimizer = CONSTANT_RATE,
    start: int = 0,
    peers: Mapping[str, Peer] = PEERS,
) -> System:
    """Create the contender on this rank.

    Args:
        workload: Model and batch to compute.
        contender: Contender to create.
        optimizer: Optimizer of a contender that DeepSpeed does not train.
        start: Number of dense steps of such a contender, as in `Peer`.
        peers: Peers by kind.
    """
    if contender.ds_config is not None:
        return _engine(workload, contender.ds_config)
    peer = peers[contender.kind]
    dense = 0 if peer.least_start is None else max(start, peer.least_start)
    stepper = peer.make(workload, optimizer, dense)
    return System(stepper, _whole(workload), stepper.close, stepper.session, dense)


def compute_only(workload: Workload) -> System:
    """Return the whole model on one process with its share of the sequences, without communication."""
    return System(TorchStepper(bare_model(workload), workload, CONSTANT_RATE), _whole(workload))


def _whole(workload: Workload) -> Share:
    """Return the share of a rank that holds the whole model."""
    return Share(dist.get_rank(), dist.get_world_size(), *workload.share, dist.group.WORLD)


def _engine(workload: Workload, ds_config: Mapping[str, Any]) -> System:
    """Return a DeepSpeed engine, created by the package if `ds_config` has its section."""
    path, partition = Path(workload.model), workload.partition
    layout = Layout(
        workload.tensor,
        workload.pipeline,
        tuple(partition) if isinstance(partition, list) else partition,
        workload.recompute,
    )
    module: Any = build_parallel(path, read_model_config(path), workload.seed, layout)
    add_adapters(module, workload.lora_rank)
    compressed = SECTION in ds_config
    with ExitStack() as closing:
        mpu = closing.enter_context(attention_on_ulysses(module, workload)) if workload.sequence > 1 else None
        # DeepSpeed may modify its configuration.
        made = make_engine(module, copy.deepcopy(dict(ds_config)), mpu)
        closing.callback(made.destroy)
        share = share_of_sequence(workload) if workload.sequence > 1 else share_of(made)
        session: Any = made.compression if compressed else None
        dense, period = _rhythm(session.config) if compressed else (0, 1)
        return System(_stepper(made, workload), share, closing.pop_all().close, session, dense, period)


def _rhythm(section: CompressConfig) -> tuple[int, int]:
    """Return the number of uncompressed steps at the start, and that of steps after which the traffic repeats."""
    islands = section.islands
    dense = max(section.schedule.warmup_steps, islands.warmup_steps if islands else 0)
    return dense, (islands.sync_steps if islands else None) or 1


def _stepper(engine: Any, workload: Workload) -> Stepper:
    if workload.sequence > 1:
        return UlyssesStepper(engine, workload.sequence)
    return PipelineStepper(engine) if workload.pipeline > 1 else PlainStepper(engine)


ATTENTION = "sdpa"
"""Attention of transformers that Ulysses calls for the heads of a rank."""


@contextmanager
def attention_on_ulysses(model: nn.Module, workload: Workload) -> Iterator[Any]:
    """Let attention of all models of this process exchange heads for parts of sequences within the context.

    Yields DeepSpeed's description of the groups of `workload.sequence` ranks.
    """
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original = ALL_ATTENTION_FUNCTIONS[ATTENTION]
    mpu: Any = UlyssesSPAttentionHF.register_with_transformers(
        model, ATTENTION, workload.sequence, workload.micro_batch, seq_length_is_variable=True
    )
    try:
        yield mpu
    finally:
        ALL_ATTENTION_FUNCTIONS[ATTENTION] = original
        mpu._release_sequence_parallel_groups()


def share_of_sequence(workload: Workload) -> Share:
    """Return the share of this rank: ranks that divide sequences read the same ones."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    replicas = ranks // workload.sequence
    return Share(rank // workload.sequence, replicas, workload.accumulation, workload.micro_batch, dist.group.WORLD)


class UlyssesStepper(PlainStepper):
    """Steps on this rank's part of each sequence. The loss is that of its tokens."""

    def __init__(self, engine: Any, sequence: int) -> None:
        super().__init__(engine)
        self._rank, self._ranks = dist.get_rank() % sequence, sequence

    def _loss(self, tokens: Tensor) -> Tensor:
        targets = nn.functional.pad(tokens, (0, 1), value=-100)[:, 1:]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        own, labels, places = (one.chunk(self._ranks, 1)[self._rank] for one in (tokens, targets, positions))
        logits: Tensor = self.engine(input_ids=own, position_ids=places, use_cache=False).logits
        return nn.functional.cross_entropy(logits.float().flatten(0, 1), labels.flatten())
