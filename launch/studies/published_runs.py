"""Published training steps as predictions: one CSV format for calibration and for checks.

Columns: those of `published_steps.csv` (sizes of the model, GPUs, layout, step time). Empty cells take the usual value.
Further columns are read if they exist: `software` (a key of `SOFTWARE`), `attention` (generation of the flash
kernel; 0 for separate kernels), `network` (as `--network`), `per_node`, `ffn`, `kv_heads`, `head_size`, `gated`,
`tied`, `experts`, `active`, `shard_within`, `year`, `outcome` (`oom`: out of memory), `gpu_gb`, `gpu_tb_s` and
`gpu_tflops` of a GPU that is unlike that of the table, and `FACTS`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from deepspeed_compress.planner.cluster import Cluster, read_network
from deepspeed_compress.planner.gpus import Gpu, find_gpu
from deepspeed_compress.planner.layout import Layout, Recompute
from deepspeed_compress.planner.model import Model
from deepspeed_compress.planner.software import SOFTWARE, Software

CALIBRATION = Path(__file__).with_name("published_steps.csv")
"""The 18 runs that the constants are fitted to."""
OTHERS = Path(__file__).with_name("other_steps.csv")
"""Runs of about 20 other programs, which the widths of intervals are fitted to, and configurations that were out of
memory. `note` says what was assumed."""


@dataclass(frozen=True, slots=True)
class Run:
    """A published run.

    Attributes:
        source: Source of the figures.
        name: Source, model and layout.
        cluster: Its GPUs.
        model: Its model.
        software: Its program.
        layout: Its layout.
        seq: Tokens of a sequence.
        seconds: Measured seconds of a step, or None.
        memory: Measured bytes of a rank, or None.
        ran: Whether it ran, or else was out of memory.
    """

    source: str
    name: str
    cluster: Cluster
    model: Model
    software: Software
    layout: Layout
    seq: int
    seconds: float | None
    memory: float | None
    ran: bool = True


def read_run(row: Mapping[str, str | None]) -> Run:
    """Return the run of a row."""
    cells = {key: value.strip() for key, value in row.items() if key and value and value.strip()}
    year = _year(cells)
    model, seq = _model(cells), int(float(cells["seq"]))
    layout = _layout(cells)
    software = _software(cells, layout, year)
    if software.name == "megatron" or (software.name == "nanotron" and layout.tensor > 1):
        # nanotron gives stages equal work, like DeepSpeed, and divides layers like Megatron.
        layout = replace(layout, engine="megatron")
    gpu = _gpu(cells)
    per_node = min(int(cells.get("per_node", gpu.per_node)), layout.ranks)
    usual = f"{_USUAL_NETWORKS.get(gpu.name, 400)}gbit/gpu"
    network = read_network(cells.get("network", usual), per_node)
    seconds = _seconds(cells, model, layout, seq)
    memory = float(cells["mem_gb"]) * 1e9 if "mem_gb" in cells else None
    source = cells.get("source", "")
    name = f"{source} {model.name} {layout}"
    cluster, ran = Cluster(gpu, layout.ranks, per_node, network), cells.get("outcome") != "oom"
    return Run(source, name, cluster, model, software, layout, seq, seconds, memory, ran)


USABLE = 0.99
"""Share of a GPU's memory that the driver leaves."""


def _gpu(cells: Mapping[str, str]) -> Gpu:
    """Return the GPU of the table with the figures that differ from it."""
    gpu = find_gpu(cells.get("gpu", "A100-80"))
    return replace(
        gpu,
        peak=1e12 * float(cells["gpu_tflops"]) if "gpu_tflops" in cells else gpu.peak,
        memory=USABLE * 2**30 * float(cells["gpu_gb"]) if "gpu_gb" in cells else gpu.memory,
        memory_rate=1e12 * float(cells["gpu_tb_s"]) if "gpu_tb_s" in cells else gpu.memory_rate,
    )


