"""Settings that are valid individually but contradict each other."""

from typing import Any

import pytest

from deepspeed_compress.config import SECTION, expand, parse_section
from deepspeed_compress.config.problems import Configuration
from deepspeed_compress.config.section import find, find_problems
from deepspeed_compress.errors import ConfigError

DELAYED = [{"parameters": "embed", "method": "none", "every": 4}]
ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def optimizer(name: str, **params: object) -> dict[str, Any]:
    return {"optimizer": {"type": name, "params": params}}


@pytest.mark.parametrize(
    ("gradients", "pointer", "instead"),
    [
        ({"overrides": DELAYED, "error_feedback": None}, "overrides/0/every", 'or "error_feedback": {}'),
        ({"overrides": DELAYED, "error_feedback": {"decay": 0.5}}, "overrides/0/every", '"decay": 1.0'),
        ({"overrides": DELAYED, "error_feedback": {"reset_interval": 6}}, "overrides/0/every", '"reset_interval": 8'),
        ({"method": "block_topk", "block_size": 64, "group": 128, "density": 0.5}, "group", '64, or "block_size": 128'),
    ],
)
def test_a_section_that_contradicts_itself(gradients: dict[str, Any], pointer: str, instead: str) -> None:
    ds_config = {SECTION: {"gradients": gradients}}
    with pytest.raises(ConfigError, match=r"^1 problem in") as caught:
        parse_section(ds_config)
    [problem] = find_problems(ds_config)
    assert problem.pointer == f"/{SECTION}/gradients/{pointer}"
    assert str(problem) in str(caught.value)
    assert "allowed: " in problem.message
    assert instead in problem.remedy


@pytest.mark.parametrize(
    "gradients",
    [
        {"overrides": DELAYED},
        {"overrides": DELAYED, "error_feedback": {"reset_interval": 8}},
        {"method": "dgc", "overrides": DELAYED},
        {"method": "powersgd", "overrides": DELAYED},
        {"method": "block_topk", "block_size": 64, "group": 64, "density": 1.0, "values": {}},
    ],
)
@pytest.mark.filterwarnings("ignore::deepspeed_compress.errors.CompressWarning")
def test_a_section_that_agrees_with_itself(gradients: dict[str, Any]) -> None:
    assert find_problems({SECTION: {"gradients": gradients}}) == []
    parse_section({SECTION: {"gradients": gradients}})


STAGE_3 = {"zero_optimization": {"stage": 3}}
BETAS, MOMENTUM = "/optimizer/params/betas", "/optimizer/params/momentum"


@pytest.mark.parametrize(
    ("section", "native", "pointer", "instead"),
    [
        ({"weights": {}}, {}, f"/{SECTION}/weights", "/zero_optimization/stage"),
        # Without ZeRO, an ordinary engine in bf16 gathers no weights.
        ({"weights": {}}, {"bf16": {"enabled": True}}, f"/{SECTION}/weights", '"parallelism": {"pipeline": 2}'),
        ({"weights": {"bits": 2}}, STAGE_3, f"/{SECTION}/weights", '"bits": 8'),
        ({"weights": {"rounding": "stochastic"}}, STAGE_3, f"/{SECTION}/weights", '"nearest"'),
        ({"gradients": {"method": "dgc"}}, ADAM, BETAS, '"betas": [0.0, 0.999]'),
        ({"gradients": {"method": "demo"}}, optimizer("Adam", betas=[0.5, 0.95]), BETAS, "--adam_beta1 0"),
        ({"gradients": {"method": "demo"}}, optimizer("SGD", momentum=0.9), MOMENTUM, '"momentum": 0.0'),
    ],
)
def test_a_section_that_the_file_contradicts(
    section: dict[str, Any], native: dict[str, Any], pointer: str, instead: str
) -> None:
    ds_config = {**native, SECTION: section}
    [problem] = find_problems(ds_config)
    assert problem.pointer == pointer
    assert "allowed: " in problem.message
    assert instead in problem.remedy
    with pytest.raises(ConfigError, match=r"^1 problem in") as caught:
        expand(ds_config, parse_section(ds_config))
    assert str(problem) in str(caught.value)


