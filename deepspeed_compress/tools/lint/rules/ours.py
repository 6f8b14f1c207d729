"""Rules on our own section: what `config` finds, and what the user states about ranks, network and framework.

`config` imports pydantic, which takes a third of the linter's time, so it is imported only for files with the section.
"""

from typing import TYPE_CHECKING

from deepspeed_compress.diagnostics import Diagnostic
from deepspeed_compress.tools.lint.document import Document
from deepspeed_compress.tools.lint.keys import OUR_SECTION
from deepspeed_compress.tools.lint.rule import Context, Findings, finding, key_finding, rule

if TYPE_CHECKING:
    from deepspeed_compress.config import CompressConfig
    from deepspeed_compress.config.section import Kind


def _problems(kind: "Kind", document: Document, context: Context) -> list[Diagnostic]:
    """Return the problems of a kind that `config` finds; none if there is no section."""
    if OUR_SECTION not in document.data:
        return []
    from deepspeed_compress.config.section import problems_by_kind

    return problems_by_kind(document.data, context.world_size).get(kind, [])


@rule("DSC900", "error")
def compress_invalid(document: Document, context: Context) -> Findings:
    """The section deepspeed_compress is invalid.

    These are the errors of `ds-compress check`: unknown keys, wrong values, "auto", and contradictory settings.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 5}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "blockwise", "bits": 4}}}
    Proof: raises ConfigError
    """
    yield from _problems("section", document, context)


@rule("DSC901", "error")
def compress_parallelism(document: Document, context: Context) -> Findings:
    """The section parallelism contradicts DeepSpeed's keys or the number of ranks.

    The section is written into DeepSpeed's own keys, so both must agree. ZeRO 2 and 3 exclude pipelines.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 2}, "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"parallelism": {"zero_stage": 1}}}
    Proof: raises disagrees with
    """
    yield from _problems("parallelism", document, context)


@rule("DSC902", "error")
def compress_against_file(document: Document, context: Context) -> Findings:
    """A method does not work with the rest of the file.

    Without ZeRO, no weights are gathered, and differences of weights can only be sent with ZeRO 1 and 2. DGC and DeMo
    have a momentum of their own, so the optimizer must not have one. The ranks of a node must divide all ranks.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 1}, "deepspeed_compress": {"weights": {"method": "sign"}}}
    Proof: raises cannot be combined with
    """
    yield from _problems("file", document, context)


def parsed_section(document: Document) -> "CompressConfig | None":
    """Return the section if there is one and it is valid, else None."""
    if OUR_SECTION not in document.data:
        return None
    from pydantic import ValidationError

    from deepspeed_compress.config import CompressConfig, with_preset

    try:
        return CompressConfig.model_validate(with_preset(document.data))
    except ValidationError:
        return None


@rule("DSC903", "warning")
def compress_no_effect(document: Document, context: Context) -> Findings:
    """A setting of deepspeed_compress has no effect, or costs more than it gains.

    Training warns of it, too (CompressWarning).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": null}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"gradients": {"method": "topk", "error_feedback": {}}}}
    Proof: warns loses every value that is not sent
    """
    parsed = parsed_section(document)
    if parsed is not None:
        from deepspeed_compress.config.section import find_notices

        yield from find_notices(parsed)


@rule("DSC904", "error")
def compress_unsupported(document: Document, context: Context) -> Findings:
    """The file uses a feature of DeepSpeed that does not work with compression.

    Such engines are refused (UnsupportedError), because they do not reduce gradients in the code that compresses them.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3, "zero_quantized_gradients": true}, "deepspeed_compress": {}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "zero_optimization": {"stage": 3}, "deepspeed_compress": {}}
    Proof: raises UnsupportedError
    """
    yield from _problems("unsupported", document, context)


