"""The endpoint of the policy: a process that answers agents with the newest published weights."""

import argparse
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from deepspeed_compress.agents.endpoint import make_endpoint
from deepspeed_compress.agents.policy import Policy, Updates
from deepspeed_compress.agents.serving import make_server
from deepspeed_compress.rollout import Receiver, open_store


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
    updates = Updates(Receiver(model, open_store(options.weights)))
    policy = Policy(model, tokenizer.pad_token_id, tokenizer.eos_token_id, updates)
    make_server(make_endpoint(policy, tokenizer), "127.0.0.1", options.port).run()


if __name__ == "__main__":
    main()