@pytest.mark.parametrize(
    ("section", "native"),
    [
        ({"weights": {}}, {"zero_optimization": {"stage": 1}}),
        ({"weights": {}, "parallelism": {"zero_stage": 2}}, {}),
        # DeepSpeed reads `true` as stage 1, an older notation, and accepts these notations of numbers.
        ({"weights": {}, "ownership": "balanced"}, {"zero_optimization": True}),
        ({"weights": {}, "ownership": "balanced"}, {"zero_optimization": {"stage": "2"}}),
        ({"weights": {}, "ownership": "balanced"}, {"zero_optimization": {"stage": 2.0}}),
        # A pipeline in bf16 has an optimizer that gathers weights under stage 0 as well.
        ({"weights": {}, "parallelism": {"pipeline": 2}}, {"bf16": {"enabled": True}}),
        ({"weights": {"method": "none"}}, {"zero_optimization": {"stage": 3}}),
        ({"gradients": {"method": "demo"}}, {"optimizer": {"type": "SGD"}}),
        ({"gradients": {"method": "demo"}}, optimizer("AdamW", betas=[0, 0.95])),
        ({"gradients": {"method": "dgc"}}, optimizer("SGD", momentum=0.0)),
        ({"gradients": {"method": "dgc"}}, optimizer("AdamW", betas="auto")),
        ({"gradients": {"method": "topk"}}, ADAM),
    ],
)
def test_a_section_that_the_file_agrees_with(section: dict[str, Any], native: dict[str, Any]) -> None:
    ds_config = {**native, SECTION: section}
    assert find_problems(ds_config) == []
    expand(ds_config, parse_section(ds_config))


@pytest.mark.parametrize(("world", "fits"), [(None, True), (8, True), (4, False), (10, False)])
def test_nodes_must_divide_the_ranks(world: int | None, fits: bool) -> None:
    section = {"gradients": {"hierarchy": {"ranks_per_node": 4}}}
    pointers = [problem.pointer for problem in find_problems({SECTION: section}, world)]
    assert pointers == ([] if fits else [f"/{SECTION}/gradients/hierarchy/ranks_per_node"])


def test_mismatches_join_the_other_problems_of_the_file() -> None:
    ds_config = {
        "zero_optimization": {"stage": 0},
        **ADAM,
        SECTION: {"weights": {"bits": 2}, "gradients": {"method": "dgc"}, "parallelism": {"zero_stage": 3}},
    }
    found = [problem.pointer for problem in find_problems(ds_config)]
    assert found == [f"/{SECTION}/parallelism/zero_stage", f"/{SECTION}/weights", "/optimizer/params/betas"]


def zero(**keys: object) -> dict[str, Any]:
    return {"zero_optimization": {"stage": 3, **keys}}


WEIGHTS = {"weights": {"bits": 8}}
NOTHING = {"gradients": {"method": "none"}}


@pytest.mark.parametrize(
    ("section", "native", "pointer"),
    [
        ({}, zero(zero_quantized_gradients=True), "/zero_optimization/zero_quantized_gradients"),
        (WEIGHTS, zero(zero_hpz_partition_size=2), "/zero_optimization/zero_hpz_partition_size"),
        (
            {"islands": {"size": 2, "sync_every": 10}},
            zero(zero_hpz_partition_size=2),
            "/zero_optimization/zero_hpz_partition_size",
        ),
        (WEIGHTS, zero(zero_quantized_weights=True), "/zero_optimization/zero_quantized_weights"),
        ({}, zero(zenflow={"topk_ratio": 0.1}), "/zero_optimization/zenflow"),
        ({}, zero(offload_optimizer={"super_offload": True}), "/zero_optimization/offload_optimizer/super_offload"),
        ({}, {"compile": {"deepcompile": True}}, "/compile/deepcompile"),
        (
            {"parallelism": {"tensor": 2}},
            {"torch_autocast": {"enabled": True, "dtype": "fp16"}},
            "/torch_autocast/dtype",
        ),
    ],
)
def test_settings_that_attach_refuses_are_found_in_the_file(
    section: dict[str, Any], native: dict[str, Any], pointer: str
) -> None:
    [problem] = find_problems({**native, SECTION: section})
    assert problem.pointer == pointer
    assert "allowed: " in str(problem)
    assert find_problems({**native, SECTION: NOTHING}) == []


