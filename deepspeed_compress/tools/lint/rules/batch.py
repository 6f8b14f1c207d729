"""Rules on batch sizes, and on the reduction of gradients."""

from dataclasses import dataclass

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import ZERO, Context, Findings, finding, rule
from deepspeed_compress.tools.lint.values import AUTO, integer, number, show

_TRAIN = "train_batch_size"
_MICRO = "train_micro_batch_size_per_gpu"
_STEPS = "gradient_accumulation_steps"
_KEYS = (_TRAIN, _MICRO, _STEPS)


@dataclass(frozen=True, slots=True)
class _Sizes:
    """The three batch sizes. A size that is left out is None."""

    train: int | None
    micro: int | None
    steps: int | None

    @property
    def product(self) -> int:
        return (self.micro or 1) * (self.steps or 1)


def _sizes(document: Document) -> _Sizes | None:
    """Return the sizes if all that are given are positive integers. Other values have rules of their own."""
    values = [document.get(key) for key in _KEYS]
    whole = [integer(number(value)) for value in values]
    given = [size for value, size in zip(values, whole, strict=True) if value is not None]
    return _Sizes(*whole) if all(size is not None and size > 0 for size in given) else None


def _counted_ranks(document: Document, context: Context) -> int | None:
    """Return the number of ranks by which DeepSpeed divides the batch, or None if unknown.

    DeepSpeed does not yet know of tensor parallelism when it divides.
    """
    world = context.world_size
    if world is None or (document.has("pipeline") and document.stages == 1):
        return None
    sequence, data = document.integer("sequence_parallel_size"), document.integer("data_parallel_size")
    if sequence is not None and data is not None:
        return data if data > 0 else None
    others = document.stages * max(sequence or 1, 1)
    return world // others if world % others == 0 else None


def _left_out(document: Document) -> bool:
    return document.get(_TRAIN) is None and document.get(_MICRO) is None


@rule("DSC202", "error")
def batch_missing(document: Document, context: Context) -> Findings:
    """No batch size is given.

    DeepSpeed needs train_batch_size or train_micro_batch_size_per_gpu (runtime/config.py). Hugging Face fills in only
    keys that are "auto". Lightning adds both sizes.

    Wrong:
        {"gradient_accumulation_steps": 2}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    Context: {"framework": "deepspeed"}
    Proof: raises Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided
    """
    if _left_out(document) and context.framework not in (None, "lightning"):
        what = f"neither {_TRAIN} nor {_MICRO} is given (allowed: one of them, or both)"
        yield finding((_MICRO,), what, f'"{_MICRO}": 1, for instance')


@rule("DSC210", "warning")
def batch_left_to_program(document: Document, context: Context) -> Findings:
    """No batch size is given, and the program that reads the file is not known.

    Some programs complete the configuration, such as Lightning and DeepSpeed's autotuner. DeepSpeed itself
    (runtime/config.py) and Hugging Face need one of the two sizes. With --framework deepspeed, hf or accelerate, this
    is the error DSC202. A file with the section deepspeed_compress alone (`ds-compress run --section`) needs none.

    Wrong:
        {"gradient_accumulation_steps": 2}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2}
    Proof: raises Either train_batch_size or train_micro_batch_size_per_gpu needs to be provided
    """
    if _left_out(document) and context.framework is None and set(document.data) != {OUR_SECTION}:
        what = f"neither {_TRAIN} nor {_MICRO} is given, and DeepSpeed stops unless the program adds one"
        yield finding((_MICRO,), what, f'"{_MICRO}": 1, for instance, or lint with --framework')


@rule("DSC203", "error")
def batch_not_positive(document: Document, context: Context) -> Findings:
    """A batch size is zero, negative or a fraction.

    DeepSpeed asserts positive sizes (runtime/config.py). It multiplies fractions, and the data loader fails later.

    Wrong: {"train_micro_batch_size_per_gpu": 0}
    Right: {"train_micro_batch_size_per_gpu": 1}
    Proof: raises has to be greater than 0
    """
    for key in _KEYS:
        value = document.number(key)
        if value is not None and (value <= 0 or value != int(value)):
            what = f"{show(value)} is not a positive whole number (allowed: 1 or more)"
            yield finding((key,), what, show(max(round(value), 1)))


