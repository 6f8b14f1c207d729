"""A receiver with a plain module holds the bits of an engine whose ranks split the model by AutoTP or a pipeline."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.pipe import PipelineModule
from torch import Tensor, nn
from transformers import GPT2Config, LlamaConfig, LlamaForCausalLM, PretrainedConfig

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.models import Layout, build_model, build_parallel
from deepspeed_compress.models.export import whole_weights
from deepspeed_compress.rollout import DirectoryStore, Publisher, Receiver
from tests.support import jobs
from tests.support.forks import run_forks

VERSIONS = 4
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
ROWS, LENGTH, WORDS = 2, 8, 60


def llama(**options: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=WORDS, num_hidden_layers=2, **SIZES, **options)


def gpt2() -> GPT2Config:
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2Config(vocab_size=WORDS, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=4, **off)


def config(stage: int, **extra: Any) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": 1,
        "steps_per_print": 10**6,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0},
        **extra,
    }


def tokens(step: int) -> Tensor:
    return torch.randint(0, WORDS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))


def step(engine: Any, number: int) -> None:
    """Take an optimizer step of a causal language model."""
    batch = tokens(number)
    if isinstance(engine.module, PipelineModule):
        engine.train_batch(iter([(batch, batch)]))
        return
    engine.backward(engine(input_ids=batch, labels=batch, use_cache=False).loss)
    engine.step()


def gathered(engine: Any) -> dict[str, Tensor]:
    """Return the whole weights in bf16, as `models.export` gathers them from all ranks."""
    own = {name: value.detach().to(torch.bfloat16).clone() for name, value in whole_weights(engine.module)}
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return {name: value for each in everyone for name, value in each.items()}


def check(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    parameters = dict(module.named_parameters(remove_duplicate=False))
    assert weights.keys() <= parameters.keys()
    assert {id(parameters[name]) for name in weights} == set(map(id, module.parameters()))
    for name, value in weights.items():
        assert torch.equal(parameters[name].view(torch.int16), value.view(torch.int16)), name


def follow(engine: Any, plain: nn.Module, path: Path, versions: int) -> list[int]:
    """Publish and receive each of `versions`. Return the number of values that each rank has published."""
    publisher = Publisher(engine, DirectoryStore(path), full_every=versions // 2)
    receiver = Receiver(plain.to(torch.bfloat16), DirectoryStore(path))
    for number in range(versions):
        published = publisher.publish()
        assert published is not None
        assert receiver.update()
        assert receiver.digest == published.digest
        check(plain, gathered(engine))
        step(engine, number)
        dist.barrier()
    shares: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(shares, sum(one.values.numel() for one in publisher._held))
    return shares


def auto_tp(rank: int, path: Path, stage: int, options: Mapping[str, Any], versions: int) -> list[int]:
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(llama(**options))
    split = {"tensor_parallel": {"autotp_size": 2}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config(stage, **split))
    return follow(engine, LlamaForCausalLM(llama(**options)), path, versions)


BIASES = {"attention_bias": True, "mlp_bias": True}


def test_auto_tp(tmp_path: Path) -> None:
    """The two ranks split the matrices of layers, and share what they both hold evenly."""
    one, other = run_forks(2, auto_tp, tmp_path, 1, BIASES, VERSIONS, shared_memory=True)[0]
    assert abs(one - other) <= 2
    assert one + other == sum(parameter.numel() for parameter in LlamaForCausalLM(llama(**BIASES)).parameters())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "options", "ranks"),
    [(0, {}, 2), (2, BIASES, 4), (1, {"tie_word_embeddings": True}, 2)],
    ids=str,
)
def test_auto_tp_for_many_versions(stage: int, options: Mapping[str, Any], ranks: int, tmp_path: Path) -> None:
    run_forks(ranks, auto_tp, tmp_path, stage, options, 50, shared_memory=True)


def auto_tp_of_zero_3(rank: int, path: Path) -> str:
    with pytest.raises(UnsupportedError) as raised:
        auto_tp(rank, path, 3, {}, VERSIONS)
    return str(raised.value)


def test_auto_tp_and_zero_3_are_refused(tmp_path: Path) -> None:
    for problem in run_forks(2, auto_tp_of_zero_3, tmp_path, shared_memory=True):
        assert problem.endswith("is split by tensor parallelism, and again by ZeRO 3; use ZeRO 2")


def built(rank: int, path: Path, model: PretrainedConfig, stage: int, layout: Layout, versions: int) -> list[int]:
    """Publish a model that the key `parallelism` makes."""
    deepspeed.init_distributed("gloo")
    part = build_parallel(path / "none", model, 0, layout)
    parallelism = {"zero_stage": stage, "tensor": layout.tensor, "pipeline": layout.pipeline}
    section = {SECTION: {"gradients": {"method": "none"}, "parallelism": parallelism}}
    settings = config(stage, **section)
    engine, *_ = deepspeed_compress.initialize(model=part, model_parameters=part.parameters(), config=settings)
    return follow(engine, build_model(path / "none", model, 1), path, versions)


def test_a_pipeline_that_the_section_makes(tmp_path: Path) -> None:
    run_forks(2, built, tmp_path, llama(tie_word_embeddings=True), 1, Layout(pipeline=2), VERSIONS)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "stage", "layout"),
    [
        (llama(), 1, Layout(tensor=2)),
        (gpt2(), 1, Layout(tensor=2)),
        (gpt2(), 1, Layout(pipeline=2)),
        (gpt2(), 1, Layout(tensor=2, pipeline=2)),
        (llama(tie_word_embeddings=True), 0, Layout(tensor=2, pipeline=2)),
    ],
    ids=lambda one: getattr(one, "model_type", str(one)),
)
def test_layouts_that_the_section_makes(model: PretrainedConfig, stage: int, layout: Layout, tmp_path: Path) -> None:
    run_forks(layout.tensor * layout.pipeline, built, tmp_path, model, stage, layout, 20, shared_memory=True)


class Plain(nn.Module):
    """The model of `jobs.pipeline` without stages."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix, self.first = jobs.Tied(), nn.Linear(jobs.WIDTH, jobs.WIDTH)
        self.second = nn.Linear(jobs.WIDTH, jobs.WIDTH)