@pytest.mark.parametrize(
    ("section", "native"),
    [
        ({}, zero(zero_quantized_weights=True)),
        (WEIGHTS, zero(zero_quantized_gradients=False, zero_hpz_partition_size=1, zenflow=None)),
        ({}, zero(zero_hpz_partition_size=2)),
        (WEIGHTS, zero(stage=2, zero_hpz_partition_size=2, zero_quantized_weights=True)),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "fp16"}}),
        ({}, {"torch_autocast": {"enabled": True, "dtype": "fp16"}, "zero_optimization": {"stage": 1}}),
        ({}, optimizer("Muon")),
    ],
)
def test_supported_settings_pass(section: dict[str, Any], native: dict[str, Any]) -> None:
    assert find_problems({**native, SECTION: section}) == []


def test_a_guard_needs_norms() -> None:
    native = zero(stage=1, compute_grad_norm=False)
    [problem] = list(find("file", Configuration(parse_section({SECTION: {"guard": {}}}), native)))
    assert problem.pointer == f"/{SECTION}/guard"
    assert "/zero_optimization/compute_grad_norm: false" in problem.message
    assert list(find("file", Configuration(parse_section({SECTION: {}}), native))) == []
    assert list(find("file", Configuration(parse_section({SECTION: {"guard": {}}}), zero(stage=1)))) == []


JOB_ISLANDS = {"size": 2}
ELASTIC_ISLANDS = {"elastic": {"rendezvous": "head.example.org:29400"}}


@pytest.mark.parametrize("islands", [JOB_ISLANDS, ELASTIC_ISLANDS])
def test_islands_cannot_roll_back_to_a_checkpoint_individually(islands: dict[str, Any]) -> None:
    section = {"gradients": {"bits": 4}, "islands": islands, "adaptive": {}, "guard": {"rollback": {}}}
    assert find_problems({SECTION: section}) == []
    [problem] = find_problems({SECTION: {**section, "guard": {"rollback": {"checkpoint": True}}}})
    assert problem.pointer == f"/{SECTION}/guard/rollback/checkpoint"
    assert "allowed with islands: false" in problem.message


BF16: dict[str, Any] = {"bf16": {"enabled": True}}


@pytest.mark.parametrize("islands", [JOB_ISLANDS, ELASTIC_ISLANDS])
@pytest.mark.parametrize(
    ("native", "place"),
    [
        (BF16, "/bf16/enabled"),
        ({"fp16": {"enabled": True}, **zero(stage=0)}, "/fp16/enabled"),
        (zero(stage=3, offload_param={"device": "nvme"}), "/zero_optimization/offload_param/device"),
        ({**BF16, **zero(stage=1)}, None),
        ({"fp16": {"enabled": False}, "bf16": {"enabled": "auto"}}, None),
        (zero(stage=3, offload_param={"device": "cpu"}), None),
    ],
)
def test_islands_need_masters_they_know(native: dict[str, Any], place: str | None, islands: dict[str, Any]) -> None:
    section = {"gradients": {"method": "none"}, "islands": islands}
    assert [problem.pointer for problem in find_problems({**native, SECTION: section})] == ([place] if place else [])


@pytest.mark.parametrize(
    ("native", "place"),
    [
        ({"checkpoint": {"use_node_local_storage": True}}, "/checkpoint/use_node_local_storage"),
        (
            {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}},
            "/data_efficiency/data_sampling/curriculum_learning/enabled",
        ),
        (
            {"data_efficiency": {"data_sampling": {"dynamic_batching": {"enabled": True}}}},
            "/data_efficiency/data_sampling/dynamic_batching/enabled",
        ),
    ],
)
def test_features_that_see_only_one_island_are_refused_for_islands_of_a_job(native: dict[str, Any], place: str) -> None:
    sections = ({"gradients": {"method": "none"}, "islands": islands} for islands in (JOB_ISLANDS, ELASTIC_ISLANDS))
    job, elastic = (find_problems({**native, SECTION: section}) for section in sections)
    assert [problem.pointer for problem in job] == [place]
    assert elastic == []