@rule("DSC201", "error")
def batch_indivisible(document: Document, context: Context) -> Findings:
    """train_batch_size is not a multiple of the other two, so it fits no number of ranks.

    DeepSpeed divides, rounds down and then asserts that the product is right (runtime/config.py).

    Wrong: {"train_batch_size": 10, "train_micro_batch_size_per_gpu": 4}
    Right: {"train_batch_size": 12, "train_micro_batch_size_per_gpu": 4}
    Proof: raises Check batch related parameters
    """
    sizes = _sizes(document)
    if sizes is not None and sizes.train is not None and sizes.train % sizes.product:
        given = " x ".join(key for key in _KEYS[1:] if document.get(key) is not None)
        what = f"{sizes.train} is not a multiple of {given}, {sizes.product} (allowed: multiples)"
        yield finding((_TRAIN,), what, _multiple(sizes.train, sizes.product))


def _multiple(size: int, unit: int) -> str:
    """Return the multiples of `unit` next to `size`, as text."""
    below = size // unit * unit
    return f"{below} or {below + unit}" if below else str(unit)


@rule("DSC200", "error")
def batch_triangle(document: Document, context: Context) -> Findings:
    """The batch sizes do not fit the number of ranks.

    train_batch_size must be train_micro_batch_size_per_gpu x gradient_accumulation_steps x data-parallel size;
    DeepSpeed asserts it (runtime/config.py). The stages of a pipeline work on the same samples, so the data-parallel
    size is the number of ranks divided by that of the stages (runtime/pipe/engine.py).

    Wrong: {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1}
    Right: {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4}
    Context: {"world_size": 2}
    Proof: raises Check batch related parameters
    """
    sizes, ranks = _sizes(document), _counted_ranks(document, context)
    # An indivisible size has a rule of its own.
    if sizes is None or ranks is None or sizes.train is None or sizes.train % sizes.product:
        return
    unit, complete = sizes.product * ranks, sizes.micro is not None and sizes.steps is not None
    if (sizes.train == unit) if complete else (sizes.train % unit == 0):
        return
    if ranks != context.world_size and sizes.train == sizes.product * (context.world_size or 0):
        what = f"{sizes.train} counts all {context.world_size} ranks, of which only {ranks} are data-parallel"
        yield finding((_TRAIN,), what, str(unit))
        return
    parts = " x ".join(f"{key} {show(document.get(key))}" for key in _KEYS[1:] if document.get(key) is not None)
    what = f"{sizes.train} does not fit {parts + ' x ' if parts else ''}{ranks} data-parallel ranks"
    instead = f"{unit}, or leave one of the three out" if complete else _multiple(sizes.train, unit)
    yield finding((_TRAIN,), what, instead)


@rule("DSC207", "warning")
def batch_counts_tensor_ranks(document: Document, context: Context) -> Findings:
    """With AutoTP, train_batch_size counts ranks that see the same samples.

    The configuration is read before the tensor-parallel groups exist (deepspeed/__init__.py). The product therefore
    includes all ranks, and engine.train_batch_size() is too large by a factor of the tensor-parallel size.

    Wrong: {"train_batch_size": 2, "tensor_parallel": {"autotp_size": 2}}
    Right: {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": 2}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts the batch is smaller than the file says, by the tensor-parallel size
    """
    size, sizes = document.tensor_size, _sizes(document)
    if size > 1 and sizes is not None and sizes.train is not None and document.stages == 1:
        what = f"with autotp_size {size} DeepSpeed counts every rank, but {size} ranks see the same samples"
        instead = f'"{_MICRO}" and "{_STEPS}" only, and {size} times as many steps for the same batch'
        yield finding((_TRAIN,), what, instead)


@rule("DSC208", "error")
def sequence_parallel_divides_world(document: Document, context: Context) -> Findings:
    """sequence_parallel_size does not divide the number of ranks.

    DeepSpeed divides one by the other and continues with a fraction of a rank (runtime/config.py).

    Wrong: {"train_batch_size": 4, "sequence_parallel_size": 3}
    Right: {"train_batch_size": 4, "sequence_parallel_size": 2}
    Context: {"world_size": 4}
    Proof: accepts the data-parallel size is taken for 1.33
    """
    size, data = document.integer("sequence_parallel_size"), document.get("data_parallel_size")
    if context.world_size is not None and size is not None and data is None and (size < 1 or context.world_size % size):
        what = f"{size} does not divide {context.world_size} ranks"
        yield finding(("sequence_parallel_size",), what, f"a divisor of {context.world_size}")


