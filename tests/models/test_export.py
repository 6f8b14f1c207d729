"""A model is loaded in any layout, trained, and saved as a directory that transformers loads."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoModelForCausalLM

from deepspeed_compress.models import Layout, export, read_model_config, save_pretrained, whole_logits
from deepspeed_compress.models.sources import build_skeleton, fill, open_source
from tests.models.families import VOCABULARY, random_tokens, save_model
from tests.models.runs import ROWS, SEED, Run, start, train
from tests.support.forks import run_forks

SAMPLED = pytest.mark.sampled(4)

BF16 = {"bf16": {"enabled": True}}
STAGES, SLICES, BOTH, WHOLE = Layout(pipeline=2), Layout(tensor=2), Layout(tensor=2, pipeline=2), Layout()

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Outcome:
    """Replica of this rank, and its part of the trained model's logits; None if it has none."""

    replica: int
    logits: Logits | None


def train_and_save(rank: int, run: Run, target: Path, file_bytes: int) -> Outcome:
    export.FILE_BYTES = file_bytes
    engine = start(run)
    train(engine, run)
    save_pretrained(engine, read_model_config(run.model), target)
    # The logits are computed last, because saving must not change the model.
    return Outcome(engine.data_parallel_group.rank(), logits_of(engine, run))


def logits_of(engine: Any, run: Run) -> Logits | None:
    tokens = random_tokens(ROWS, seed=9)
    if run.layout.pipeline > 1:
        _, logits = engine.eval_batch(iter([(tokens, tokens)]), return_logits=True)
    else:
        engine.eval()
        with torch.no_grad(), whole_logits(engine.module):
            logits = engine(input_ids=tokens, use_cache=False).logits
    return None if logits is None else logits.float().numpy()


def round_trip(run: Run, target: Path, file_bytes: int = 40_000) -> Logits:
    """Train in the layout of `run`, save to `target`, and return the logits."""
    ranks = run_forks(run.ranks, train_and_save, run, target, file_bytes)
    parts = [rank.logits for rank in ranks if rank.replica == 0 and rank.logits is not None]
    return parts[0] if parts[0].shape[-1] == VOCABULARY else np.concatenate(parts, axis=-1)


def check(directory: Path, run: Run, logits: Logits, tolerance: float = 1e-5) -> Any:
    """Check that transformers loads a model with these logits from `directory`.

    Logits are about 1 to 10, so 1e-5 is a few units in the last place: ranks add in another order.
    """
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype="auto")
    with torch.no_grad():
        mine = model(input_ids=random_tokens(ROWS, seed=9)).logits.float().numpy()
    assert np.abs(mine - logits).max() <= tolerance
    before = AutoModelForCausalLM.from_pretrained(run.model)
    assert not torch.equal(before.get_input_embeddings().weight, model.get_input_embeddings().weight.float())
    assert names(directory) == names(run.model)
    return model


def names(directory: Path) -> set[str]:
    found: set[str] = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as opened:
            assert not found & set(opened.keys())
            found |= set(opened.keys())
    return found


def check_generation(model: Any, logits: Logits) -> None:
    prompt = random_tokens(ROWS, seed=9)
    text = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=3, do_sample=False)
    assert text.shape == (ROWS, prompt.shape[1] + 3)
    assert text[:, prompt.shape[1]].tolist() == logits[:, -1].argmax(axis=-1).tolist()


def check_index(directory: Path, model: Any) -> None:
    """Check that the index names the file of every weight, and no other files are left."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in directory.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert set(index["weight_map"]) == names(directory)
    assert index["metadata"]["total_size"] == sum(p.numel() * p.element_size() for p in model.parameters())
    assert not list(directory.glob("*.tmp"))


CASES = {
    "zero 3": ("llama", True, Run(Path(), WHOLE, stage=3, data=2)),
    "zero 2, gpt2": ("gpt2", True, Run(Path(), WHOLE, stage=2, data=2)),
    "tensor": ("phi3", False, Run(Path(), SLICES)),
    "tensor, gemma2": ("gemma2", True, Run(Path(), SLICES)),
    "pipeline": ("gpt_neox", False, Run(Path(), STAGES, stage=1)),
    "tensor x zero 3": ("gpt2", False, Run(Path(), SLICES, stage=3, data=2)),
}


@SAMPLED
@pytest.mark.parametrize("case", CASES)
def test_a_trained_model_survives_export(case: str, tmp_path: Path) -> None:
    family, tied, run = CASES[case]
    run = replace(run, model=save_model(tmp_path / "before", family, tied))
    logits = round_trip(run, tmp_path / "after")
    model = check(tmp_path / "after", run, logits)
    check_generation(model, logits)
    check_index(tmp_path / "after", model)


@SAMPLED
@pytest.mark.slow
@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True)])
def test_a_model_of_eight_ranks_survives_export(family: str, tied: bool, tmp_path: Path) -> None:
    run = Run(save_model(tmp_path / "before", family, tied), BOTH, stage=1, data=2)
    logits = round_trip(run, tmp_path / "after")
    check_generation(check(tmp_path / "after", run, logits), logits)


def test_a_bf16_model_survives_export_bit_for_bit(tmp_path: Path) -> None:
    """Pipeline stages compute the same in bf16 as the whole model that transformers loads."""
    run = Run(save_model(tmp_path / "before", "llama"), STAGES, stage=1, extra=BF16)
    logits = round_trip(run, tmp_path / "after")
    model = check(tmp_path / "after", run, logits, tolerance=0.0)
    assert model.dtype == torch.bfloat16


def test_one_file_replaces_several_old_ones(tmp_path: Path) -> None:
    source, target = save_model(tmp_path / "before", "gpt2"), save_model(tmp_path / "after", "gpt2")
    run = Run(source, STAGES, stage=1)
    check(target, run, round_trip(run, target, file_bytes=10**9))
    assert [file.name for file in target.glob("model*")] == ["model.safetensors"]


# Directories saved by transformers


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    config = read_model_config(directory)
    model = build_skeleton(config)
    fill(model, open_source(directory, model, SEED))
    return dict(model.named_parameters())


def check_loaded(directory: Path, wanted: Any) -> None:
    found = loaded(directory)
    assert found.keys() == dict(wanted.named_parameters()).keys()
    for name, parameter in wanted.named_parameters():
        assert torch.equal(found[name], parameter), name


@pytest.mark.parametrize("head", ["embed_out.weight", "lm_head.weight"])
def test_both_names_of_the_gpt_neox_head_are_loaded(head: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "files", "gpt_neox", tied=False))
    model.save_pretrained(tmp_path / "one")
    file = tmp_path / "one" / "model.safetensors"
    tensors = load_file(file)
    (old,) = {"embed_out.weight", "lm_head.weight"} & set(tensors)
    save_file({head if name == old else name: tensor for name, tensor in tensors.items()}, file, {"format": "pt"})
    check_loaded(tmp_path / "one", model)


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox"])
def test_a_model_saved_without_its_head_is_loaded(family: str, tmp_path: Path) -> None:
    whole = save_model(tmp_path / "whole", family, tied=True)
    AutoModel.from_pretrained(whole).save_pretrained(tmp_path / "backbone")
    assert names(tmp_path / "backbone") != names(whole)
    check_loaded(tmp_path / "backbone", AutoModelForCausalLM.from_pretrained(whole))


def test_weights_saved_in_bf16_are_loaded(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_pretrained(save_model(tmp_path / "a", "gpt2"), dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "b")
    check_loaded(tmp_path / "b", model.float())
