"""Plain programs with an unusual configuration, optimizer or scheduler."""

from collections.abc import Mapping
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator

from tests.backends.deepspeed.programs.models import Words, network
from tests.backends.deepspeed.programs.program import Program, Run
from tests.support.methods import BF16, FP32_SUMS, UNCLIPPED

FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "hysteresis": 1, "loss_scale_window": 2}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
HALF = {"torch_autocast": {"enabled": True, "dtype": "float16"}}
OF_AUTOCAST: Mapping[str, Any] = {"rounded": True, "alone": True}
"""DeepSpeed's state of autocast in fp16 outlives its engine: a later engine in fp16 overflows."""
SAFE = {"lower_precision_safe_modules": ["torch.nn.modules.linear.Linear"]}
NO_CLIENT_OPTIMIZER = {"optimizer": None}
UNTESTED = {"zero_allow_untested_optimizer": True}


def zero(**keys: Any) -> dict[str, Any]:
    return {"zero_optimization": keys}


def learn(run: Run) -> None:
    """Train three steps of two micro-steps each. Every rank has its own data."""
    run.learn(run.start(network(), {"gradient_accumulation_steps": 2}), steps=6)


def learn_tied(run: Run) -> None:
    run.learn(run.start(Words(tied=True), {"gradient_accumulation_steps": 2}), steps=6)


def overflowing(run: Run) -> None:
    """Use fp16 with a dynamic loss scale. One step is skipped, and the scale grows and falls."""
    get_accelerator().is_fp16_supported = lambda: True
    engine = run.start(network())
    for step in range(8):
        loss = run.loss(engine)
        engine.backward(loss * 1e5 if step in (1, 4) else loss)
        run.step(engine)
        run.keep("loss scale", float(engine.optimizer.loss_scale))


def overflowing_autocast(run: Run) -> None:
    """fp16 autocast, whose gradient scaler is torch's: a step is skipped, and the scale falls."""
    overflow_in_autocast(run, run.start(network()))


def overflowing_fused(run: Run) -> None:
    """The same with an optimizer that unscales the gradients itself."""
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    overflow_in_autocast(run, run.start(model, {**NO_CLIENT_OPTIMIZER, **UNTESTED}, optimizer=optimizer))


def overflow_in_autocast(run: Run, engine: Any) -> None:
    scaler = engine.torch_autocast_z0_gradscaler or engine.optimizer.torch_autocast_gradscaler
    for step in range(6):
        loss = run.loss(engine)
        engine.backward(loss * 1e9 if step in (1, 4) else loss)
        run.step(engine)
        run.keep("loss scale", float(scaler.get_scale()))


def static_scale(run: Run) -> None:
    get_accelerator().is_fp16_supported = lambda: True
    run.learn(run.start(network()), steps=4)


def autocast_outside(run: Run) -> None:
    """Use autocast of the user's around forward, with an engine in fp32."""
    engine = run.start(network())
    for _ in range(3):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = run.loss(engine)
        engine.backward(loss)
        run.step(engine)


def client_optimizer(run: Run) -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, betas=(0.8, 0.9))
    run.learn(run.start(model, NO_CLIENT_OPTIMIZER, optimizer=optimizer))


def callable_optimizer(run: Run) -> None:
    run.learn(
        run.start(
            model := network(),
            NO_CLIENT_OPTIMIZER,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            model_parameters=list(model.parameters()),
        )
    )


def untested_optimizer(run: Run) -> None:
    model = network()
    extra = {**NO_CLIENT_OPTIMIZER, **UNTESTED}
    run.learn(run.start(model, extra, optimizer=torch.optim.Adagrad(model.parameters(), lr=0.1)))


def client_scheduler(run: Run) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    run.learn(run.start(model, NO_CLIENT_OPTIMIZER, optimizer=optimizer, lr_scheduler=scheduler), steps=4)


def zero_init(run: Run) -> None:
    """Create the model partitioned from the start."""
    with deepspeed.zero.Init(config_dict_or_path=run.config()):
        model = network()
    run.learn(run.start(model), steps=4)


def zero_init_twice(run: Run) -> None:
    """Write weights on rank 0 after `zero.Init`, as `from_pretrained` does."""
    with deepspeed.zero.Init(config_dict_or_path=run.config()):
        model = network()
    with deepspeed.zero.GatheredParameters(list(model.parameters()), modifier_rank=0), torch.no_grad():
        if run.rank == 0:
            for parameter in model.parameters():
                parameter.fill_(0.05)
    run.learn(run.start(model), steps=4)


