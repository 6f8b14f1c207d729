"""AutoTP with compression: parameters that tensor-parallel ranks share stay bit-identical."""

import pytest
import torch

from tests.support.forks import run_forks
from tests.support.jobs import Job, make_engine, train_on


def train_llama(rank: int, stage: int) -> tuple[dict[str, list[float]], list[str], int]:
    """Return the parameters after three steps, the names of the uncompressed ones, and the number of parameters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2))
    section = {"parallelism": {"tensor": 2}, "gradients": {"bits": 4, "block_size": 32}}
    engine = make_engine(model, Job(stage=stage, section=section).config())
    reducer = engine.compression.reducer
    # Tensor-parallel ranks read the same batch.
    generator = torch.Generator().manual_seed(engine.data_parallel_group.rank())
    for _ in range(3):
        tokens = torch.randint(0, 64, (3, 8), generator=generator)
        train_on(engine, engine(input_ids=tokens, labels=tokens, use_cache=False).loss)
    raw = [name for name in engine.param_names.values() if name not in reducer.messages.channel_of]
    found = {name: value.detach().flatten().tolist() for name, value in engine.module.named_parameters()}
    return found, raw, len(engine.param_names)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_replicated_parameters_stay_equal(stage):
    results = run_forks(4, train_llama, stage, shared_memory=True)
    parameters, raw, count = results[0]
    assert any("norm" in name for name in raw)
    assert 0 < len(raw) < count
    for name in raw:
        assert all(other[0][name] == parameters[name] for other in results), name