NAMES = {"tied_modules.matrix": "matrix", "1": "first", "3": "second"}


def own_pipeline(rank: int, path: Path) -> str:
    job = jobs.Job(stage=1, stages=2, steps=VERSIONS)
    engine, store = jobs.start(job), DirectoryStore(path)
    with pytest.raises(UnsupportedError) as raised:
        Publisher(engine, store)
    publisher, plain = Publisher(engine, store, names=NAMES), Plain().to(torch.bfloat16)
    receiver = Receiver(plain, store)
    for batch in jobs.data(0, job):
        publisher.publish()
        receiver.update()
        own = {name: value.detach().to(torch.bfloat16) for name, value in engine.module.named_parameters()}
        everyone: list[Any] = [None] * 2
        dist.all_gather_object(everyone, own)
        weights = everyone[0] | everyone[1]
        check(plain, {NAMES[name.rsplit(".", 1)[0]] + "." + name.rsplit(".", 1)[1]: weights[name] for name in weights})
        jobs.run_pipeline(engine, [batch])
    return str(raised.value)


def test_a_pipeline_of_the_user_needs_the_names_of_its_layers(tmp_path: Path) -> None:
    one, other = run_forks(2, own_pipeline, tmp_path)
    assert one == other
    assert 'parameter "tied_modules.matrix.weight" of a pipeline has no known name' in one


def by_section(rank: int, path: Path) -> int | None:
    deepspeed.init_distributed("gloo")
    part = build_parallel(path / "none", llama(), 0, Layout(pipeline=2))
    section = {
        "gradients": {"method": "none"},
        "parallelism": {"zero_stage": 1, "pipeline": 2},
        "rollout": {"directory": str(path)},
    }
    settings = config(1, **{SECTION: section})
    engine, *_ = deepspeed_compress.initialize(model=part, model_parameters=part.parameters(), config=settings)
    plain = build_model(path / "none", llama(), 1).to(torch.bfloat16)
    receiver = Receiver(plain, DirectoryStore(path))
    for number in range(3):
        step(engine, number)
    engine.rollout.wait()
    dist.barrier()
    receiver.update()
    check(plain, gathered(engine))
    return receiver.version


def test_a_pipeline_publishes_by_its_section(tmp_path: Path) -> None:
    assert run_forks(2, by_section, tmp_path) == [4, 4]