@rule("DSC913", "info")
def compress_universal_resume(document: Document, context: Context) -> Findings:
    """checkpoint.load_universal is used together with checkpoints from which training resumes by itself.

    A run that resumes by itself loads the universal checkpoint until it has saved a newer one. But the program's
    `engine.load_checkpoint` always loads the universal one, and fails without one (DeepSpeed, runtime/engine.py,
    `load_checkpoint`).

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "checkpoint": {"load_universal": true},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "deepspeed_compress": {"checkpointing": {"every": 100, "directory": "checkpoints", "resume": true}}}
    Proof: accepts every load_checkpoint of the program returns to the universal checkpoint
    """
    saving = document.section(OUR_SECTION, "checkpointing")
    goes_on = saving.get("directory") is not None and saving.get("resume") is not False
    if goes_on and document.get("checkpoint", "load_universal") is True:
        what = "load_checkpoint loads the universal checkpoint each time, whatever this run has saved since"
        yield finding(("checkpoint", "load_universal"), what, "nothing, once the run has saved a checkpoint of its own")


@rule("DSC916", "warning")
def compress_backward_sums(document: Document, context: Context) -> Findings:
    """Tensor-parallel ranks sum gradients in 4 bits.

    Gradients need more bits than outputs do: if they have 8 bits, the loss rises by half as much as with 4 bits in both
    passes (docs/activations.md).

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2},
        "deepspeed_compress": {"gradients": {"method": "none"}, "activations": {"tensor": {"bits": 4}}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "tensor_parallel": {"autotp_size": 2}, "deepspeed_compress": {"gradients": {"method": "none"},
        "activations": {"tensor": {"bits": 4, "backward_bits": 8}}}}
    Context: {"world_size": 2, "model": {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}}
    Proof: accepts the loss ends higher
    """
    tensor = document.section(OUR_SECTION, "activations", "tensor")
    key = "bits" if tensor.get("backward_bits") is None else "backward_bits"
    if tensor.get(key) == 4:
        path = (OUR_SECTION, "activations", "tensor", key)
        yield finding(path, "gradients are summed in 4 bits", '"backward_bits": 8')


@rule("DSC914", "warning")
def compress_rollout_rounding(document: Document, context: Context) -> Findings:
    """Weights for rollout workers are rounded, although exact changes are about as small.

    At a learning rate of 1e-5 or less, few 16-bit weights change in a step. Exact changes of these take about as many
    bytes as rounded ones (docs/rollout.md), and lose nothing.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-06}},
        "deepspeed_compress": {"rollout": {"directory": "policy", "method": "blockwise", "bits": 4}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 1e-06}},
        "deepspeed_compress": {"rollout": {"directory": "policy"}}}
    Proof: accepts rollout workers have weights that are off by half of a step, and versions are not smaller
    """
    rollout, rate = document.section(OUR_SECTION, "rollout"), document.get("optimizer", "params", "lr")
    rounded = rollout.get("method") == "blockwise" and rollout.get("bits") == 4
    if rounded and rollout.get("dtype") != "fp32" and isinstance(rate, int | float) and 0 < rate <= _FEW_CHANGES:
        what = f'"blockwise" loses accuracy and saves nothing at a learning rate of {rate:g}'
        instead = '"exact", or "dtype": "fp32" if rollout workers need more than 16 bits'
        yield finding((OUR_SECTION, "rollout", "method"), what, instead)


_FEW_CHANGES = 1e-5
"""Learning rate up to which exact changes of 16-bit weights are about as small as rounded ones."""


def _active(document: Document) -> bool:
    """Return True if gradients are compressed, by whichever method."""
    ours = document.get(OUR_SECTION)
    return isinstance(ours, dict) and document.section(OUR_SECTION, "gradients").get("method") != "none"


@rule("DSC905", "warning")
def compress_single_rank(document: Document, context: Context) -> Findings:
    """There is only one data-parallel rank, so nothing is compressed.

    Gradients are only exchanged between data-parallel ranks.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "deepspeed_compress": {}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "deepspeed_compress": {"gradients": {"method": "none"}}}
    Context: {"world_size": 1}
    Proof: accepts nothing is sent, and so nothing is compressed
    """
    if _active(document) and context.world_size == document.stages * document.tensor_size:
        what = f"with one data-parallel rank of {context.world_size} there are no gradients to exchange"
        yield key_finding((OUR_SECTION,), what, '"method": "none", or start more ranks')