_USUAL_NETWORKS: Mapping[str, float] = {
    "A100-80": 200, "A100-40": 200, "V100": 25, "L40S": 50, "4090": 12.5, "MI250X": 100
}  # fmt: skip
"""Gbit/s of a GPU's share of its node's cards; 400 for those that are not listed."""


def _year(cells: Mapping[str, str]) -> float:
    """Return the year of the source, from its number on arXiv or the text; 2024 if nothing tells."""
    if "year" in cells:
        return float(cells["year"])
    text = cells.get("source", "")
    if number := re.search(r"\b(\d\d)(\d\d)\.\d{4,5}", text):
        return 2000 + int(number[1]) + (int(number[2]) - 1) / 12
    if short := re.search(r"\b(?:SC|20)(\d\d)\b", text):
        return 2000 + int(short[1])
    return 2024.0


_ATTENTION = ((2022.7, 0), (2023.6, 1), (9999.0, 2))
"""Generation of the usual attention kernel until a year: the first came in mid-2022, the second in mid-2023."""
_ATTENTION_HF = ((2024.0, 0), (9999.0, 2))
"""The same in transformers, which had separate kernels by default until version 4.36."""


def _software(cells: Mapping[str, str], layout: Layout, year: float) -> Software:
    text = f"{cells.get('software', '')} {cells.get('source', '')} {cells.get('note', '')}".lower()
    names = {
        "megatron-deepspeed": "megatron-deepspeed|bloom|mt-?nlg",
        "megatron": "megatron|nemo|sc21",
        "hf": r"\bhf\b|hugging|axolotl|trainer",
        "fsdp": "fsdp|titan|foundry",
    }
    divided = layout.tensor > 1 or layout.pipeline > 1
    usual = "megatron" if divided else "deepspeed" if layout.zero == 3 or "deepspeed" in text else "fsdp"
    found = next((name for name, pattern in names.items() if re.search(pattern, text)), usual)
    name = cells.get("software", found)
    software = SOFTWARE.get(name, SOFTWARE[found])
    usual_kernels = _ATTENTION_HF if software.name == "hf" and "flash" not in text else _ATTENTION
    attention = int(cells.get("attention", next(kind for until, kind in usual_kernels if year < until)))
    if software.name == "megatron" and year < 2023 and "overlaps" not in cells:
        # Megatron reduced all fp16 gradients at once, after backward, until 2023, and did not overlap tensor traffic
        # before 2022.
        software = replace(software, overlaps=False, gradient=2, bucket=1e12, tensor_overlaps=year >= 2022)
    facts = {name: type(getattr(software, name))(float(cells[name])) for name in FACTS if name in cells}
    software = replace(software, attention=attention, **facts)
    if "eager" in facts:
        alike = next(program for program in SOFTWARE.values() if program.eager == software.eager)
        software = replace(software, elementwise=alike.elementwise)
    # Weights and gradients have four bytes beside the states.
    return replace(software, optimizer=software.optimizer * (software.states + 4) / 16)


FACTS = (
    "optimizer", "gradient", "held", "states", "update", "logit", "eager", "checkpoints", "hides", "overlaps",
    "tensor_overlaps",
)  # fmt: skip
"""Columns with attributes of `Software` in which a run is known to be unlike its program in the table."""


def _zero(text: str) -> int:
    """Return the ZeRO stage; full sharding of FSDP equals stage 3."""
    digits = re.search("[0-3]", text)
    return int(digits[0]) if digits else 3 if "fsdp" in text.lower() else 0


def _layout(cells: Mapping[str, str]) -> Layout:
    tensor, pipeline = int(cells.get("tp", 1)), int(cells.get("pp", 1))
    data = int(cells.get("dp", 0)) or int(cells["gpus"]) // (tensor * pipeline)
    micro = int(float(cells.get("mbs", 1)))
    batch = int(float(cells.get("gbs", micro * data)))
    text = cells.get("recompute", "none").lower()
    recompute: Recompute = "full" if "full" in text else "selective" if "selective" in text else "none"
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        data=data,
        zero=_zero(cells.get("zero", "0")),
        micro=micro,
        accumulation=max(1, round(batch / (micro * data))),
        recompute=recompute,
        virtual=int(cells.get("virtual", 1)),
        sequence_parallel="seqpar" in text,
        shard_within=int(cells.get("shard_within", 0)),
    )


