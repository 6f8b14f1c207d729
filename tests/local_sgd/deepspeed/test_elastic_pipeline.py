"""Elastic islands whose model is divided into pipeline stages."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from deepspeed.runtime import engine as engine_module
from deepspeed.runtime.dataloader import DeepSpeedDataLoader
from deepspeed.runtime.pipe.topology import ProcessTopology
from deepspeed.runtime.utils import is_model_parallel_parameter
from torch import nn
from torch.utils.data import TensorDataset
from transformers import LlamaConfig

import deepspeed_compress
from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.local_sgd.deepspeed.replicated import SharedLayers, check_tied
from deepspeed_compress.models import Layout, build_parallel
from tests.support.coordinators import become_island, own_ports, parameter_server
from tests.support.forks import run_forks
from tests.support.island_jobs import SGD, Exchanges, run_apart, section, watch_exchanges
from tests.support.jobs import BATCH, WIDTH, Job, data, make_engine, run, start, weights
from tests.support.resuming import save_and_resume
from tests.support.tensor_islands import TENSOR, VOCABULARY

SAMPLED = pytest.mark.sampled(4)
STAGES = 2
PLAIN: Mapping[str, Any] = {"exchange": {"method": "none"}}
TIED = "tied_modules.matrix.weight"


def batches_of(engine: Any, job: Job) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the micro-batches of this rank, which the other stages of its replica share."""
    return data(10 * engine.compression.islands.number + engine.grid.get_data_parallel_rank(), job)


def apart(rank: int, job: Job) -> Exchanges:
    """Train an island until three exchanges are over."""
    return train_for(3, start(job), job)


def train_for(exchanges: int, engine: Any, job: Job) -> Exchanges:
    """Train the island of `engine` until so many exchanges are over."""
    seen = watch_exchanges(engine)
    for batch in batches_of(engine, job):
        if len(seen.after) < exchanges:
            run(engine, [batch])
    engine.destroy()
    return seen


@SAMPLED
@pytest.mark.parametrize("stage", [0, 1])
def test_an_exchange_is_the_mean_of_the_islands(stage: int) -> None:
    """Uncompressed, and between equal stages."""
    job = Job(stage, stages=STAGES, extra=SGD, steps=60)
    first, second, third, fourth = run_apart(2, apart, job, size=STAGES, **PLAIN)
    first.check_means(third)
    second.check_means(fourth)


@SAMPLED
@pytest.mark.parametrize(("stage", "size"), [(0, STAGES), (1, STAGES), (1, 2 * STAGES)])
def test_tied_weights_stay_equal_with_four_bits(stage: int, size: int) -> None:
    """Stages end every exchange with the same copies, and islands with the same weights."""
    job = Job(stage, stages=STAGES, steps=60)
    seen = run_apart(2, apart, job, size=size)
    for one, other in zip(seen[:size], seen[size:], strict=True):
        versions = one.after.keys() & other.after.keys()
        assert versions
        for version in versions:
            assert one.after[version] == other.after[version]
            assert one.after[version][TIED] == seen[0].after[version][TIED]


def divided_apart(rank: int, job: Job) -> tuple[Exchanges, list[str]]:
    """Train an island with split stages for two exchanges. Return them, and the names of replicated weights."""
    deepspeed.init_distributed("gloo")
    sizes = {"hidden_size": 36, "intermediate_size": 42, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2}
    model = build_parallel(Path("none"), LlamaConfig(**sizes, **heads), 0, Layout(tensor=TENSOR, pipeline=STAGES))
    engine = make_engine(model, job.config())
    seen, named = watch_exchanges(engine), engine.module.named_parameters()
    replicated = [name for name, one in named if not is_model_parallel_parameter(one)]
    generator = torch.Generator().manual_seed(engine.compression.islands.number)
    for tokens in torch.randint(0, VOCABULARY, (job.steps, BATCH, 8), generator=generator):
        if len(seen.after) < 2:
            engine.train_batch(iter([(tokens, tokens)]))
    engine.destroy()
    return seen, replicated


