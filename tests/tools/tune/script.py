"""Training script that does not know of this package.

python script.py CONFIG OUTPUT_DIR [--steps N] [--pipeline] [--rewrite] [--own-optimizer] [--local_rank N]
"""

import argparse
import json
from pathlib import Path

import deepspeed
import torch
from deepspeed.pipe import PipelineModule
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("config")
parser.add_argument("--output_dir", type=Path, required=True)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--pipeline", action="store_true")
parser.add_argument("--rewrite", action="store_true", help="hand on what the script knows of the file, and no more")
parser.add_argument("--own-optimizer", action="store_true")
parser.add_argument("--local_rank", type=int, default=-1)
options = parser.parse_args()

deepspeed.init_distributed("gloo")
torch.manual_seed(0)
layers = [nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)]
if options.pipeline:
    model = PipelineModule(layers, num_stages=2, loss_fn=nn.MSELoss(), partition_method="uniform")
else:
    model = nn.Sequential(*layers)
config = json.loads(Path(options.config).read_text())
if options.rewrite:
    config = {key: value for key, value in config.items() if not key.startswith("deepspeed")}
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3) if options.own_optimizer else None
engine, *_ = deepspeed.initialize(
    model=model, optimizer=optimizer, model_parameters=list(model.parameters()), config=config
)
options.output_dir.mkdir(parents=True, exist_ok=True)
generator = torch.Generator().manual_seed(1 if options.pipeline else engine.global_rank)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(4, 64, generator=generator)
    return x, x[:, :3].sum(1, keepdim=True)


with (options.output_dir / f"losses{engine.global_rank}").open("w") as losses:
    while engine.global_steps < options.steps:
        if options.pipeline:
            loss = engine.train_batch(iter([batch() for _ in range(engine.gradient_accumulation_steps())]))
        else:
            x, y = batch()
            loss = (engine(x) - y).square().mean()
            print(float(loss), file=losses, flush=True)
            engine.backward(loss)
            engine.step()
