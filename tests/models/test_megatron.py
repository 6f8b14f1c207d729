"""`gpt_options` describes GPT-2 of transformers so that megatron-core's GPTModel computes the same, or refuses it."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import GPT2Config, LlamaConfig

from deepspeed_compress.errors import UnsupportedError
from deepspeed_compress.models import build_model, read_model_config
from deepspeed_compress.models.megatron import gpt_options
from tests.models.families import LENGTH, random_tokens, save_model
from tests.support.forks import run_forks
from tests.support.megatron import start


def logits_of_both(rank: int, source: Path) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return the logits of GPTModel and of transformers with the same weights."""
    start()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    from launch.studies.megatron_stepper import copy_weights

    config = read_model_config(source)
    options, theirs = gpt_options(config), build_model(source, config, 0).eval()
    sizes = TransformerConfig(**options.transformer, use_cpu_initialization=True, gradient_accumulation_fusion=False)
    mine: Any = GPTModel(sizes, get_gpt_layer_local_spec(), **options.model).eval()
    copy_weights(theirs.state_dict(), mine)
    tokens, mask = random_tokens(2, seed=9), torch.ones(LENGTH, LENGTH).triu(1).bool()[None, None]
    with torch.no_grad():
        logits = mine(tokens, torch.arange(LENGTH).expand(2, LENGTH), mask)
        return logits.numpy(), theirs(input_ids=tokens).logits.numpy()


def test_gpt_model_computes_what_transformers_does(tmp_path: Path) -> None:
    [(mine, theirs)] = run_forks(1, logits_of_both, save_model(tmp_path, "gpt2", n_inner=46))
    # Logits are about 1 to 10, so this is a few units in the last place.
    np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


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


@pytest.mark.parametrize("tied", [True, False])
def test_embeddings_are_shared_as_the_config_says(tied: bool) -> None:
    options = gpt_options(GPT2Config(tie_word_embeddings=tied))
    assert options.model["share_embeddings_and_output_weights"] is tied
