"""Programs that train adapters of PEFT."""

import copy
from typing import Any

import deepspeed
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from tests.backends.deepspeed.programs.program import WIDTH, Program, Run

TWO = {"gradient_accumulation_steps": 2}


class Base(nn.Module):
    """Embedding, two layers that adapters change, and an output that is tied to the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.first, self.second = nn.Linear(WIDTH, 17), nn.Linear(17, WIDTH)
        self.output = nn.Linear(WIDTH, 32, bias=False)
        self.output.weight = self.embedding.weight
        self.head = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        rows = (x[:, :5] > 0).long() @ torch.tensor([16, 8, 4, 2, 1])
        hidden = torch.tanh(self.second(torch.tanh(self.first(self.embedding(rows) + x))))
        return self.head(torch.tanh(self.output(hidden)))


def adapted(**settings: Any) -> PeftModel:
    """Return a model with the adapter "default", which is trained, as are layers in `modules_to_save`."""
    torch.manual_seed(0)
    # An adapter whose second matrix is zero, as by default, has no gradients in its first step.
    chosen = {"r": 2, "target_modules": ["first", "second"], "init_lora_weights": False, **settings}
    return get_peft_model(Base(), LoraConfig(**chosen))


def two_adapters() -> PeftModel:
    model = adapted()
    model.add_adapter("other", LoraConfig(r=3, target_modules=["second"], init_lora_weights=False))
    return model


class Training:
    """Program that trains an adapter with the given settings of LoRA."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def __call__(self, run: Run) -> None:
        run.learn(run.start(adapted(**self._settings), TWO), steps=6)


def switched(run: Run) -> None:
    """Train two adapters in turns, each for a step of two micro-batches. Both are the optimizer's from the start."""
    model = two_adapters()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    engine = run.start(model, TWO)
    for name in ("default", "other", "default", "other"):
        engine.module.set_adapter(name)
        run.learn(engine, steps=2)


def added(run: Run) -> None:
    """Add an adapter after some steps, with a new engine for a model with the same weights."""
    model = adapted()
    engine = run.start(model, TWO)
    run.learn(engine, steps=4)
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        state = {name: value.clone() for name, value in model.state_dict().items()}
    run.end(engine)
    run.engines.remove(engine)
    model = adapted()
    model.load_state_dict(state)
    model.add_adapter("other", LoraConfig(r=3, target_modules=["second"], init_lora_weights=False))
    model.set_adapter("other")
    run.learn(run.start(model, TWO), steps=4)


def resumed(run: Run) -> None:
    """Save without the frozen weights, and go on in a new engine whose base is that of the pretrained model."""
    engine = run.start(adapted(), TWO)
    run.learn(engine, steps=4)
    engine.save_checkpoint(run.directory, exclude_frozen_parameters=True)
    run.end(engine)
    run.engines.remove(engine)
    engine = run.start(adapted(), TWO)
    engine.load_checkpoint(run.directory, load_module_strict=False)
    run.learn(engine, steps=4)


def merged(run: Run) -> None:
    """Export the merged model between steps, and compare its outputs with those of the adapted one."""
    engine = run.start(adapted(use_dora=True), TWO)
    x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH)
    for _ in range(2):
        run.learn(engine, steps=2)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
            state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        whole = adapted(use_dora=True)
        whole.load_state_dict(state)
        whole.eval()
        given = whole(x)
        assert torch.allclose(copy.deepcopy(whole).merge_and_unload()(x), given, atol=1e-5)
        run.keep("exported", given)


PROGRAMS = (
    Program("PEFT: LoRA", Training()),
    Program("PEFT: DoRA", Training(use_dora=True)),
    Program("PEFT: a trained head beside LoRA", Training(modules_to_save=["head"])),
    Program("PEFT: a trained tied embedding beside LoRA", Training(modules_to_save=["embedding"])),
    Program("PEFT: adapters trained in turns", switched),
    Program("PEFT: an adapter added in a new engine", added),
    Program("PEFT: resumed without the frozen weights", resumed),
    Program("PEFT: merged export between steps", merged),
)
