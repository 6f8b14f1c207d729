"""Program that lets engines of vLLM follow published versions, and writes what they generate, in JSON.

Usage: python vllm_program.py JOBS RESULTS, two files: a list of the fields of `Job`, and those of `Result`. All engines
run in this process, one after the other, except those with tensor parallelism.
"""

import json
import os
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PROMPT = list(range(1, 100))
"""Longer than the blocks of the prefix cache."""
TOKENS = 8


@dataclass
class Job:
    """An engine, and what it loads.

    Attributes:
        model: directory of the model that it starts with.
        stores: the stores that it follows, one after the other.
        versions: number of versions that it loads from each.
        every: number of versions between two questions.
        dtype: type in which it computes.
        keeps_layout: True to let linear layers on CPU keep their weights as they are, as they do on GPUs.
        tensor: number of its workers.
        adapters: directory for adapters, which the stores have alone; empty if they have weights.
    """

    model: str
    stores: list[str] = field(default_factory=list)
    versions: int = 0
    every: int = 1
    dtype: str = "float32"
    keeps_layout: bool = False
    tensor: int = 1
    adapters: str = ""


@dataclass
class Result:
    """Answers of an engine: to the model that it started with, or to each version that was asked for.

    Attributes:
        answers: tokens and log-probabilities of them.
        labels: version that vLLM names as that of the weights, of each answer.
        patched: number of versions that were loaded by patches.
    """

    answers: list[tuple[list[int], list[float]]]
    labels: list[str]
    patched: int


def answer(engine: Any, adapter: Any = None) -> tuple[list[int], list[float], str]:
    """Return the greedy tokens, their log-probabilities, and the version that vLLM says they are from."""
    from vllm import SamplingParams

    sampling = SamplingParams(max_tokens=TOKENS, temperature=0, logprobs=0)
    [found] = engine.generate([{"prompt_token_ids": PROMPT}], sampling, use_tqdm=False, lora_request=adapter)
    [output] = found.outputs
    tokens = list(output.token_ids)
    labels = ",".join(weight_version.version for weight_version in output.weight_versions)
    return tokens, [place[token].logprob for token, place in zip(tokens, output.logprobs, strict=True)], labels


def run(job: Job) -> Result:
    from vllm import LLM, _custom_ops

    from deepspeed_compress.rollout.vllm import BACKEND, LocalEngine, follow_weights, load_version
    from deepspeed_compress.rollout.vllm_adapters import LocalAdapters

    _custom_ops._supports_onednn = not job.keeps_layout
    patched = count_patches()
    options: dict[str, Any] = {"weight_transfer_config": {"backend": BACKEND}, "max_model_len": 256}
    options["enable_lora"] = bool(job.adapters)
    if job.tensor == 1:
        options["distributed_executor_backend"] = "uni"
    llm = LLM(job.model, dtype=job.dtype, enforce_eager=True, tensor_parallel_size=job.tensor, **options)
    engine, answers = LocalEngine(llm), []
    if not job.stores:
        answers.append(answer(llm))
    for store in job.stores if job.adapters else ():
        adapters = LocalAdapters(llm, store, job.adapters)
        for version in range(1, job.versions + 1):
            answers.append(answer(llm, adapters.load(version)))
            # Each version has its own keys and values, also after others were loaded.
            assert answer(llm, adapters.load(version)) == answers[-1]
    for store in () if job.adapters else job.stores:
        follow_weights(engine, store)
        for version in range(1, job.versions + 1):
            load_version(engine, version)
            if version % job.every == 0:
                answers.append(answer(llm))
    return Result([one[:2] for one in answers], [one[2] for one in answers], len(patched))


def count_patches() -> list[int]:
    """Return a list that gets the number of patches of each version which is loaded by patches in this process."""
    from deepspeed_compress.rollout import vllm_worker

    counts: list[int] = []
    load = vllm_worker.load_checkpoint_weight_patches

    def counted(model: Any, patches: Any, **options: Any) -> Any:
        counts.append(len(patches))
        return load(model, patches, **options)

    vllm_worker.load_checkpoint_weight_patches = counted
    return counts


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    jobs = [Job(**one) for one in json.loads(Path(sys.argv[1]).read_text())]
    if all(one.tensor == 1 for one in jobs):
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    else:
        # By default, vLLM on CPU wants a NUMA node for each worker.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    # Workers print to the standard output too, also after the last job.
    Path(sys.argv[2]).write_text(json.dumps([asdict(run(job)) for job in jobs]))
