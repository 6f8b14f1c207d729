"""The three entry points, and everything that they refuse."""

import json
import os
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock, patch

import deepspeed
import pytest
import torch.distributed as dist

import deepspeed_compress
from deepspeed_compress import ConfigError, SeamError, UnsupportedError
from deepspeed_compress.backends.deepspeed import checks, limits, seams
from deepspeed_compress.backends.deepspeed.groups import downward_group
from deepspeed_compress.backends.deepspeed.units import IslandUnit
from deepspeed_compress.backends.limits import check_torch
from deepspeed_compress.config import CompressConfig, parse_section
from deepspeed_compress.integrations.run import _leave_gloo
from tests.support.forks import RankError, run_forks
from tests.support.jobs import Job, data, make_engine, network, run, start, train, warned, weights
from tests.support.messages import caught_warnings, check_contained, refusal
from tests.support.methods import NO_MOMENTUM

JOB = Job(stage=2, section={"gradients": {"bits": 4}})


def by_attach(rank: int) -> dict:
    model = network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=JOB.config())
    assert deepspeed_compress.attach(engine) is engine
    with pytest.raises(ConfigError, match="already attached"):
        deepspeed_compress.attach(engine)
    run(engine, data(rank, JOB))
    return weights(engine)


def by_install(rank: int) -> dict:
    uninstall = deepspeed_compress.install()
    assert deepspeed_compress.install()() is None
    model = network()
    engine, *_ = deepspeed.initialize(None, model, None, model.parameters(), config=JOB.config())
    uninstall()
    run(engine, data(rank, JOB))
    model = network()
    plain, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=JOB.config())
    assert "compression" not in vars(plain)
    return weights(engine)


def without_section(rank: int) -> list[str]:
    """Return this package's warnings when an engine with an optimizer, and one without, are created after `install`."""
    deepspeed_compress.install()
    config = {**Job().config(), "compress": {}}
    with caught_warnings() as texts:
        model = network()
        deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
        deepspeed.initialize(model=network(), config={"train_batch_size": 2})
    return texts


def test_install_warns_of_an_engine_without_the_section() -> None:
    first, second = run_forks(2, without_section)
    assert [text[:34] for text in first] == ["an engine is not compressed: /deep"]
    assert 'found "compress" instead' in first[0]
    assert '"method": "none"' in first[0]
    assert second == []


def by_arguments(rank: int, file: str) -> dict:
    model = network()
    args = Namespace(deepspeed_config=file, local_rank=rank)
    engine, *_ = deepspeed_compress.initialize(args, model, model_parameters=model.parameters())
    assert args.deepspeed_config == file
    run(engine, data(rank, JOB))
    return weights(engine)


def in_every_way(rank: int, file: str) -> list[dict]:
    return [train(rank, JOB)[0].parameters, by_attach(rank), by_install(rank), by_arguments(rank, file)]


def test_all_ways_train_the_same(tmp_path):
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(JOB.config()))
    expected, *others = run_forks(2, in_every_way, str(file))[0]
    assert others == [expected] * 3


def test_stage_from_the_section():
    """`initialize` writes the stage into DeepSpeed's own key."""
    assert run_forks(2, stage_of_engine) == [3, 3]


def stage_of_engine(rank: int) -> int:
    config = Job(section={"parallelism": {"zero_stage": 3}}).config()
    del config["zero_optimization"]["stage"]
    engine = make_engine(network(), config)
    return int(engine.zero_optimization_stage())


def test_the_older_form_of_zero_1():
    section = {"gradients": {"bits": 4, "block_size": 32}, "weights": {"bits": 4}}
    jobs = [Job(section=section, extra={"zero_optimization": zero}) for zero in ({"stage": 1}, True)]
    for new, old in run_forks(2, train, *jobs):
        assert new == old


CONTRADICTIONS = (
    (2, {"parallelism": {"zero_stage": 1}}, ConfigError, "/zero_optimization/stage"),
    (
        0,
        {"parallelism": {"pipeline": 2, "zero_stage": 0}},
        UnsupportedError,
        "/deepspeed_compress/parallelism/pipeline",
    ),
    (0, {"parallelism": {"pipeline": 3, "zero_stage": 0}}, ConfigError, "divide"),
    (0, {"gradients": {"bits": 5}}, ConfigError, "/deepspeed_compress/gradients/bits"),
)


def contradict(rank: int) -> list[str]:
    return [refusal(kind, start, Job(stage, section)) for stage, section, kind, _ in CONTRADICTIONS]


def test_contradictions():
    for texts in run_forks(2, contradict):
        check_contained((message for *_, message in CONTRADICTIONS), texts)


def warnings_of_momentum(rank: int) -> list[int]:
    """Return the number of warnings of repeated momentum: with two micro-steps at each ZeRO stage, and with one."""
    job = Job(section={"gradients": {"method": "dgc"}}, extra=NO_MOMENTUM, accumulation=2)
    jobs = [*(replace(job, stage=stage) for stage in range(4)), replace(job, stage=2, accumulation=1)]
    return [sum("in each of the 2 micro-steps" in text for text in warned(rank, one)) for one in jobs]


def test_momentum_in_every_micro_step_warns() -> None:
    assert run_forks(2, warnings_of_momentum) == [[0, 0, 1, 1, 0]] * 2


def test_no_configuration():
    with pytest.raises(ConfigError, match="no configuration given"):
        deepspeed_compress.initialize(model=network())


def test_missing_section():
    with pytest.raises(ConfigError, match="deepspeed_compress"):
        parse_section({"train_batch_size": 1})


