"""Programs that call backward and step in all allowed ways, with other calls in between."""

import deepspeed
import torch
from torch import nn

from tests.backends.deepspeed.programs.models import Branches, network
from tests.backends.deepspeed.programs.program import Program, Run

TWO = {"gradient_accumulation_steps": 2}
UNMANAGED = {"managed_gradient_accumulation": False}
TENSOR_BACKWARD = {0: "Direct calls to tensor.backward() are not supported"}


def plain_steps(run: Run) -> None:
    run.learn(run.start(network()), steps=4)


def two_micro_steps(run: Run) -> None:
    run.learn(run.start(network(), TWO), steps=6)


def several_backwards(run: Run) -> None:
    """Run two forwards and two backwards before each step, which DeepSpeed does not expect."""
    engine = run.start(network())
    for _ in range(3):
        for _ in range(2):
            engine.backward(run.loss(engine))
        run.step(engine)


def own_boundaries(run: Run) -> None:
    """Run micro-steps without `step`, and announce the last one."""
    engine = run.start(network(), TWO)
    for count in (3, 1, 2):
        for micro in range(count):
            engine.set_gradient_accumulation_boundary(micro == count - 1)
            engine.backward(run.loss(engine), scale_wrt_gas=False)
        run.step(engine)


def as_accelerate_does(run: Run) -> None:
    """Set the boundary before each backward, and call `step` only after the last one."""
    engine = run.start(network(), TWO)
    for micro in range(6):
        last = micro % 2 == 1
        engine.set_gradient_accumulation_boundary(is_boundary=last)
        engine.backward(run.loss(engine))
        if last:
            run.step(engine)


def called_twice(run: Run) -> None:
    """Run two forwards and one backward of the sum, as pairwise losses do."""
    engine = run.start(network())
    for _ in range(3):
        engine.backward(run.loss(engine) + 0.5 * run.loss(engine))
        run.step(engine)


def retained_graph(run: Run) -> None:
    """Run two backwards over one graph."""
    engine = run.start(network(), TWO)
    for _ in range(3):
        loss = run.loss(engine)
        engine.backward(loss, retain_graph=True)
        engine.step()
        engine.backward(loss * 0.3)
        run.step(engine)


def tensor_backward(run: Run) -> None:
    """Call `loss.backward()`, which the engine notices through hooks."""
    engine = run.start(network(), TWO)
    for _ in range(6):
        run.loss(engine).backward()
        run.step(engine)


def scaled_backward(run: Run) -> None:
    """Call `engine.scale(loss).backward()`."""
    engine = run.start(network())
    for _ in range(3):
        engine.scale(run.loss(engine)).backward()
        run.step(engine)


def output_backward(run: Run) -> None:
    """Run backward from an output that is not a scalar, with a given gradient."""
    engine = run.start(network())
    for _ in range(3):
        output = engine(run.batch()[0])
        run.keep("output", output)
        output.backward(torch.full_like(output, 0.1))
        run.step(engine)


def unmanaged(run: Run) -> None:
    """Set `managed_gradient_accumulation: false`, so that each `step` ends the accumulation."""
    engine = run.start(network(), UNMANAGED)
    for count in (2, 3, 1):
        for _ in range(count):
            engine.backward(run.loss(engine) / count, scale_wrt_gas=False)
        run.step(engine)


def unmanaged_tensor_backward(run: Run) -> None:
    engine = run.start(network(), UNMANAGED)
    for count in (2, 1):
        for _ in range(count):
            run.loss(engine).backward()
        run.step(engine)


def unmanaged_conditional(run: Run) -> None:
    """Do the same with branches that only some of the backwards use."""
    engine = run.start(Branches(3), UNMANAGED)
    for takes in ([(0,), (1,)], [(1, 2)], [(), (0,)]):
        for take in takes:
            engine.backward(run.loss(engine, take=take))
        run.step(engine)


def no_sync(run: Run) -> None:
    """Run all micro-steps except the last one in `engine.no_sync()`."""
    engine = run.start(network())
    for count in (3, 2, 1):
        with engine.no_sync():
            for _ in range(count - 1):
                engine.backward(run.loss(engine))
        engine.backward(run.loss(engine))
        run.step(engine)


def no_sync_then_other_branches(run: Run) -> None:
    """Use branches only in micro-steps inside `no_sync`. Their gradients are reduced with the last micro-step."""
    engine = run.start(Branches(2))
    for _ in range(3):
        with engine.no_sync():
            engine.backward(run.loss(engine, take=(0,)))
        engine.backward(run.loss(engine, take=(1,)))
        run.step(engine)


def coalesced(run: Run) -> None:
    """Run several backwards and one reduction at the end of the block."""
    engine = run.start(network())
    for count in (2, 3, 1):
        with engine.coalesce_grad_reduction():
            for _ in range(count):
                engine.backward(run.loss(engine) / count, scale_wrt_gas=False)
        run.step(engine)


def coalesced_conditional(run: Run) -> None:
    engine = run.start(Branches(3))
    for takes in ([(0,), (1,)], [(2,)], [(0, 1), (), (2,)]):
        with engine.coalesce_grad_reduction():
            for take in takes:
                engine.backward(run.loss(engine, take=take))
        run.step(engine)


