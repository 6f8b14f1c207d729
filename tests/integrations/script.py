"""Training script that does not know this package: it takes DeepSpeed's options, uses Trainer and writes a report.

python script.py OUTPUT [--deepspeed FILE] [--local_rank N]
"""

import argparse
import json
import sys
from pathlib import Path

import neighbour  # type: ignore[import-not-found]
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
parser.add_argument("output", type=Path)
parser.add_argument("--deepspeed")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

args = TrainingArguments(
    output_dir=options.output,
    deepspeed=options.deepspeed,
    use_cpu=True,
    max_steps=2,
    logging_steps=1,
    per_device_train_batch_size=2,
    report_to="none",
    save_strategy="no",
)
torch.manual_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2))
rows = [{"input_ids": neighbour.row(start), "labels": neighbour.row(start)} for start in range(16)]
trainer = Trainer(model, args, train_dataset=rows)
trainer.train()
report = {
    "name": __name__,
    "argv": sys.argv,
    "local_rank": options.local_rank,
    "ranks": args.world_size,
    "engine": type(trainer.model_wrapped).__name__,
    "logs": trainer.state.log_history,
}
if args.process_index == 0:
    (options.output / "report.json").write_text(json.dumps(report))
