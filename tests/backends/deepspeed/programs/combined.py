"""Programs that combine several unusual things, as scripts for fine-tuning and reinforcement learning do."""

from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from tests.backends.deepspeed.programs.models import Branches, network
from tests.backends.deepspeed.programs.program import WIDTH, Program, Run

TWO = {"gradient_accumulation_steps": 2}
KEPT = {"zero_optimization": {"stage3_gather_16bit_weights_on_model_save": True}}


class TiedAdapter(nn.Module):
    """Frozen embedding that is the output layer too, with a trained adapter on both uses."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, WIDTH)
        self.output = nn.Linear(WIDTH, 32, bias=False)
        self.output.weight = self.embedding.weight
        self.embedding.weight.requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.late = nn.Linear(32, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.embedding((x[:, :5] > 0).long() @ torch.tensor([16, 8, 4, 2, 1]))
        return self.late(torch.tanh(self.output(x + self.up(self.down(x)))))


def tied_adapter(run: Run) -> None:
    """Train adapters of a frozen tied embedding, and load a checkpoint without frozen parameters."""
    engine = run.start(TiedAdapter(), TWO)
    run.learn(engine, steps=4)
    engine.save_checkpoint(run.directory, exclude_frozen_parameters=True)
    engine.load_checkpoint(run.directory, load_module_strict=False)
    run.learn(engine, steps=4)


def critic_within_accumulation(run: Run) -> None:
    """Step a critic without the section between the micro-steps of an actor."""
    actor = run.start(network(), TWO)
    critic = run.start(network(), has_section=False)
    for _ in range(4):
        for _ in range(2):
            loss = run.loss(actor)
            run.learn(critic, steps=1)
            actor.backward(loss)
            run.learn(critic, steps=1)
            run.step(actor)


class Failing(nn.Module):
    """Layers with one in the middle that raises if it is told to, forward or backward."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh()), nn.Linear(17, 1)
        self.fails = ""

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        if self.fails == "forward":
            raise ValueError("a bad batch")
        if self.fails == "backward":
            x.register_hook(self._raise)
        return self.head(x)

    def _raise(self, gradient: Tensor) -> None:
        raise ValueError("a bad batch")