def coalesced_nothing(run: Run) -> None:
    """Enter the block without a backward, before training starts."""
    engine = run.start(network())
    with engine.coalesce_grad_reduction():
        pass
    run.learn(engine)


def step_inside_coalesced(run: Run) -> None:
    """Cause an error of DeepSpeed's own, and expect no other."""
    engine = run.start(network())
    try:
        with engine.coalesce_grad_reduction():
            engine.step()
    except AssertionError as error:
        run.keep(f"error: {error}", 0)
    run.learn(engine)


def no_sync_inside_coalesced(run: Run) -> None:
    engine = run.start(network())
    for outer, inner in (
        (engine.coalesce_grad_reduction, engine.no_sync),
        (engine.no_sync, engine.coalesce_grad_reduction),
    ):
        try:
            with outer(), inner():
                pass
        except AssertionError as error:
            run.keep(f"error: {error}", 0)
    run.learn(engine)


def evaluation_within_accumulation(run: Run) -> None:
    engine = run.start(network(), TWO)
    for _ in range(6):
        engine.backward(run.loss(engine))
        engine.eval()
        with torch.no_grad():
            run.loss(engine)
        engine.train()
        run.step(engine)


def evaluation_without_no_grad(run: Run) -> None:
    """Run forwards whose graph is never used."""
    engine = run.start(network())
    for _ in range(3):
        run.loss(engine)
        engine.backward(run.loss(engine))
        run.step(engine)
        run.loss(engine)


def tails_of_epochs(run: Run) -> None:
    """Use batches of other sizes, and of a different size on each rank."""
    engine = run.start(network(), TWO)
    for size in (3, 3, 1 + run.rank, 2, 3, 2 - run.rank):
        engine.backward(run.loss(engine, size=size))
        run.step(engine)


def zero_grad_by_the_user(run: Run) -> None:
    engine = run.start(network())
    for _ in range(3):
        engine.backward(run.loss(engine))
        run.step(engine)
        engine.zero_grad()
        engine.optimizer.zero_grad()


def discarded_gradients(run: Run) -> None:
    """Run a backward in `no_sync` and discard its gradients."""
    engine = run.start(network())
    for _ in range(3):
        with engine.no_sync():
            engine.backward(run.loss(engine))
        engine.zero_grad()
        engine.backward(run.loss(engine))
        run.step(engine)


def hooks_of_the_user(run: Run) -> None:
    """Change and observe gradients by hooks on parameters and modules."""
    model = network()
    observed: list[float] = []
    model[2].weight.register_hook(lambda gradient: gradient * 0.5)
    model[4].register_full_backward_hook(lambda module, before, after: observed.append(float(after[0].sum())))
    run.learn(run.start(model))
    run.keep("observed", observed)


def scaled_loss(run: Run) -> None:
    """Use losses of very different sizes."""
    engine = run.start(network())
    for factor in (1e-6, 1.0, 1e6):
        engine.backward(run.loss(engine) * factor)
        run.step(engine)


def nan_on_one_rank(run: Run) -> None:
    """Use a NaN on one rank. All ranks must hold the same weights even if no step is skipped."""
    engine = run.start(network())
    for step in range(4):
        loss = run.loss(engine)
        engine.backward(loss * float("nan") if (step, run.rank) == (1, 1) else loss)
        run.step(engine)


def one_empty_loss(run: Run) -> None:
    """Multiply the loss of one rank by 0, as programs do for a batch without labels."""
    engine = run.start(network(), TWO)
    for micro in range(6):
        engine.backward(run.loss(engine) * (0.0 if micro % 2 == run.rank else 1.0))
        run.step(engine)


def module_called(run: Run) -> None:
    """Run forward through `engine.module`, and backward through the engine."""
    engine = run.start(network())
    for _ in range(3):
        engine.backward(run.loss(engine.module))
        run.step(engine)


def gradients_read(run: Run) -> None:
    """Call `safe_get_full_grad` between backward and step, and read optimizer states after it."""
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad, safe_get_full_optimizer_state

    engine = run.start(network())
    for _ in range(3):
        engine.backward(run.loss(engine))
        for name, parameter in engine.module.named_parameters():
            run.keep(f"gradient of {name}", safe_get_full_grad(parameter))
        run.step(engine)
        for name, parameter in engine.module.named_parameters():
            run.keep(f"master of {name}", safe_get_full_fp32_param(parameter))
            run.keep(f"moment of {name}", safe_get_full_optimizer_state(parameter, "exp_avg"))


def gradients_and_weights_written(run: Run) -> None:
    """Call `safe_set_full_grad` before a step and `safe_set_full_fp32_param` after it."""
    from deepspeed.utils import safe_get_full_grad, safe_set_full_fp32_param, safe_set_full_grad

    engine = run.start(network())
    for _ in range(3):
        engine.backward(run.loss(engine))
        parameter = next(engine.module.parameters())
        safe_set_full_grad(parameter, safe_get_full_grad(parameter) * 0.5)
        run.step(engine)
        last = list(engine.module.parameters())[-1]
        safe_set_full_fp32_param(last, torch.full((1, 3), 0.25))


