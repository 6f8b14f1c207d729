"""An example of an endpoint for machines without vLLM: a small server around `generate` of transformers.

It answers one request at a time, and takes new weights between two of them. It limits neither connections nor tokens,
samples on for clients that have disconnected, and listens at 127.0.0.1 only. `serve_vllm` is the endpoint for more.
"""

import argparse
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import uvicorn
from fastapi import FastAPI, HTTPException
from pydantic import BaseModel, Field
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from deepspeed_compress.rollout import Receiver, open_store
from deepspeed_compress.rollout.receiver import Updates

NAME = "policy"


@dataclass(frozen=True)
class Completion:
    """The tokens of a completion, with the end token if the model chose it, and their log-probabilities."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]


@torch.no_grad()
def complete(
    model: Any, tokenizer: Any, prompts: Sequence[Sequence[int]], max_tokens: int, temperature: float = 1.0
) -> list[Completion]:
    """Sample a completion of each prompt. Log-probabilities are those that training computes.

    Args:
        model: a causal language model of transformers, whose `generation_config` changes no distribution.
        tokenizer: its tokenizer, which pads on the left.
        prompts: token ids.
        max_tokens: largest number of tokens of a completion.
        temperature: divisor of the logits; with 0, the likeliest token is taken.
    """
    ids = tokenizer.pad({"input_ids": [list(prompt) for prompt in prompts]}, return_tensors="pt").to(model.device)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    found = model.generate(
        **ids, **how, **ends, max_new_tokens=max_tokens, output_scores=True, return_dict_in_generate=True
    )
    logprobs = model.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
    rows = zip(found.sequences[:, ids["input_ids"].shape[1] :].tolist(), logprobs.tolist(), strict=True)
    return [_without_padding(tokens, scores, tokenizer.eos_token_id) for tokens, scores in rows]


def _without_padding(tokens: list[int], logprobs: list[float], end: int) -> Completion:
    length = tokens.index(end) + 1 if end in tokens else len(tokens)
    return Completion(tuple(tokens[:length]), tuple(logprobs[:length]))


class Message(BaseModel, extra="forbid"):
    """A message of a conversation."""

    role: str
    content: str


class ChatRequest(BaseModel, extra="forbid"):
    """The fields that a request may have; others are refused."""

    messages: list[Message] = Field(min_length=1)
    model: Literal["policy"] = "policy"
    max_tokens: int = Field(64, ge=1)
    temperature: float = Field(1.0, ge=0)
    logprobs: bool = True


class Sampler:
    """Handlers of the endpoint. A lock keeps requests and updates apart, so an answer has the tokens of one version."""

    def __init__(self, model: Any, tokenizer: Any, receiver: Receiver) -> None:
        self._model, self._tokenizer, self._update = model, tokenizer, Updates(receiver)
        self._lock = threading.Lock()

    def version(self) -> dict[str, int]:
        with self._lock:
            return {"version": self._update()}

    def chat(self, request: ChatRequest) -> dict[str, Any]:
        prompt = self._tokenizer.apply_chat_template(
            request.model_dump()["messages"], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        room = self._model.config.max_position_embeddings - len(prompt)
        if room < 1:
            raise HTTPException(400, f"the prompt has {len(prompt)} tokens, which leaves no room for an answer")
        length = min(request.max_tokens, room)
        with self._lock:
            version = self._update()
            [found] = complete(self._model, self._tokenizer, [prompt], length, request.temperature)
        return self._response(prompt, found, version)

    def _response(self, prompt: list[int], found: Completion, version: int) -> dict[str, Any]:
        """Return an answer of OpenAI's form, with the token ids and the version that the learner needs."""
        texts = [self._tokenizer.decode([token]) for token in found.tokens]
        pairs = zip(texts, found.logprobs, strict=True)
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self._tokenizer.decode(found.tokens, skip_special_tokens=True)},
            "finish_reason": "stop" if found.tokens[-1] == self._tokenizer.eos_token_id else "length",
            "token_ids": found.tokens,
            "logprobs": {"content": [{"token": token, "logprob": one, "top_logprobs": []} for token, one in pairs]},
        }
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": f"{NAME}@{version}",
            "prompt_token_ids": prompt,
            "choices": [choice],
        }


def make_app(model: Any, tokenizer: Any, receiver: Receiver) -> FastAPI:
    """Return the application that answers with a model, and with the weights that its receiver takes."""
    # A model's own settings may change what is sampled, so log-probabilities would not be those of training.
    model.generation_config = GenerationConfig()
    app, sampler = FastAPI(), Sampler(model, tokenizer, receiver)
    app.post("/v1/chat/completions")(sampler.chat)
    app.get("/version")(sampler.version)
    return app


def main() -> None:
    parser = argparse.ArgumentParser(description="Serve a policy whose weights are published in a directory.")
    parser.add_argument("--model", type=Path, required=True, metavar="DIR", help="model and tokenizer of transformers")
    parser.add_argument(
        "--weights", required=True, metavar="PLACE", help="directory of the versions, or address of their store"
    )
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling; default: 0")
    options = parser.parse_args()
    torch.manual_seed(options.seed)
    model = AutoModelForCausalLM.from_pretrained(options.model).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    app = make_app(model, tokenizer, Receiver(model, open_store(options.weights)))
    uvicorn.run(app, host="127.0.0.1", port=options.port, log_level="error")


if __name__ == "__main__":
    main()