@pytest.mark.parametrize(
    ("other", "words"),
    [
        ({"weights": {"bits": 4, "overlap": True}}, "weights with overlap, which arrive during the next step"),
        ({"parallelism": {"shard_within": "node"}}, "hybrid sharding"),
        ({"islands": {"size": 2}}, "islands of one job, which have several models"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_weights_are_not_published_if_ranks_hold_several_models(other: dict[str, Any], words: str) -> None:
    ds_config = {SECTION: {"gradients": {"method": "none"}, **other, "rollout": {"directory": "/shared"}}}
    found = [str(problem) for problem in find_problems(ds_config) if problem.pointer == f"/{SECTION}/rollout"]
    assert len(found) == 1
    assert f"cannot be combined with {words} (allowed: null)" in found[0]


def test_bits_of_exact_rollout_weights_have_no_effect() -> None:
    [problem] = find_problems({SECTION: {"rollout": {"directory": "/shared", "bits": 8}}})
    assert problem.pointer == f"/{SECTION}/rollout/bits"
    assert "has no effect with the method exact (allowed: null)" in str(problem)
    assert find_problems({SECTION: {"rollout": {"directory": "/shared", "method": "blockwise", "bits": 4}}}) == []


DEEP_EP = {"expert_parallel": {"enabled": True, "autoep_size": 2, "comm_backend": "deepep"}}
OVERLAPPED = {"tensor_parallel": {"autotp_size": 2, "tp_overlap_comm": True}}


@pytest.mark.parametrize(
    ("activations", "file", "pointer"),
    [
        ({}, {}, ""),
        ({"tensor": {"merge": False}}, {}, "/tensor/merge"),
        ({"tensor": {"backward_bits": 8}}, {}, "/tensor/backward_bits"),
        ({"tensor": {"bits": 8}}, {"tensor_parallel": {"autotp_size": 1}}, "/tensor"),
        ({"tensor": {}}, OVERLAPPED, "/tensor"),
        ({"experts": {}}, {}, "/experts"),
        ({"experts": {"combine": {}}}, DEEP_EP, "/experts"),
        ({"sequence": {}}, {"sequence_parallel_size": 1}, "/sequence"),
    ],
)
def test_activations_without_effect(activations: dict[str, Any], file: dict[str, Any], pointer: str) -> None:
    [problem] = find_problems({**file, SECTION: {"activations": activations}})
    assert problem.pointer == f"/{SECTION}/activations{pointer}"
    assert "no effect" in problem.message or "cannot be combined" in problem.message


def test_sequence_parallelism_is_refused_with_a_pipeline() -> None:
    section = {"activations": {"sequence": {"bits": 4}}, "parallelism": {"pipeline": 2}}
    [problem] = find_problems({SECTION: section})
    assert problem.pointer == f"/{SECTION}/activations/sequence"


@pytest.mark.parametrize(
    "section",
    [
        {"activations": {"tensor": {}}},
        {"activations": {"tensor": {"merge": False, "bits": 4}, "pipeline": {"bits": 8}}},
        {"activations": {"tensor": {"bits": 8}}, "parallelism": {"tensor": 2, "pipeline": 2}},
        {"activations": {"experts": {"dispatch": {"bits": 4}}}},
        {"activations": {"sequence": {"bits": 4}}},
    ],
)
def test_activations_that_may_have_an_effect(section: dict[str, Any]) -> None:
    """A program may divide its model by itself, which the file does not show."""
    assert find_problems({SECTION: section}) == []


@pytest.mark.parametrize("stage", [1, 2])
def test_only_zero_3_sends_frozen_weights(stage: int) -> None:
    section = parse_section({SECTION: {"weights": {"bits": 8, "frozen": True}}})
    [problem] = list(find("file", Configuration(section, zero(stage=stage))))
    assert problem.pointer == f"/{SECTION}/weights/frozen"
    assert f"true has no effect with /zero_optimization/stage: {stage}" in problem.message
    assert list(find("file", Configuration(section, zero(stage=3)))) == []
