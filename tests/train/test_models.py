"""Models from files, and GPT-2 as pipeline stages."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.errors import ConfigError, UnsupportedError
from deepspeed_compress.models import build_model, build_pipeline, read_model_config
from deepspeed_compress.models.gpt_pipeline import check_pipeline, next_token_loss

RunRanks = Callable[..., list[Any]]

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 300,
    "n_positions": 32,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 2,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
DS_CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1},
    "steps_per_print": 1_000_000,
}
TOKENS = torch.arange(4 * 16).reshape(4, 16) * 7 % 300


def written(directory: Path, **changes: Any) -> Path:
    file = directory / "model.json"
    file.write_text(json.dumps(GPT2 | changes))
    return file


def build(file: Path, seed: int = 0) -> Any:
    return build_model(file, read_model_config(file), seed)


def pipeline_losses(file: Path, stages: int) -> tuple[float, float]:
    """Evaluation loss before and after one step on the same tokens."""
    import deepspeed

    module = build_pipeline(build(file), stages)
    engine, *_ = deepspeed.initialize(model=module, model_parameters=module.parameters(), config=DS_CONFIG)
    batch = [(TOKENS[:2], TOKENS[:2]), (TOKENS[2:], TOKENS[2:])]
    before = engine.eval_batch(iter(batch)).item()
    engine.train_batch(iter(batch))
    return before, engine.eval_batch(iter(batch)).item()


def one_stage(file: Path) -> tuple[float, list[str], list[str]]:
    source = build(file)
    module = build_pipeline(source, 1)
    theirs, ours = source(input_ids=TOKENS, labels=TOKENS).loss, next_token_loss(module(TOKENS), TOKENS)
    theirs.backward()
    ours.backward()
    norms = [sorted(f"{p.grad.norm():.4e}" for p in m.parameters()) for m in (source, module)]
    return (theirs - ours).item(), norms[0], norms[1]


def test_one_stage_computes_what_transformers_computes(tmp_path: Path, run_ranks: RunRanks) -> None:
    ((difference, theirs, ours),) = run_ranks(1, one_stage, written(tmp_path))
    assert difference == 0.0
    assert ours == theirs


def test_two_stages_train_as_the_whole_model(tmp_path: Path, run_ranks: RunRanks) -> None:
    file = written(tmp_path)
    first, second = run_ranks(2, pipeline_losses, file, 2)
    assert first == second
    model = build(file)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    before = model(input_ids=TOKENS, labels=TOKENS).loss
    before.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    after = model(input_ids=TOKENS, labels=TOKENS).loss
    assert first == pytest.approx((before.item(), after.item()), rel=1e-5)


def test_the_seed_decides_the_weights(tmp_path: Path) -> None:
    file = written(tmp_path)
    weights = [build(file, seed).state_dict()["transformer.wpe.weight"] for seed in (1, 1, 2)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


def test_a_directory_gives_its_own_weights(tmp_path: Path) -> None:
    model = build(written(tmp_path), seed=5)
    model.save_pretrained(tmp_path / "saved")
    loaded = build(tmp_path / "saved", seed=6)
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "a JSON list, expected an object"),
        ("{}", r'/model_type is None; write the family, for example "gpt2"'),
        ('{"model_type": "gpt9"}', "transformers rejects it"),
        ('{"model_type": "gpt2", "n_embd": "wide"}', "transformers rejects it"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_model_config(tmp_path / "model.json")


def test_a_missing_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere: cannot be read .*; give a model config"):
        read_model_config(tmp_path / "nowhere")


def test_a_family_without_a_language_model(tmp_path: Path) -> None:
    file = tmp_path / "vit.json"
    file.write_text('{"model_type": "vit"}')
    with pytest.raises(ConfigError, match="no causal language model can be built"):
        build(file)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 1}, "n_layer 1; write at most that many stages"),
        ({"tie_word_embeddings": False}, "needs tie_word_embeddings true"),
        ({"model_type": "opt"}, 'not "opt"; write pipeline 1'),
    ],
)
def test_models_that_are_not_cut(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    config = read_model_config(written(tmp_path, **changes))
    with pytest.raises(UnsupportedError, match=message):
        check_pipeline(config, 2)


@pytest.mark.parametrize(
    ("name", "parameters"), [("gpt_1m", 1_152_128), ("gpt_2m", 2_243_040), ("gpt_10m", 10_481_152)]
)
def test_sizes_of_the_example_models(name: str, parameters: int) -> None:
    file = Path(__file__).parents[2] / "configs" / "models" / f"{name}.json"
    assert build(file).num_parameters() == parameters