@rule("DSC906", "warning")
def compress_node_size(document: Document, context: Context) -> Findings:
    """hierarchy.ranks_per_node is not the number of ranks of a node.

    The first level would then cross nodes, or the second would stay inside one.

    Wrong: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "deepspeed_compress": {"gradients": {"hierarchy": {"ranks_per_node": 2}}}}
    Right: {"optimizer": {"type": "AdamW", "params": {"lr": 0.0001}}, "train_micro_batch_size_per_gpu": 1,
        "deepspeed_compress": {"gradients": {"hierarchy": null}}}
    Context: {"world_size": 4, "ranks_per_node": 4}
    Proof: accepts messages cross the network uncompressed
    """
    path = (OUR_SECTION, "gradients", "hierarchy", "ranks_per_node")
    size, node = document.integer(*path), context.ranks_per_node
    if size is not None and node is not None and size != node:
        yield finding(path, f"{size} is not the {node} ranks that a node has", str(node))


@rule("DSC907", "warning")
def compress_warmup_exceeds_total(document: Document, context: Context) -> Findings:
    """All steps of training are uncompressed.

    The first schedule.warmup_steps steps are uncompressed.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
        "deepspeed_compress": {"schedule": {"warmup_steps": 200}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
        "deepspeed_compress": {"schedule": {"warmup_steps": 20}}}
    Proof: accepts nothing is ever compressed
    """
    path = (OUR_SECTION, "schedule", "warmup_steps")
    warmup, total = document.integer(*path), document.integer("scheduler", "params", "total_num_steps")
    if _active(document) and warmup is not None and total is not None and 0 < total <= warmup:
        yield finding(path, f"{warmup} steps are uncompressed, and training has {total}", f"less than {total}")


@rule("DSC911", "info")
def compress_needs_install(document: Document, context: Context) -> Findings:
    """Hugging Face uses the section only on request.

    The Trainer and Accelerate call deepspeed.initialize, which `ds-compress run` and install() extend.

    Wrong: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0},
        "deepspeed_compress": {}}
    Right: {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 0}}
    Context: {"framework": "accelerate"}
    Proof: accepts gradients travel uncompressed unless the program calls deepspeed_compress.install()
    """
    if isinstance(document.get(OUR_SECTION), dict) and context.hugging_face:
        what = "Hugging Face starts DeepSpeed itself, which ignores this section"
        instead = "ds-compress run in front of the script, or deepspeed_compress.install() at its beginning"
        yield key_finding((OUR_SECTION,), what, instead)


@rule("DSC917", "info")
def compress_ends_between_exchanges(document: Document, context: Context) -> Findings:
    """Training ends between two exchanges of islands.

    Each island then saves and evaluates weights of its own, which have a higher loss than those after an exchange.

    Wrong: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1000, "warmup_num_steps": 10}},
        "deepspeed_compress": {"gradients": {"method": "none"}, "islands": {"size": 1, "sync_every": 30}}}
    Right: {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"lr": 0.0001}},
        "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 990, "warmup_num_steps": 10}},
        "deepspeed_compress": {"gradients": {"method": "none"}, "islands": {"size": 1, "sync_every": 30}}}
    Proof: accepts the last 10 steps of the islands are never averaged
    """
    path = ("scheduler", "params", "total_num_steps")
    parsed, total = parsed_section(document), document.integer(*path)
    islands = None if parsed is None else parsed.islands
    if total is None or islands is None or islands.sync_steps is None or islands.elastic or islands.fragments > 1:
        return
    every, rest = islands.sync_steps, (total - islands.delay) % islands.sync_steps
    if rest and total - islands.delay > max(every, islands.warmup_steps):
        what = f"the last exchange is over {rest} steps before the end of {total} (islands.sync_every is {every})"
        yield finding(path, what, str(total - rest))