@pytest.mark.parametrize("version", ["0.18.2", "0.20.0", "0.20.0.dev1", "1.0"])
def test_unsupported_version(version):
    with pytest.raises(SeamError, match=f"DeepSpeed {version}.*>=0.18.3,<0.20"):
        seams.check_version(version)


@pytest.mark.parametrize("version", ["2.6.1", "1.13.1+cu117"])
def test_a_torch_that_is_too_old_is_refused(version: str) -> None:
    with pytest.raises(SeamError, match=r"torch>=2\.7"):
        check_torch(version)


@pytest.mark.parametrize("version", ["2.7.0", "2.7.0a0+7c8ec84", "2.13.0+cpu", "3.0"])
def test_torch_from_the_oldest_on_is_accepted(version: str) -> None:
    check_torch(version)


@pytest.mark.parametrize(
    ("seam", "problem"),
    [
        (seams.Seam("deepspeed.runtime.engine:DeepSpeedEngine.no_such_method", "self"), "is missing"),
        (seams.Seam("deepspeed.no_such_module:Engine.step", "self"), "is missing"),
        (seams.Seam("deepspeed.runtime.engine:DeepSpeedEngine.allreduce_bucket", "self tensor"), "takes"),
    ],
)
def test_seam_that_has_changed(seam, problem):
    with pytest.raises(SeamError, match=f"{seam.target} {problem}.*DeepSpeed 0.19.8"):
        seams.check_seams([seam], "0.19.8")


def zero_config(**changes) -> SimpleNamespace:
    """Return a configuration of DeepSpeed with these keys of `zero_optimization`."""
    zero = SimpleNamespace(**{"zero_quantized_gradients": False, "zero_hpz_partition_size": 1, **changes})
    return SimpleNamespace(zero_config=zero, compile_config=SimpleNamespace(deepcompile=False))


ISLAND = IslandUnit((0,), 0, 2, 1, *([None] * 5))


def engine_like(**changes) -> SimpleNamespace:
    """Return a stand-in with the attributes that `refuse_unsupported` reads, and no reason for a refusal."""
    usual = {
        "optimizer": SimpleNamespace(param_groups=[{}]),
        "has_moe_layers": False,
        "module": network(),
        "mpu": None,
        "device": "cpu",
        "torch_autocast_z0_gradscaler": None,
        "is_deepcompile_active": lambda: False,
        "_config": zero_config(),
    }
    return SimpleNamespace(**{**usual, **changes})


def test_nothing_to_refuse():
    limits.refuse_unsupported(engine_like(), CompressConfig())
    limits.refuse_unsupported(engine_like(_config=zero_config(zero_hpz_partition_size=2)), CompressConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer": None}, "no optimizer"),
        ({"is_deepcompile_active": lambda: True}, "DeepCompile"),
        ({"device": "meta"}, "without kernels"),
        ({"_config": zero_config(zero_quantized_gradients=True)}, "zero_quantized_gradients"),
        ({"_config": zero_config(zero_hpz_partition_size=2), "mpu": ISLAND}, "across islands"),
    ],
)
def test_refused(changes, message):
    with pytest.raises(UnsupportedError, match=message):
        limits.refuse_unsupported(engine_like(**changes), CompressConfig())


def use_gloo(rank: int, backend: str | None) -> tuple[bool, bool]:
    """Return whether a group of our own is made for gloo, and whether `ds-compress run` destroys the default group."""
    dist.init_process_group(backend)
    made = downward_group([(0, 1)]) is not None
    _leave_gloo()
    return made, not dist.is_initialized()


@pytest.mark.parametrize("backend", [None, "cpu:gloo"])
def test_gloo_is_known_if_the_program_names_no_backend(backend):
    """`torch.distributed.get_backend` returns "undefined", or pairs of devices and backends."""
    assert run_forks(2, use_gloo, backend) == [(True, True)] * 2


def dies(rank: int, directory: str) -> None:
    """Train on two ranks, of which rank 1 exits silently after two steps."""
    job = Job(stage=2, section=JOB.section, steps=4)
    engine = start(job)
    batches = data(rank, job)
    run(engine, batches[:2])
    if rank == 1:
        os._exit(1)
    try:
        run(engine, batches[2:])
    except RuntimeError as error:
        (Path(directory) / "error").write_text(str(error))
        raise


def test_rank_that_dies_ends_the_others(tmp_path):
    with pytest.raises(RankError, match=r"(?m)^rank 1 ended without a result, with exit code 1$"):
        run_forks(2, dies, str(tmp_path))
    assert (tmp_path / "error").read_text()


def refused_on_one_rank(rank: int) -> str:
    """Return the error of a check that fails on the last rank only, as the stages of a pipeline differ."""
    model = network()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=JOB.config())
    fails = UnsupportedError("this stage cannot") if rank else None
    with (
        patch.object(checks, "refuse_idle_activations", Mock(side_effect=fails)),
        pytest.raises(UnsupportedError) as caught,
    ):
        deepspeed_compress.attach(engine)
    assert "compression" not in vars(engine)
    return str(caught.value)


def test_what_one_rank_refuses_all_ranks_refuse() -> None:
    assert run_forks(2, refused_on_one_rank) == ["this stage cannot"] * 2


def test_override_that_matches_nothing_warns():
    section = {"gradients": {"overrides": [{"parameters": "no_such_layer", "method": "none"}]}}
    texts = run_forks(2, warned, Job(section=section))[0]
    assert any("/deepspeed_compress/gradients/overrides/0/parameters" in text for text in texts)


def test_every_seam_exists_in_the_installed_version():
    seams.check_version(deepspeed.__version__)
    seams.check_seams(seams.STEP + seams.ZERO_0 + seams.ZERO_12 + seams.ZERO_3, deepspeed.__version__)