def gathered_for_generation(run: Run) -> None:
    """Generate as TRL does: gather the weights, call the model without the engine, and continue training."""
    engine = run.start(network())
    for _ in range(3):
        run.learn(engine, steps=1)
        with deepspeed.zero.GatheredParameters(list(engine.module.parameters())), torch.no_grad():
            weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
            for parameter in weights:
                run.keep("generation", parameter.sum())


def unwrapped_for_generation(run: Run) -> None:
    from deepspeed.runtime.zero import unwrap_model_for_generation

    engine = run.start(network())
    for _ in range(3):
        run.learn(engine, steps=1)
        with unwrap_model_for_generation(engine) as model, torch.no_grad():
            run.loss(model)


def weights_written(run: Run) -> None:
    """Change weights on rank 0 inside `GatheredParameters`, as custom initialization does."""
    model = network()
    engine = run.start(model)
    run.learn(engine, steps=1)
    if run.stage == 3:
        with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0):
            if run.rank == 0:
                nn.init.zeros_(model[0].weight)
    run.learn(engine, steps=2)


def batch_size_changed(run: Run) -> None:
    """Call `set_train_batch_size` during a run, which changes the number of micro-steps."""
    engine = run.start(network(), TWO)
    run.learn(engine, steps=4)
    engine.set_train_batch_size(engine.train_batch_size() * 2)
    run.learn(engine, steps=8)


def interrupted(run: Run) -> None:
    """Raise an error of the user's between forward and backward, and train the next batch."""
    engine = run.start(network())
    for step in range(3):
        try:
            loss = run.loss(engine)
            if step == 1:
                raise ValueError("a bad batch")
        except ValueError:
            continue
        engine.backward(loss)
        run.step(engine)


def learning_rate_zero(run: Run) -> None:
    """Use a learning rate of 0, so that the optimizer changes no weights."""
    run.learn(run.start(network(), {"optimizer": {"params": {"lr": 0.0, "weight_decay": 0.0}}}))


PROGRAMS = (
    Program("plain steps", plain_steps),
    Program("two micro-steps", two_micro_steps),
    Program("several backwards before a step", several_backwards),
    Program("boundaries set by the user", own_boundaries),
    Program("as Accelerate and Trainer call it", as_accelerate_does),
    Program("engine called twice before one backward", called_twice),
    Program("two backwards over a retained graph", retained_graph, fails={3: "must match the size"}),
    Program("loss.backward()", tensor_backward, fails=TENSOR_BACKWARD),
    Program("engine.scale(loss).backward()", scaled_backward, fails=TENSOR_BACKWARD),
    Program("backward of an output that is no scalar", output_backward, fails=TENSOR_BACKWARD),
    Program("unmanaged accumulation", unmanaged),
    Program("unmanaged accumulation, loss.backward()", unmanaged_tensor_backward, fails=TENSOR_BACKWARD),
    Program("unmanaged accumulation, conditional branches", unmanaged_conditional),
    Program("no_sync", no_sync, stages=(0, 1)),
    Program("no_sync, then other branches", no_sync_then_other_branches, stages=(0, 1)),
    Program("gradients of no_sync taken back", discarded_gradients, stages=(0, 1)),
    Program("coalesce_grad_reduction", coalesced, stages=(1, 2, 3)),
    Program("coalesce_grad_reduction, conditional branches", coalesced_conditional, stages=(1, 2, 3)),
    Program("coalesce_grad_reduction, empty", coalesced_nothing, stages=(1, 2, 3)),
    Program("coalesce_grad_reduction with step() inside", step_inside_coalesced, stages=(1, 2, 3)),
    Program("coalesce_grad_reduction and no_sync nested", no_sync_inside_coalesced, stages=(1,)),
    Program("evaluation within accumulation", evaluation_within_accumulation),
    Program("forwards without backward", evaluation_without_no_grad),
    Program("batches of other sizes at tails of epochs", tails_of_epochs),
    Program("zero_grad by the user", zero_grad_by_the_user),
    Program("hooks of the user", hooks_of_the_user),
    Program("gradient_clipping 0", two_micro_steps, config={"gradient_clipping": 0.0}),
    Program("gradient_clipping 0.1", two_micro_steps, config={"gradient_clipping": 0.1}),
    Program("losses of very different sizes", scaled_loss),
    Program("NaN on one rank", nan_on_one_rank),
    Program("a rank's loss is 0", one_empty_loss),
    Program("forward through engine.module", module_called),
    Program("gradients and states read", gradients_read, stages=(1, 2, 3)),
    Program("gradients and weights written", gradients_and_weights_written, fails={3: "exceeds dimension size"}),
    Program("weights gathered between steps", gathered_for_generation),
    Program("unwrap_model_for_generation", unwrapped_for_generation, stages=(3,)),
    Program("weights written in GatheredParameters", weights_written, stages=(3,)),
    Program("set_train_batch_size in mid-run", batch_size_changed),
    Program("a batch given up after forward", interrupted),
    Program("learning rate 0", learning_rate_zero),
)