@rule("DSC209", "error")
def mesh_is_not_world(document: Document, context: Context) -> Findings:
    """data_parallel_size x sequence_parallel_size is not the number of ranks.

    DeepSpeed makes a mesh of the two sizes (deepspeed/__init__.py); ranks outside of it fail.

    Wrong: {"train_batch_size": 4, "sequence_parallel_size": 2, "data_parallel_size": 1}
    Right: {"train_batch_size": 4, "sequence_parallel_size": 2, "data_parallel_size": 2}
    Context: {"world_size": 4}
    Proof: raises Error
    """
    size, data = document.integer("sequence_parallel_size"), document.integer("data_parallel_size")
    if size and data and context.world_size is not None and size * data != context.world_size:
        what = f"{data} x sequence_parallel_size {size} is not the {context.world_size} ranks of the job"
        yield finding(("data_parallel_size",), what, f"sizes whose product is {context.world_size}")


_FORMATS = ("fp16", "bf16", "fp32")
_OP = "gradient_allreduce_op"
_FACTOR = "gradient_predivide_factor"


@rule("DSC320", "error")
def scaling_with_reduce_scatter(document: Document, context: Context) -> Findings:
    """prescale_gradients or gradient_predivide_factor is given with stage 2 or 3 and reduce_scatter.

    Asserted by the optimizers of ZeRO (runtime/zero/stage_1_and_2.py, stage3.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "prescale_gradients": true}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "reduce_scatter": false}, "prescale_gradients": true}
    Proof: raises pre-scale gradients is not yet supported
    """
    prescales, divides = document.get("prescale_gradients") is True, document.number(_FACTOR) not in (None, 0, 1)
    for key, is_set, neutral in (("prescale_gradients", prescales, "false"), (_FACTOR, divides, "1.0")):
        if is_set and document.scatters:
            what = f"{show(document.get(key))} is not supported with reduce_scatter and stage {document.stage}"
            yield finding((key,), f"{what} (allowed: {neutral})", f'{neutral}, or "reduce_scatter": false')


@rule("DSC322", "error")
def predivide_by_zero(document: Document, context: Context) -> Findings:
    """gradient_predivide_factor is 0.

    Gradients are divided by it before they are reduced (runtime/engine.py), without a check.

    Wrong: {"train_batch_size": 8, "gradient_predivide_factor": 0}
    Right: {"train_batch_size": 8, "gradient_predivide_factor": 1.0}
    Proof: accepts the first reduction divides by zero
    """
    if document.number(_FACTOR) == 0:
        yield finding((_FACTOR,), "0 causes a division of gradients by zero (allowed: other numbers)", "1.0")


@rule("DSC325", "error")
def sum_not_supported(document: Document, context: Context) -> Findings:
    """gradient_allreduce_op is sum with stage 3, ZenFlow or DeepCompile.

    Checked when the configuration is read (runtime/config.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "gradient_allreduce_op": "sum"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "gradient_allreduce_op": "sum"}
    Proof: raises is not supported with ZeRO stage 3
    """
    refused = {
        "stage 3": document.stage == 3,
        "ZenFlow": isinstance(document.get(ZERO, "zenflow"), dict),
        "DeepCompile": document.is_true("compile", "deepcompile"),
    }
    other = next((part for part, is_on in refused.items() if is_on), None)
    if document.string(_OP).lower() == "sum" and other:
        yield finding((_OP,), f'"sum" is not supported with {other} (allowed: mean)', '"mean"')


@rule("DSC328", "error")
def communication_dtype_unknown(document: Document, context: Context) -> Findings:
    """DeepSpeed does not know the dtype of communication.

    Here, DeepSpeed knows only the short names, unlike under data_types (runtime/config.py).

    Wrong: {"train_batch_size": 8, "communication_data_type": "float16"}
    Right: {"train_batch_size": 8, "communication_data_type": "fp16"}
    Proof: raises Invalid communication_data_type
    """
    for key in ("communication_data_type", "seq_parallel_communication_data_type"):
        value = document.get(key)
        if value not in (None, AUTO) and not (isinstance(value, str) and value.lower() in _FORMATS):
            names = {"float16": "fp16", "half": "fp16", "bfloat16": "bf16", "float32": "fp32", "float": "fp32"}
            meant = names.get(value.lower().removeprefix("torch.")) if isinstance(value, str) else None
            what = f"{show(value)} is not known (allowed: fp16, bf16, fp32)"
            correction = fix("Use DeepSpeed's name", replace(document, (key,), meant)) if meant else None
            yield finding((key,), what, show(meant) if meant else '"bf16", "fp16" or "fp32"', correction)


