"""Settings of `activations` that an engine leaves without effect, or with which it cannot work."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import deepspeed
import pytest
from deepspeed.module_inject.layers import TensorParallel_Layer

import deepspeed_compress
from deepspeed_compress.config import SECTION
from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.models import Layout, build_parallel, read_model_config
from tests.models.families import write_config
from tests.support.forks import run_forks
from tests.support.jobs import make_engine, network
from tests.support.messages import refusal
from tests.support.split_llama import Job, start, train

NOTHING_SPLIT = "/deepspeed_compress/activations/tensor has no effect, because no ranks share layers"
NO_STAGES = "/deepspeed_compress/activations/pipeline has no effect on an engine without pipeline stages"


def attach_to_network(rank: int, activations: Mapping[str, Any]) -> str:
    """Return the message with which a data-parallel engine is refused."""
    section = {"gradients": {"method": "none"}, "activations": dict(activations)}
    config = {"train_micro_batch_size_per_gpu": 3, "optimizer": {"type": "Adam", "params": {}}, SECTION: section}
    model = network()
    engine = deepspeed.initialize(model=model, model_parameters=list(model.parameters()), config=config)[0]
    message = refusal(UnsupportedError, deepspeed_compress.attach, engine)
    assert "compression" not in vars(engine)
    return message


def test_an_engine_without_divided_layers_is_refused() -> None:
    [message] = run_forks(1, attach_to_network, {"tensor": {}, "pipeline": {}})
    assert NOTHING_SPLIT in message
    assert NO_STAGES in message


def refused(rank: int, file: Path) -> list[str]:
    """Return the messages for a compiled model, for overlapped sums, and for a model without layers to merge."""
    engine = start(Job())
    engine.config[SECTION] = {"gradients": {"method": "none"}, "activations": {"tensor": {}}}
    engine.module.model.layers[0].mlp.compile(backend="eager")
    TensorParallel_Layer.tp_overlap_comm = True
    compiled = refusal(UnsupportedError, deepspeed_compress.attach, engine)
    TensorParallel_Layer.tp_overlap_comm = False
    model: Any = build_parallel(file, read_model_config(file), 0, Layout(tensor=2))
    config = {**Job({"tensor": {}}).config(), "tensor_parallel": {}}
    config[SECTION]["parallelism"] = {"tensor": 2}
    return [compiled, refusal(UnsupportedError, make_engine, model, config)]


def test_models_whose_sums_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    """GPT-2 has one fused layer for query, key and value, and one for its MLP."""
    for compiled, fused in run_forks(2, refused, write_config(tmp_path / "gpt2", "gpt2"), shared_memory=True):
        assert "/activations/tensor: sums inside a compiled graph cannot be taken over" in compiled
        assert "/activations/tensor: tensor_parallel.tp_overlap_comm sums gradients in another way" in compiled
        assert "/activations/tensor/merge has no effect, because no layers of this model read one tensor" in fused


def compile_later(rank: int) -> bool:
    """Return whether an engine can be compiled after `detach`, having checked that it cannot before."""
    engine = start(Job({"tensor": {}}))
    with pytest.raises(UnsupportedError, match="do not call"):
        engine.compile(backend="eager")
    deepspeed_compress.detach(engine)
    engine.compile(backend="eager")
    return bool(engine.is_compiled)


def test_an_attached_engine_is_not_compiled() -> None:
    assert run_forks(2, compile_later, shared_memory=True) == [True, True]


def compile_part(rank: int) -> str:
    """Return the message for a part of the model that is compiled after attaching."""
    engine = start(Job({"tensor": {"bits": 8}}))
    engine.module.model.layers[0].mlp.compile(backend="eager")
    return refusal(UnsupportedError, train, engine)


@pytest.mark.slow
def test_a_part_that_is_compiled_later_is_refused_before_the_first_step() -> None:
    for message in run_forks(2, compile_part, shared_memory=True, compiled=True):
        assert message.startswith("/deepspeed_compress/activations/tensor: sums inside a compiled graph cannot be")
        assert "do not compile model.layers.0.mlp, or remove the key" in message
