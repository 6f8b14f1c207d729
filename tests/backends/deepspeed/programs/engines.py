"""Programs with several engines."""

import contextlib

import deepspeed
import torch
from torch import Tensor, nn

from tests.backends.deepspeed.programs.models import network
from tests.backends.deepspeed.programs.program import WIDTH, Program, Run


def generator() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, WIDTH))


def gan(run: Run) -> None:
    """Train a generator whose loss is computed by the discriminator's engine."""
    making, judging = run.start(generator()), run.start(network())
    for _ in range(3):
        real, fake = run.batch()[0], making(run.batch()[0])
        loss = nn.functional.softplus(-judging(real)).mean() + nn.functional.softplus(judging(fake.detach())).mean()
        run.keep("loss of the discriminator", loss)
        judging.backward(loss)
        run.step(judging)
        loss = nn.functional.softplus(-judging(fake)).mean()
        run.keep("loss of the generator", loss)
        making.backward(loss)
        run.step(making)
        judging.zero_grad()


def gan_with_frozen_judge(run: Run) -> None:
    """Do the same with frozen discriminator parameters during the generator's step."""
    making, judging = run.start(generator()), run.start(network())
    for _ in range(3):
        real, fake = run.batch()[0], making(run.batch()[0])
        judging.backward((judging(real) - judging(fake.detach())).square().mean())
        run.step(judging)
        judging.module.requires_grad_(False)
        loss = judging.module(fake).square().mean() if run.stage < 3 else judging(fake).square().mean()
        run.keep("loss of the generator", loss)
        making.backward(loss)
        run.step(making)
        judging.module.requires_grad_(True)


def alternating(run: Run) -> None:
    """Train two engines in turn, each with its own losses, as for actor and critic."""
    actor, critic = run.start(network()), run.start(network(), {"gradient_accumulation_steps": 2})
    for _ in range(4):
        run.learn(actor, steps=1)
        run.learn(critic, steps=1)


def interleaved(run: Run) -> None:
    """Run both forwards, then both backwards, then both steps."""
    engines = [run.start(network()), run.start(network())]
    for _ in range(3):
        losses = [run.loss(engine) for engine in engines]
        for engine, loss in zip(engines, losses, strict=True):
            engine.backward(loss)
        for engine in engines:
            run.step(engine)


def one_loss_of_two(run: Run) -> None:
    """Run one `backward` of the sum of the losses of two engines."""
    engines = [run.start(network()), run.start(network())]
    for _ in range(3):
        sum(run.loss(engine) for engine in engines).backward()
        for engine in engines:
            run.step(engine)


def chained(run: Run) -> None:
    """Use the output of the first engine as the input of the second one. One loss trains both."""
    first, second = run.start(generator()), run.start(network())
    for _ in range(3):
        loss = _loss(run, second, first(run.batch()[0]))
        loss.backward()
        run.step(second)
        run.step(first)


def _loss(run: Run, engine: nn.Module, x: Tensor) -> Tensor:
    loss = engine(x).square().mean()
    run.keep("loss", loss)
    return loss


def with_reference(run: Run) -> None:
    """Use a reference model in an engine without optimizer, with a copy of the configuration, as TRL does.

    Under ZeRO 1 and 2, TRL sets stage 0 in the copy.
    """
    engine = run.start(network())
    config = run.config(optimizer=None, zero_optimization={"stage": 3 if run.stage == 3 else 0})
    reference = deepspeed.initialize(model=network(), config=config)[0]
    reference.eval()
    for _ in range(3):
        with torch.no_grad():
            run.loss(reference)
        engine.backward(run.loss(engine))
        run.step(engine)


def one_after_the_other(run: Run) -> None:
    """Train twice in one process, with both engines alive."""
    for _ in range(2):
        run.learn(run.start(network()))


def beside_plain(run: Run) -> None:
    """Train in turns with engines without the section, which were made before and after the one with it."""
    first = run.start(network(), has_section=False)
    engines = [first, run.start(network()), run.start(network(), has_section=False)]
    for _ in range(3):
        for engine in engines:
            run.learn(engine, steps=1)


def after_failure(run: Run) -> None:
    """Train after a mistake in the configuration of the optimizer, as in a notebook."""
    params = {"lr": 1e-2, "torch_adam": True, "misspelled": 1}
    with contextlib.suppress(TypeError):
        run.start(network(), {"optimizer": {"type": "AdamW", "params": params}})
    for has_section in (False, True):
        run.learn(run.start(network(), has_section=has_section))


def within_init(run: Run) -> None:
    """Make the model of a second engine in `deepspeed.zero.Init` while the first one trains."""
    first = run.start(network())
    run.learn(first, steps=1)
    with deepspeed.zero.Init():
        model = network()
    second = run.start(model, has_section=False)
    for _ in range(3):
        run.learn(first, steps=1)
        run.learn(second, steps=1)


PROGRAMS = (
    Program(
        "GAN, through the discriminator's engine",
        gan,
        stages=(1, 2, 3),
        fails={2: "has already been reduced", 3: "NoneType"},
    ),
    Program("GAN, the discriminator frozen meanwhile", gan_with_frozen_judge),
    Program("actor and critic, alternating", alternating),
    Program("two engines, interleaved", interleaved),
    Program("one loss of two engines", one_loss_of_two, stages=(1, 2, 3)),
    Program("an engine's output is the input of another", chained, stages=(1, 2, 3)),
    Program("reference model without optimizer", with_reference),
    Program("reference model without optimizer in bf16", with_reference, config={"bf16": {"enabled": True}}),
    Program("two engines one after the other", one_after_the_other),
    Program("engines without the section, in turns", beside_plain),
    Program("an engine that fails, and others after it", after_failure),
    Program("deepspeed.zero.Init beside an engine", within_init, stages=(3,)),
)