@pytest.mark.slow
def test_a_pipeline_whose_stages_are_split() -> None:
    """All ranks that hold a weight have the same value after every exchange, and so have islands."""
    size = TENSOR * STAGES
    parallelism = {"tensor": TENSOR, "pipeline": STAGES}
    job = Job(1, steps=60, section={"parallelism": parallelism})
    seen = run_apart(2, divided_apart, job, size=size)
    for (one, _), (other, _) in zip(seen[:size], seen[size:], strict=True):
        versions = one.after.keys() & other.after.keys()
        assert versions
        assert all(one.after[version] == other.after[version] for version in versions)
    for (one, replicated), (other, _) in (seen[:TENSOR], seen[TENSOR:size]):
        assert replicated
        assert all(
            one.after[version][name] == other.after[version][name] for version in one.after for name in replicated
        )


def make_pipeline(**division: Any) -> PipelineModule:
    layers = [nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)]
    return PipelineModule(layers, loss_fn=nn.MSELoss(), partition_method="uniform", **division)


def read_by(rank: int, job: Job, axes: Sequence[str]) -> tuple[int, list[int]]:
    """Train an island on 24 numbered samples until all are read. Return this rank's replica, and what it has read."""
    deepspeed.init_distributed("gloo")
    # Forked ranks may not start processes that read data.
    engine_module.DeepSpeedDataLoader = lambda **given: DeepSpeedDataLoader(**given | {"num_local_io_workers": 0})
    read: list[int] = []

    def noting(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
        numbers = torch.stack([one for (one,) in batch])
        read.extend(numbers.tolist())
        return numbers.float()[:, None].expand(-1, WIDTH) / 24, numbers.float()[:, None]

    sizes = {"pipe": STAGES, "data": dist.get_world_size() // STAGES}
    model = make_pipeline(topology=ProcessTopology(list(axes), [sizes[axis] for axis in axes]))
    engine, _, loader, _ = deepspeed_compress.initialize(
        model=model,
        model_parameters=list(model.parameters()),
        config=job.config(),
        training_data=TensorDataset(torch.arange(24)),
        collate_fn=noting,
    )
    assert loader is engine.training_dataloader
    replica = engine.grid.get_data_parallel_rank()
    for _ in range(24 // engine.train_batch_size()):
        engine.train_batch()
    engine.destroy()
    return replica, read


@SAMPLED
def test_stages_read_the_same_data_and_islands_another_order() -> None:
    """`training_data` of `initialize` feeds `train_batch`."""
    found = run_apart(2, read_by, Job(1), ["pipe", "data"], size=STAGES, minimum=1)
    first, second, third, fourth = (read for _, read in found)
    assert first == second
    assert third == fourth
    assert first != third
    assert sorted(first) == sorted(third) == list(range(24))


@SAMPLED
@pytest.mark.parametrize("axes", [["pipe", "data"], ["data", "pipe"]])
def test_replicas_read_different_data(axes: Sequence[str]) -> None:
    """The stages of a replica read the same, wherever the topology puts them."""
    found = run_apart(1, read_by, Job(1), axes, size=2 * STAGES, minimum=1)
    replicas = [[read for replica, read in found if replica == one] for one in range(2)]
    assert all(reads == [reads[0]] * STAGES for reads in replicas)
    assert sorted(replicas[0][0] + replicas[1][0]) == list(range(24))


@SAMPLED
def test_an_island_that_is_resumed_goes_on_as_before(tmp_path: Path) -> None:
    """No other island takes part, so exchanges change nothing."""
    job, options = Job(1, stages=STAGES, steps=9), {"size": STAGES, "minimum": 1, **PLAIN}
    for (straight, _), (resumed, _) in run_apart(1, save_and_resume, job, str(tmp_path), 6, **options):
        assert {name: pytest.approx(values, abs=1e-6) for name, values in straight.items()} == resumed


def refused(rank: int, job: Job) -> str:
    try:
        start(job)
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_second_moments_are_refused() -> None:
    for text in run_apart(1, refused, Job(1, stages=STAGES), size=STAGES, minimum=1, second_moments={}):
        assert "/deepspeed_compress/islands/second_moments: cannot be exchanged with tensor parallelism or" in text


def checked(rank: int) -> str:
    deepspeed.init_distributed("gloo")
    try:
        check_tied(SharedLayers(2, range(4), None, 2, {"embedding"} if rank > 1 else frozenset()))
    except UnsupportedError as error:
        return str(error)
    return "not refused"


def test_tied_weights_with_tensor_parallelism_are_refused() -> None:
    """On all ranks, also on those that hold no copy."""
    for text in run_forks(4, checked):
        assert text.startswith("/deepspeed_compress/islands/elastic: embedding is tied between pipeline stages")


def asynchronous(rank: int, job: Job, ports: list[int]) -> tuple[int, list[float], list[float]]:
    """Return the number of an asynchronous island, its anchor, and its tied weights after a last pull."""
    become_island(rank, STAGES, ports)
    engine = start(job)
    islands = engine.compression.islands
    for begin in range(0, job.steps, 4):
        run(engine, batches_of(engine, job)[begin : begin + 4])
        islands.exchange.finish(30)
    found = islands.number, islands.exchange.anchor().tolist(), weights(engine)[TIED]
    engine.destroy()
    return found


@SAMPLED
@pytest.mark.parametrize("exchange", [{"method": "none"}, {"method": "blockwise", "bits": 4}])
def test_asynchronous_islands(exchange: Mapping[str, Any]) -> None:
    """Uncompressed, stages have the anchor of the server. Their copies of tied weights are always equal."""
    with parameter_server() as server, own_ports(2) as ports:
        elastic = {"rendezvous": f"127.0.0.1:{server.port}", "give_up": "20 s", "parameter_server": {}}
        job = Job(1, stages=STAGES, steps=12, section=section(sync_every=3, exchange=exchange, elastic=elastic))
        islands = run_forks(2 * STAGES, asynchronous, job, ports)
        anchors = [place.anchor.tolist() for place in server.service.store.places]
        records = server.service.store.records
    assert records.pushes >= 2
    newest = [anchor for number, anchor, _ in islands if records.islands[number].version == records.version]
    assert newest == anchors or exchange != {"method": "none"}
    for one, other in ((islands[0], islands[1]), (islands[2], islands[3])):
        assert one[2] == other[2]


def attached(rank: int, job: Job) -> str:
    """Return the error if a pipeline of three stages has data before it joins other islands."""
    deepspeed.init_distributed("gloo")
    engine = deepspeed.initialize(model=make_pipeline(num_stages=3), config=job.config())[0]
    engine.set_dataloader([])
    with pytest.raises(ConfigError) as error:
        deepspeed_compress.attach(engine)
    return str(error.value)


def test_data_of_an_existing_engine_is_refused() -> None:
    """On all stages, although the one in the middle reads nothing."""
    for text in run_apart(1, attached, Job(1), size=3, minimum=1):
        assert text.startswith("/deepspeed_compress/islands/elastic: the engine already has a data loader")


def loaded_by(rank: int, job: Job) -> bool:
    """Return True if this one of three stages gets a data loader."""
    deepspeed.init_distributed("gloo")
    # Forked ranks may not start processes that read data.
    engine_module.DeepSpeedDataLoader = lambda **given: DeepSpeedDataLoader(**given | {"num_local_io_workers": 0})
    samples = TensorDataset(torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, 1))
    model, initialize = make_pipeline(num_stages=3), deepspeed_compress.initialize
    engine, _, loader, _ = initialize(model=model, config=job.config(), training_data=samples)
    engine.destroy()
    return loader is not None


def test_all_stages_get_a_data_loader() -> None:
    """As from DeepSpeed, although the stage in the middle reads nothing."""
    assert run_apart(1, loaded_by, Job(1), size=3, minimum=1) == [True] * 3


def refused_topology(rank: int, job: Job) -> str:
    deepspeed.init_distributed("gloo")
    model = make_pipeline(topology=ProcessTopology(["model", "pipe", "data"], [2, STAGES, 1]))
    with pytest.raises(UnsupportedError) as error:
        make_engine(model, job.config())
    return str(error.value)


def test_ranks_that_share_layers_must_be_consecutive() -> None:
    for text in run_apart(1, refused_topology, Job(1), size=2 * STAGES, minimum=1):
        assert "the axes of the pipeline's topology are ['model', 'pipe', 'data']" in text
