"""Conversion of GPT-2 between transformers and megatron-core's GPTModel keeps its function and its bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.models import read_model_config
from deepspeed_compress.models.megatron import gpt_options, load_weights, save_pretrained
from tests.models.families import LENGTH, random_tokens, save_model
from tests.support.forks import run_forks
from tests.support.megatron import start

SAMPLED = pytest.mark.sampled(3)

EVEN = {"vocab_size": 98, "n_inner": 46}
FOUR_LAYERS = {**EVEN, "n_layer": 4}
VIRTUAL = "virtual_pipeline_model_parallel_size"
LAYOUTS: dict[str, dict[str, int]] = {
    "whole": {},
    "tensor": {"tensor_model_parallel_size": 2},
    "pipeline": {"pipeline_model_parallel_size": 3},
    "interleaved": {"pipeline_model_parallel_size": 2, VIRTUAL: 2},
    "both": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3},
}


def make(config: Any, chunk: int | None = None, **layout: Any) -> Any:
    """Return this rank's part of GPTModel, or one of its model chunks, with new weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    options = gpt_options(config)
    alone = {"use_cpu_initialization": True, "gradient_accumulation_fusion": False, "pipeline_dtype": torch.float32}
    return GPTModel(
        TransformerConfig(**options.transformer, **alone, **layout),
        get_gpt_layer_local_spec(),
        **options.model,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk),
        vp_stage=chunk,
    ).eval()


def convert(rank: int, source: Path, target: Path, layout: dict[str, int]) -> Any:
    """Load the model in this layout and save it again; return its logits if it has no pipeline."""
    start(**layout)
    config = read_model_config(source)
    chunks = [make(config, chunk, **layout) for chunk in (range(layout[VIRTUAL]) if VIRTUAL in layout else (None,))]
    load_weights(chunks, source, config)
    save_pretrained(chunks, config, target)
    return None if "pipeline_model_parallel_size" in layout else logits_of(chunks[0]).numpy()


def logits_of(model: Any) -> Tensor:
    tokens = random_tokens(2, seed=9)
    mask = torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    with torch.no_grad():
        mine = model(tokens, torch.arange(LENGTH).expand(2, LENGTH), mask)
    every = [torch.empty_like(mine) for _ in range(model.pg_collection.tp.size())]
    dist.all_gather(every, mine.contiguous(), group=model.pg_collection.tp)
    return torch.cat(every, -1)


def tensors(directory: Path) -> dict[str, Tensor]:
    return {name: one for file in directory.glob("*.safetensors") for name, one in load_file(file).items()}


@SAMPLED
@pytest.mark.parametrize(
    ("name", "tied"),
    [("whole", True), ("tensor", False), ("pipeline", False), ("interleaved", True), ("both", True)],
)
def test_a_round_trip_keeps_all_bits_and_logits(tmp_path: Path, name: str, tied: bool) -> None:
    source = save_model(tmp_path / "source", "gpt2", tied, **(FOUR_LAYERS if name == "interleaved" else EVEN))
    target, layout = tmp_path / "target", LAYOUTS[name]
    ranks = max(1, layout.get("tensor_model_parallel_size", 1) * layout.get("pipeline_model_parallel_size", 1))
    found = run_forks(ranks, convert, source, target, layout)
    before, after = tensors(source), tensors(target)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    loaded: Any = AutoModelForCausalLM.from_pretrained(target)
    with torch.no_grad():
        theirs = loaded(input_ids=random_tokens(2, seed=9)).logits
    for logits in found:
        # Logits are about 1 to 10, so this is a few units in the last place.
        assert logits is None or abs(logits - theirs.numpy()).max() <= 1e-5


def with_new_weights(rank: int, directory: Path) -> list[tuple[int, ...]]:
    """Check that new weights equal those of a single process, and that other shapes and parameters are refused."""
    start()
    config = read_model_config(directory / "config.json")
    model = make(config)
    load_weights([model], directory / "config.json", config, seed=3)
    torch.manual_seed(3)
    theirs: Any = AutoModelForCausalLM.from_config(config)
    assert torch.equal(model.embedding.word_embeddings.weight, theirs.transformer.wte.weight)
    config.n_positions = 32
    with pytest.raises(
        UnsupportedError, match=r"transformer\.wpe\.weight has shape \(32, 32\), but GPTModel expects \(64, 32"
    ):
        load_weights([model], directory / "config.json", config)
    model.decoder.layers[0].extra = torch.nn.Linear(2, 2)
    with pytest.raises(UnsupportedError, match=r"decoder\.layers\.0\.extra\.weight: GPT-2 has no such parameter"):
        load_weights([model], directory, read_model_config(directory))
    return []


def test_new_weights_are_loaded_and_mismatches_are_refused(tmp_path: Path) -> None:
    run_forks(1, with_new_weights, save_model(tmp_path, "gpt2", **EVEN))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LlamaConfig(), '/model_type is "llama" (allowed: gpt2)'),
        (GPT2Config(activation_function="silu"), '/activation_function is "silu" (allowed: gelu_new, '),
        (GPT2Config(scale_attn_by_inverse_layer_idx=True), "/scale_attn_by_inverse_layer_idx"),
        (GPT2Config(embd_pdrop=0.0), "/embd_pdrop is 0.0 (allowed: 0.1, as /resid_pdrop)"),
    ],
)
def test_a_config_that_megatron_cannot_represent_is_refused(config: Any, message: str) -> None:
    with pytest.raises(UnsupportedError) as raised:
        gpt_options(config)
    assert message in str(raised.value)
