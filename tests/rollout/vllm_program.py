"""Program that lets vLLM follow the weights of a small model, and prints what it generates, in JSON.

Usage: python vllm_program.py FAMILY DIRECTORY. It prints the answers of an engine that has loaded published versions,
and those of a new engine with the same weights from a checkpoint: the same, bit for bit.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models

SIZES = {
    "vocab_size": 257,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": 256,
    "pad_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64}
OTHERS: dict[str, dict[str, Any]] = {"Llama": {}, "Qwen3": {"head_dim": 64, "tie_word_embeddings": True}}
PROMPT = list(range(1, 100))
"""Longer than the blocks of the prefix cache."""


def make_model(family: str, directory: Path) -> Any:
    """Return a model of `family`, saved in `directory` with a tokenizer."""
    config = getattr(transformers, f"{family}Config")(**SIZES, **OTHERS.get(family, EXPERTS))
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
    words = {str(number): number for number in range(257)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="256").save_pretrained(directory)
    model.save_pretrained(directory)
    return model


def start(directory: Path) -> Any:
    from vllm import LLM

    extension = "deepspeed_compress.rollout.vllm.WeightUpdates"
    return LLM(str(directory), dtype="bfloat16", max_model_len=256, enforce_eager=True, worker_extension_cls=extension)


def answer(engine: Any) -> list[Any]:
    """Return the greedy tokens and the best log-probabilities of each."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=8, temperature=0, logprobs=3)
    [found] = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False)
    best = [{str(token): one.logprob for token, one in place.items()} for place in found.outputs[0].logprobs]
    return [list(found.outputs[0].token_ids), best]


def main(family: str, directory: Path) -> None:
    from deepspeed_compress.rollout import DirectoryStore, Publisher
    from deepspeed_compress.rollout.vllm import load_published_weights

    model, versions = make_model(family, directory / "model"), directory / "versions"
    publisher = Publisher(model, DirectoryStore(versions))
    publisher.publish()
    engine = start(directory / "model")
    engine.collective_rpc("follow_weights", args=(str(versions),))
    load_published_weights(engine)
    answers = [answer(engine)]
    for _ in range(2):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        publisher.publish()
        load_published_weights(engine)
        answers.append(answer(engine))
    del engine
    model.save_pretrained(directory / "model")
    print(json.dumps({"answers": answers, "new": answer(start(directory / "model"))}))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main(sys.argv[1], Path(sys.argv[2]))