@rule("DSC329", "warning")
def fp16_communication_of_bf16(document: Document, context: Context) -> Findings:
    """Gradients in bf16 are sent as fp16.

    The largest number is 3e38 in bf16 and 65504 in fp16. Without a loss scale, nothing keeps gradients below that
    (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "fp16"}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "bf16": {"enabled": true}, "communication_data_type": "bf16"}
    Proof: accepts large gradients become infinite on the way
    """
    if document.bf16 and document.string("communication_data_type").lower() == "fp16":
        what = '"fp16" cannot hold the range of gradients in bf16: large ones become infinite (allowed: bf16, fp32)'
        yield finding(("communication_data_type",), what, '"bf16" or "fp32"')


@rule("DSC330", "error")
def no_grad_norm(document: Document, context: Context) -> Findings:
    """compute_grad_norm is false where DeepSpeed needs the norm.

    It needs the norm with stages 0 and 3 (runtime/zero/config.py), with offload_optimizer, for clipping, which is to a
    norm of 1.0 by default (runtime/zero/stage_1_and_2.py), and in BF16_Optimizer, which bf16 with stage 1 and
    accumulation in fp32 chooses (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "compute_grad_norm": false}, "gradient_clipping": 0}
    Proof: raises requires gradient_clipping=0
    """
    clipping = document.number("gradient_clipping", default=1.0)
    given = "" if document.has("gradient_clipping") else ", its default"
    reasons = {
        f"stage {document.stage} (allowed: 1, 2)": document.stage in (0, 3),
        "bf16, stage 1 and accumulation in fp32 (allowed: stage 2)": document.chooses_bf16_optimizer,
        "offload_optimizer": bool(document.offload("offload_optimizer")),
        f"gradient_clipping {show(clipping)}{given} (allowed: 0)": clipping is not None and clipping > 0,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    if reason is not None and document.truth(*_NORM, default=True) is False and document.stage is not None:
        yield finding(_NORM, f"false is refused with {reason}", "true, or change the other setting")


_NORM = (ZERO, "compute_grad_norm")


@rule("DSC334", "error")
def unmanaged_accumulation(document: Document, context: Context) -> Findings:
    """managed_gradient_accumulation is false with overlap_comm below stage 2, DeepCompile, or a pipeline.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2, "overlap_comm": true}, "managed_gradient_accumulation": false}
    Proof: raises supports ZeRO overlap_comm only with ZeRO stage 2
    """
    others = {
        "overlap_comm below stage 2": document.is_true(ZERO, "overlap_comm") and document.stage in (0, 1),
        "DeepCompile": document.is_true("compile", "deepcompile"),
        "a pipeline": context.is_pipelined(document),
    }
    managed = document.get("managed_gradient_accumulation", default=True) is not False
    for other in (name for name, is_used in others.items() if is_used and not managed):
        yield finding(("managed_gradient_accumulation",), f"false is refused with {other}", "true")


@rule("DSC336", "warning")
def quantized_communication_without_stage_3(document: Document, context: Context) -> Findings:
    """ZeRO++ quantization has no effect below stage 3; the section deepspeed_compress works with every stage.

    Only the optimizer of stage 3 receives these settings (runtime/engine.py).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "zero_quantized_gradients": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: accepts gradients travel uncompressed
    """
    for key in ("zero_quantized_gradients", "zero_quantized_weights", "zero_quantized_nontrainable_weights"):
        if document.is_true(ZERO, key) and document.stage in (0, 1, 2):
            ours = 'the section "deepspeed_compress", which compresses with every stage'
            what = f"true has no effect with stage {document.stage} (useful: with stage 3)"
            yield finding((ZERO, key), what, ours if key == "zero_quantized_gradients" else "stage 3, or false")


@rule("DSC337", "warning")
def quantized_gradients_on_one_node(document: Document, context: Context) -> Findings:
    """zero_quantized_gradients is true on a single node.

    The two-step all-to-all of ZeRO++ (runtime/comm/coalesced_collectives.py) saves only traffic between nodes.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "bf16": {"enabled": true}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "bf16": {"enabled": true}}
    Context: {"world_size": 2, "ranks_per_node": 2}
    Proof: unproved its kernels are for GPUs
    """
    nodes = context.world_size is not None and context.world_size == context.ranks_per_node
    if document.is_true(ZERO, "zero_quantized_gradients") and document.stage == 3 and nodes:
        what = "true quantizes twice to save traffic between nodes, and there is only one node (useful: with several)"
        yield finding((ZERO, "zero_quantized_gradients"), what, "false")
