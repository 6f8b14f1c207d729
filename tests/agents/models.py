"""A small model and a tokenizer with a token for each character of sums."""

from typing import Any

import torch

CHARACTERS = "0123456789+="
PAD, END = len(CHARACTERS), len(CHARACTERS) + 1


def tokenizer() -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {character: number for number, character in enumerate(CHARACTERS)} | {"<pad>": PAD, "<end>": END}
    plain = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    plain.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="<end>", padding_side="left")


def network(seed: int = 0) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(CHARACTERS) + 2,
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=END,
        eos_token_id=END,
    )
    return GPT2LMHeadModel(config).eval()
