"""Rules on pipelines. A `pipeline` section, or stages in ours, indicate that the model is a PipelineModule."""

from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.fixes import fix, replace
from deepspeed_compress.tools.lint.rule import Context, Findings, rule
from deepspeed_compress.tools.lint.rules.common import ZERO, corrected, finding, hugging_face
from deepspeed_compress.tools.lint.values import integer, number, show, truth


def _pipelined(document: Document, context: Context) -> bool:
    """Return True if the model is a pipeline. Hugging Face ignores the section `pipeline`, whatever it says."""
    return not hugging_face(context) if document.has("pipeline") else document.stages > 1


@rule("DSC600", "error")
def pipeline_with_zero_2_or_3(document: Document, context: Context) -> Findings:
    """ZeRO 2 or 3 is used with a pipeline.

    Partitioned gradients cannot be accumulated over micro-batches (runtime/pipe/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 2},
        "train_micro_batch_size_per_gpu": 1, "pipeline": {"activation_checkpoint_interval": 1}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "zero_optimization": {"stage": 1},
        "train_micro_batch_size_per_gpu": 1, "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises ZeRO-2 and ZeRO-3 are incompatible with pipeline parallelism
    """
    # Our own section's rules compare its stages with ZeRO.
    if document.has("pipeline") and document.stage in (2, 3) and not hugging_face(context):
        what = f"stage {document.stage} does not work with pipelines (allowed: 0, 1)"
        yield corrected(document, (ZERO, "stage"), what, 1, "Write stage 1", safe=False)


@rule("DSC601", "warning")
def pipeline_overlap_ignored(document: Document, context: Context) -> Findings:
    """overlap_comm has no effect with a pipeline.

    The engine turns it off and warns (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": true}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1, "overlap_comm": false}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: warns Pipeline parallelism does not support overlapped communication
    """
    path = (ZERO, "overlap_comm")
    if _pipelined(document, context) and document.is_true(*path) and document.stage == 1:
        yield corrected(document, path, "true has no effect with pipelines", False, "Write false")


@rule("DSC602", "error")
def pipeline_partition_boolean(document: Document, context: Context) -> Findings:
    """pipe_partitioned or grad_partitioned is not a boolean.

    The engine asserts a boolean, without a message (runtime/pipe/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"pipe_partitioned": "true"}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"pipe_partitioned": true}}
    Context: {"world_size": 2}
    Proof: raises AssertionError
    """
    for path in (("pipeline", "pipe_partitioned"), ("pipeline", "grad_partitioned")):
        value = document.get(*path, default=True)
        if not isinstance(value, bool) and not hugging_face(context):
            what, meant = f"{show(value)} is not a boolean (allowed: true, false)", truth(value)
            correction = None if meant is None else fix("Write a boolean", replace(document, path, meant))
            yield finding(path, what, "true", correction)


@rule("DSC603", "error")
def pipeline_interval_number(document: Document, context: Context) -> Findings:
    """pipeline.activation_checkpoint_interval is not a number.

    The engine compares it with 0 without a check (runtime/pipe/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": "1"}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises TypeError
    """
    path = ("pipeline", "activation_checkpoint_interval")
    value = document.get(*path, default=0)
    if number(value) is None and not hugging_face(context):
        meant = integer(value)
        correction = None if meant is None else fix("Write a number", replace(document, path, meant))
        yield finding(path, f"{show(value)} is not a number (allowed: 0 or more)", "1", correction)


@rule("DSC604", "error")
def pipeline_divides_world(document: Document, context: Context) -> Findings:
    """The number of stages does not divide the number of ranks.

    PipelineModule, to which the program passes the number, checks it (runtime/pipe/module.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8, "pipeline": {"stages": 3}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8, "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises must divide distributed world size
    """
    count, world = document.integer("pipeline", "stages"), context.world_size
    divides = count is None or count <= 0 or world is None or world % count == 0
    if not divides and not hugging_face(context):
        yield finding(("pipeline", "stages"), f"{count} stages do not divide {world} ranks", f"a divisor of {world}")


@rule("DSC605", "info")
def few_micro_batches(document: Document, context: Context) -> Findings:
    """There are fewer micro-batches than pipeline stages.

    A step has gradient_accumulation_steps micro-batches (runtime/pipe/engine.py). While the pipeline fills and drains,
    ranks are idle.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "deepspeed_compress": {"parallelism": {"pipeline": 2}, "gradients": {"method": "none"}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 8,
        "deepspeed_compress": {"parallelism": {"pipeline": 2}, "gradients": {"method": "none"}}}
    Context: {"world_size": 2}
    Proof: accepts ranks are idle most of the time
    """
    count, steps = document.stages, document.integer("gradient_accumulation_steps", default=1)
    given = document.has("gradient_accumulation_steps") or document.get("train_batch_size") is None
    if _pipelined(document, context) and steps is not None and 0 < steps < count and given:
        idle = round(100 * (count - 1) / (steps + count - 1))
        what = f"{steps} micro-batches in {count} stages leave each rank idle for {idle} % of the time"
        yield finding(("gradient_accumulation_steps",), what, f"{4 * count} or more")


@rule("DSC606", "error")
def unmanaged_pipeline(document: Document, context: Context) -> Findings:
    """managed_gradient_accumulation is false with a pipeline.

    Asserted by the engine (runtime/engine.py).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "managed_gradient_accumulation": false, "pipeline": {"activation_checkpoint_interval": 1}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "pipeline": {"activation_checkpoint_interval": 1}}
    Context: {"world_size": 2}
    Proof: raises is not supported with pipeline parallelism
    """
    if _pipelined(document, context) and document.get("managed_gradient_accumulation", default=True) is False:
        yield finding(("managed_gradient_accumulation",), "false is refused with pipelines", "true")


@rule("DSC607", "warning")
def more_stages_than_layers(document: Document, context: Context) -> Findings:
    """The pipeline has more stages than the model has layers.

    Some stages get no layer (runtime/pipe/module.py), and their ranks only pass on activations.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "deepspeed_compress": {"parallelism": {"pipeline": 4}, "gradients": {"method": "none"}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 16,
        "deepspeed_compress": {"parallelism": {"pipeline": 2}, "gradients": {"method": "none"}}}
    Context: {"world_size": 4, "model": {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 4}}
    Proof: accepts ranks without layers do nothing useful
    """
    layers, count = integer((context.model or {}).get("num_hidden_layers")), document.stages
    if _pipelined(document, context) and layers is not None and count > layers + 2:
        where = ("pipeline", "stages") if document.has("pipeline", "stages") else ("deepspeed_compress", "parallelism")
        what = f"{count} stages are more than the {layers} layers, embedding and head of the model"
        yield finding(where, what, f"{layers + 2} or fewer")