_SHAPES: Mapping[tuple[int, int], tuple[int, int]] = {
    (4096, 32000): (11008, 32),
    (4096, 32768): (14336, 8),
    (4096, 128256): (14336, 8),
    (5120, 32000): (13824, 40),
    (6656, 32000): (17920, 52),
    (8192, 32000): (28672, 8),
    (8192, 128256): (28672, 8),
    (16384, 128256): (53248, 8),
    (3072, 128256): (8192, 8),
    (2048, 128256): (8192, 8),
    (2048, 32000): (5632, 4),
    (3584, 152064): (18944, 4),
    (5120, 152064): (13824, 8),
    (8192, 152064): (29568, 8),
}
"""MLP width and key-value heads of Llama and Qwen models, by hidden size and vocabulary (their config.json)."""


_NAMED_SHAPES: Mapping[str, tuple[int, int]] = {
    "llama.*65b": (22016, 64),
    "mistral.*7b|mixtral.*8x7b": (14336, 8),
    "mixtral.*8x22b": (16384, 8),
}
"""The same for models that share their hidden size and vocabulary with others."""


def _model(cells: Mapping[str, str]) -> Model:
    hidden, name = int(cells["hidden"]), cells.get("model", "model")
    heads = int(cells.get("heads", hidden // 128))
    text = f"{name} {cells.get('note', '')}".lower()
    usual = bool(re.search("llama|mistral|mixtral|qwen|vicuna|deepseek", text))
    gated = cells.get("gated", str(usual)).lower() in ("1", "true", "yes")
    vocab = int(cells.get("vocab", 32000 if gated else 51200))
    plain = (round(8 * hidden / 3 / 256) * 256 if gated else 4 * hidden, heads)
    ffn, kv_heads = _SHAPES.get((hidden, vocab), plain) if gated else plain
    for pattern, sizes in _NAMED_SHAPES.items():
        if re.search(pattern, text):
            ffn, kv_heads = sizes
    return Model(
        name=name,
        family="llama" if gated else "gpt2",
        layers=int(cells["layers"]),
        hidden=hidden,
        heads=heads,
        kv_heads=int(cells.get("kv_heads", kv_heads)),
        head_size=int(cells.get("head_size", hidden // heads)),
        ffn=int(cells.get("ffn", ffn)),
        gated=gated,
        vocab=vocab,
        tied=cells.get("tied", str(not gated)).lower() in ("1", "true", "yes"),
        positions=0 if gated else int(float(cells["seq"])),
        experts=int(cells.get("experts", 8 if "mixtral" in text else 1)),
        active=int(cells.get("active", 2 if "mixtral" in text else 1)),
        dropout=not gated and not re.search("mpt|opt|neox", text),
    )


def _seconds(cells: Mapping[str, str], model: Model, layout: Layout, seq: int) -> float | None:
    """Return the measured seconds of a step, from its time, tokens per second and GPU, or TFLOP/s and GPU."""
    tokens = layout.batch * seq / layout.ranks
    if "step_s" in cells:
        return float(cells["step_s"])
    if "tok_s_gpu" in cells:
        return tokens / float(cells["tok_s_gpu"])
    if "tflops_gpu" not in cells:
        return None
    # Megatron's convention counts all pairs of tokens, and the recomputed forward pass if it says "HW".
    everything = model.flops_per_token(seq) + 6 * model.layers * seq * model.heads * model.head_size
    repeated = 4 / 3 if layout.recompute == "full" and "HW" in cells.get("tflops_kind", "") else 1.0
    return tokens * everything * repeated / (float(cells["tflops_gpu"]) * 1e12)