NO_FP32_SUMS = {0: "unsupported mix of model_dtype"}
NOT_ON_CPU = {3: "not been implemented on CPU"}
ALL_REDUCE = "stage3_use_all_reduce_for_fetch_params"
OFFLOAD = {"device": "cpu", "pin_memory": False}
MUON = {"optimizer": {"type": "Muon", "params": {"torch_adam": None}}, **zero(reduce_scatter=False)}
SCHEDULER = {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}}}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "buckets of default size": zero(reduce_bucket_size=None, stage3_param_persistence_threshold=None),
    "overlap_comm on": zero(overlap_comm=True),
    "overlap_comm off": zero(overlap_comm=False),
    "reduce_scatter off": zero(reduce_scatter=False),
    "round_robin_gradients": zero(round_robin_gradients=True),
    "buckets of one element": zero(reduce_bucket_size=1),
    "bf16": BF16,
    "bf16, communication in fp32": {**BF16, "communication_data_type": "fp32"},
    "a scheduler": SCHEDULER,
    "optimizer offload": zero(offload_optimizer=OFFLOAD),
    "wall_clock_breakdown": {"wall_clock_breakdown": True},
}
OF_STAGE_3: Mapping[str, Mapping[str, Any]] = {
    "stage3_allgather_sequential": zero(stage3_allgather_sequential=True),
    "persistent small parameters": zero(stage3_param_persistence_threshold=100),
    "small sub-groups": zero(sub_group_size=100),
    "no prefetching": zero(stage3_prefetch_bucket_size=0),
    "few live parameters": zero(stage3_max_live_parameters=1, stage3_max_reuse_distance=1),
    "parameter offload": zero(offload_param=OFFLOAD),
    "parameter and optimizer offload": zero(offload_param=OFFLOAD, offload_optimizer=OFFLOAD),
    "module_granularity_threshold": zero(stage3_module_granularity_threshold=1000),
}

PROGRAMS = (
    *(Program(name, learn, config=config) for name, config in SETTINGS.items()),
    *(Program(name, learn, stages=(3,), config=config) for name, config in OF_STAGE_3.items()),
    Program(
        "prescale_gradients",
        learn,
        config={"prescale_gradients": True},
        fails=dict.fromkeys((2, 3), "not yet supported"),
    ),
    Program(
        "gradient_predivide_factor",
        learn,
        config={"gradient_predivide_factor": 4.0},
        fails=dict.fromkeys((2, 3), "not yet supported"),
    ),
    Program("gradient_allreduce_op sum", learn, config={"gradient_allreduce_op": "sum"}, fails={3: "is not supported"}),
    Program("zero_quantized_weights", learn, stages=(3,), config=zero(zero_quantized_weights=True), fails=NOT_ON_CPU),
    Program(
        "zero_quantized_nontrainable_weights",
        learn,
        stages=(3,),
        config=zero(zero_quantized_nontrainable_weights=True),
        fails=NOT_ON_CPU,
    ),
    Program(
        "zero_hpz_partition_size",
        learn,
        stages=(3,),
        config=zero(zero_hpz_partition_size=2),
        refused_weights={3: "zero_hpz_partition_size"},
        alone=True,
    ),
    Program(
        "zero_hpz_partition_size 2 on four ranks",
        learn,
        stages=(3,),
        config=zero(zero_hpz_partition_size=2),
        refused_weights={3: "zero_hpz_partition_size"},
        rounded=True,
        ranks=4,
        alone=True,
    ),
    Program(
        "zero_quantized_gradients",
        learn,
        stages=(3,),
        config=zero(zero_quantized_gradients=True),
        refused={3: "ZeRO++"},
        alone=True,
    ),
    Program(ALL_REDUCE, learn, stages=(3,), config=zero(**{ALL_REDUCE: True}), refused_weights={3: ALL_REDUCE}),
    Program("torch_autocast", learn, config=AUTOCAST, rounded=True),
    Program(
        "torch_autocast, safe modules",
        learn,
        config={"torch_autocast": {**AUTOCAST["torch_autocast"], **SAFE}},
        rounded=True,
    ),
    Program("torch_autocast in fp16, overflows", overflowing_autocast, config=HALF, **OF_AUTOCAST),
    Program("torch_autocast in fp16, clipping off", overflowing_autocast, config={**HALF, **UNCLIPPED}, **OF_AUTOCAST),
    Program(
        "torch_autocast in fp16, a fused optimizer", overflowing_fused, config={**HALF, **UNCLIPPED}, **OF_AUTOCAST
    ),
    Program("bf16, sums in fp32", learn, config=FP32_SUMS, fails=NO_FP32_SUMS, rounded=True),
    Program(
        "bf16, a tied embedding first, sums in fp32",
        learn_tied,
        config=FP32_SUMS,
        fails=NO_FP32_SUMS,
        rounded=True,
    ),
    Program("Muon", learn, config=MUON),
    Program("fp16, overflows", overflowing, config=FP16, rounded=True),
    Program("fp16, static loss scale", static_scale, config={"fp16": {"enabled": True, "loss_scale": 128.0}}),
    Program("autocast of the user", autocast_outside),
    Program("client optimizer", client_optimizer),
    Program("callable optimizer", callable_optimizer),
    Program("untested client optimizer", untested_optimizer),
    Program("client scheduler", client_scheduler),
    Program("zero.Init", zero_init, stages=(3,)),
    Program("zero.Init, weights written by rank 0", zero_init_twice, stages=(3,)),
    Program("one rank", learn, ranks=1),
    Program("three ranks", learn, ranks=3, rounded=True),
)