class Interrupted:
    """Training in which the second micro-step of some steps raises on every rank, and is repeated."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, run: Run) -> None:
        engine = run.start(Failing(), TWO)
        for micro in range(12):
            if micro in (5, 9):
                self._fail(run, engine)
            run.learn(engine, steps=1)

    def _fail(self, run: Run, engine: Any) -> None:
        engine.module.fails = self.place
        try:
            engine.backward(run.loss(engine))
        except ValueError as error:
            run.keep(f"error: {error}", 0)
        engine.module.fails = ""


def averaged_copy(run: Run) -> None:
    """Keep an exponential mean of the weights in a second model, and evaluate both between steps."""
    model = network()
    with deepspeed.zero.Init(config_dict_or_path=run.config(), enabled=run.stage == 3):
        mean = network()
    mean.requires_grad_(False)
    engine = run.start(model)
    for _ in range(4):
        run.learn(engine, steps=1)
        for ours, theirs in zip(mean.parameters(), engine.module.parameters(), strict=True):
            gathered = [one for one in (ours, theirs) if hasattr(one, "ds_id")]
            with deepspeed.zero.GatheredParameters(gathered, modifier_rank=0), torch.no_grad():
                ours.lerp_(theirs, 0.5)
                run.keep("mean", ours)


def exported(run: Run) -> None:
    """Export the weights of an engine in three ways while one without the section lives and trains."""
    engine, other = run.start(network(), KEPT), run.start(network(), KEPT, has_section=False)
    for turn in range(2):
        for one in (engine, other):
            run.learn(one, steps=1)
            states = one._zero3_consolidated_16bit_state_dict() if run.stage == 3 else one.module.state_dict()
            for name, value in (states or {}).items():
                run.keep(f"exported {name}", value)
            one.save_16bit_model(run.directory / f"weights{turn}")
            one.save_checkpoint(run.directory / f"of{run.engines.index(one)}")
    for one in (other, engine):
        one.load_checkpoint(run.directory / f"of{run.engines.index(one)}")
        run.learn(one, steps=1)


def evaluation_before_backward(run: Run) -> None:
    """Evaluate, and read the weights, between forward and backward of the same step."""
    engine = run.start(network())
    for _ in range(4):
        loss = run.loss(engine)
        engine.eval()
        with torch.no_grad():
            run.loss(engine)
        engine.train()
        for parameter in engine.module.parameters():
            with deepspeed.zero.GatheredParameters([parameter] if run.stage == 3 else []):
                run.keep("weights read", parameter)
        engine.backward(loss)
        run.step(engine)


def statistics_loaded(run: Run) -> None:
    """Load the running statistics of a checkpoint, which every rank had for itself."""
    model = nn.Sequential(nn.Linear(WIDTH, 17), nn.BatchNorm1d(17), nn.Linear(17, 1))
    engine = run.start(model)
    run.learn(engine)
    run.keep("running mean", model[1].running_mean)
    engine.save_checkpoint(run.directory)
    engine.load_checkpoint(run.directory)
    run.keep("running mean", model[1].running_mean)
    run.learn(engine)


def two_dtypes(run: Run) -> None:
    """Train fp32 adapters of a frozen base in bf16, without any precision in the configuration."""
    model = Branches(2)
    model.body.to(torch.bfloat16).requires_grad_(False)
    model.body.register_forward_pre_hook(lambda module, inputs: (inputs[0].to(torch.bfloat16),))
    model.body.register_forward_hook(lambda module, inputs, output: output.float())
    engine = run.start(model, TWO)
    for _ in range(6):
        x, y = run.batch()
        loss = (engine(x, take=(0, 1)) - y).square().mean()
        run.keep("loss", loss)
        engine.backward(loss)
        run.step(engine)


def same_model_again(run: Run) -> None:
    """Make engines one after the other for the model of one that was destroyed."""
    model = network()
    for _ in range(2):
        run.learn(run.start(model))
        run.end(run.engines.pop())
    run.learn(run.start(model))


def group_at_rest(run: Run) -> None:
    """Use a layer twice whose parameter group has a learning rate of 0, and raise it later."""
    model = Branches(1)
    model.branches.append(model.branches[0])
    rest = [p for name, p in model.named_parameters() if not name.startswith("branches")]
    given = [{"params": rest}, {"params": list(model.branches[0].parameters()), "lr": 0.0, "weight_decay": 0.0}]
    engine = run.start(model, TWO, model_parameters=given)
    for step in range(8):
        if step == 4:
            engine.optimizer.param_groups[1]["lr"] = 1e-2
        engine.backward(run.loss(engine, take=(0, 1)))
        run.step(engine)


class Numbers(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x[:3].sum(dim=0, keepdim=True)


def data_of_deepspeed(run: Run) -> None:
    """Read the data that `deepspeed_io` divides, shuffled and not, for two epochs."""
    engine = run.start(network())
    loader, other = (engine.deepspeed_io(Numbers(), num_local_io_workers=0, route=route) for route in ("train", "eval"))
    for _ in range(2):
        for data in (loader, other):
            for x, y in data:
                loss = (engine(x) - y).square().mean()
                run.keep("size", float(len(x)))
                engine.backward(loss)
                run.step(engine)
    run.keep("batches", len(loader))
    run.keep("batch", engine.train_batch_size())


def mean_in_an_engine(run: Run) -> None:
    """Compare the weights with those of an engine without the section, whose model is made in `zero.Init`."""
    engine = run.start(network())
    with deepspeed.zero.Init():
        mean = network()
    other = run.start(mean, has_section=False)
    for _ in range(3):
        run.learn(engine, steps=1)
        for ours, theirs in zip(mean.parameters(), engine.module.parameters(), strict=True):
            with deepspeed.zero.GatheredParameters([ours, theirs]), torch.no_grad():
                run.keep("distance", (ours - theirs).norm())
        run.learn(other, steps=1)


PROGRAMS = (
    Program("LoRA of a frozen tied embedding, saved without it", tied_adapter),
    Program("critic without the section, inside an accumulation", critic_within_accumulation),
    Program("forward raises within accumulation", Interrupted("forward")),
    Program(
        "backward raises within accumulation",
        Interrupted("backward"),
        fails={2: "has already been reduced", 3: "AssertionError"},
    ),
    Program("mean of the weights in a model of zero.Init", averaged_copy),
    Program("mean of the weights in a second engine", mean_in_an_engine, stages=(3,)),
    Program("weights exported beside an engine without the section", exported),
    Program("evaluation and weights read before backward", evaluation_before_backward),
    Program("running statistics loaded", statistics_loaded),
    Program("frozen base in bf16", two_dtypes, rounded=True),
    Program("engine made again for the same model", same_model_again),
    Program("shared layer in a group that rests", group_at_rest),
    Program("data divided by DeepSpeed", data_of_deepspeed),
)
