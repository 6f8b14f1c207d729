"""Programs whose ranks hold different parameters: pipeline, tensor, sequence and expert parallelism."""

from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from torch import Tensor, nn

from tests.backends.deepspeed.programs.models import network
from tests.backends.deepspeed.programs.program import WIDTH, Program, Run
from tests.support.methods import BF16, FP32_SUMS

AUTOTP = {"tensor_parallel": {"autotp_size": 2}}


class Split:
    """Tensor parallelism of size 2 with data parallelism. Tensor-parallel ranks read the same batch."""

    def __init__(self, within_zero_init: bool = False, tied: bool = False) -> None:
        self.within_zero_init, self.tied = within_zero_init, tied

    def __call__(self, run: Run) -> None:
        with deepspeed.zero.Init(config_dict_or_path=run.config(), enabled=self.within_zero_init):
            model = llama(self.tied)
        engine = run.start(model)
        generator = torch.Generator().manual_seed(run.rank // 2)
        for _ in range(4):
            tokens = torch.randint(0, 64, (3, 8), generator=generator)
            loss = engine(input_ids=tokens, labels=tokens, use_cache=False).loss
            run.keep("loss", loss)
            engine.backward(loss)
            run.step(engine)


def llama(tied: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=tied))


class Matrix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def tied_output(module: Matrix, x: Tensor) -> Tensor:
    return (x @ module.weight.t()).sum(dim=1, keepdim=True)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output.float() - target.float()).square().mean()


class Pipelined:
    """Two pipeline stages and two micro-batches per step, with an evaluation between steps."""

    def __init__(self, tied: bool) -> None:
        ends = [TiedLayerSpec("matrix", Matrix, tied_weight_attr="weight")] if tied else [LayerSpec(Matrix)]
        last = (
            TiedLayerSpec("matrix", Matrix, forward_fn=tied_output, tied_weight_attr="weight")
            if tied
            else LayerSpec(nn.Linear, WIDTH, 1)
        )
        self.layers = [*ends, LayerSpec(nn.Linear, WIDTH, WIDTH), LayerSpec(nn.Linear, WIDTH, WIDTH), last]

    def __call__(self, run: Run) -> None:
        model = PipelineModule(self.layers, num_stages=2, loss_fn=mean_square, partition_method="uniform")
        engine = run.start(model, {"gradient_accumulation_steps": 2})
        batches = _Forever(run, next(engine.module.parameters()).dtype)
        for _ in range(3):
            run.keep("loss", engine.train_batch(batches))
            run.keep("loss", engine.eval_batch(batches))


class _Forever:
    def __init__(self, run: Run, dtype: torch.dtype) -> None:
        self.run, self.dtype = run, dtype

    def __next__(self) -> tuple[Tensor, Tensor]:
        x, y = self.run.batch()
        return x.to(self.dtype), y

    def __iter__(self) -> "_Forever":
        return self


def sequence_parallel(run: Run) -> None:
    """Use sequence parallelism of size 2 with DeepSpeed's own groups, which averages gradients over all ranks."""
    size = run.config()["sequence_parallel_size"]
    engine = run.start(network(), mesh_param=(dist.get_world_size() // size, size))
    run.learn(engine, steps=4)


class Slices:
    """Stand-in for Megatron's `mpu`. Ranks 0 and 1 hold one model, and ranks 2 and 3 its replica."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        models = [dist.new_group([0, 1]), dist.new_group([2, 3])]
        replicas = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        self.model, self.data = models[self.rank // 2], replicas[self.rank % 2]

    def get_model_parallel_rank(self) -> int:
        return self.rank % 2

    def get_model_parallel_world_size(self) -> int:
        return 2

    def get_model_parallel_group(self) -> Any:
        return self.model

    def get_data_parallel_rank(self) -> int:
        return self.rank // 2

    def get_data_parallel_world_size(self) -> int:
        return 2

    def get_data_parallel_group(self) -> Any:
        return self.data


def model_parallel(run: Run) -> None:
    """Use groups of the user's. Each rank of a model has its own weights, which are reduced with its replica."""
    model = network()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.model_parallel = True
            parameter.add_(0.01 * (run.rank % 2))
    run.learn(run.start(model, mpu=Slices()), steps=4)


NO_FP32_SUMS = {0: "unsupported mix of model_dtype"}
OF_FOUR = {"ranks": 4, "alone": True}

PROGRAMS = (
    Program("AutoTP 2 x data 2", Split(), stages=(0, 1, 2), config=AUTOTP, **OF_FOUR),
    Program(
        "AutoTP 2 x data 2, bf16, sums in fp32",
        Split(),
        stages=(0, 1, 2),
        config={**AUTOTP, **FP32_SUMS},
        fails=NO_FP32_SUMS,
        rounded=True,
        **OF_FOUR,
    ),
    Program(
        "AutoTP 2 x data 2, bf16, tied, sums in fp32",
        Split(tied=True),
        stages=(0, 1, 2),
        config={**AUTOTP, **FP32_SUMS},
        fails=NO_FP32_SUMS,
        rounded=True,
        **OF_FOUR,
    ),
    Program(
        "AutoTP 2 x data 2, torch_autocast in fp16",
        Split(),
        stages=(0,),
        refused={0: "a loss scale of its own"},
        config={**AUTOTP, "torch_autocast": {"enabled": True, "dtype": "float16"}},
        **OF_FOUR,
    ),
    Program(
        "AutoTP 2 x data 2, zero.Init",
        Split(within_zero_init=True),
        stages=(3,),
        refused={3: "ZeRO 3 divides"},
        config=AUTOTP,
        **OF_FOUR,
    ),
    Program(
        "sequence parallelism 2 x data 2",
        sequence_parallel,
        rounded=True,
        config={"sequence_parallel_size": 2},
        **OF_FOUR,
    ),
    Program("the user's model-parallel groups", model_parallel, stages=(0, 1, 2), **OF_FOUR),
    Program("pipeline 2 x data 2", Pipelined(tied=False), stages=(0, 1), **OF_FOUR),
    Program("pipeline 2 x data 2, tied", Pipelined(tied=True), stages=(0, 1), **OF_FOUR),
    Program("pipeline 2 x data 2, bf16", Pipelined(tied=False), stages=(0, 1), config=BF16, **OF_FOUR),
    Program("pipeline 2 x data 2, tied, bf16", Pipelined(tied=True), stages=(0, 1), config=BF16, **OF_FOUR),
    Program(
        "pipeline 2 x data 2, bf16, sums in fp32",
        Pipelined(tied=False),
        stages=(0, 1),
        config=FP32_SUMS,
        fails=NO_FP32_SUMS,
        rounded=True,
        **OF_FOUR,
    ),
)
