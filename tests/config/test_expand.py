import copy

import pytest

from deepspeed_compress.config import SECTION, check_world, expand, parse_section
from deepspeed_compress.errors import CompressWarning, ConfigError


def expanded(native: dict, parallelism: dict | None) -> dict:
    """Return the result of `expand`, after checking that the input is unchanged."""
    ds_config = {**native, SECTION: {"parallelism": parallelism}}
    before = copy.deepcopy(ds_config)
    result = expand(ds_config, parse_section(ds_config))
    assert ds_config == before
    assert result.pop(SECTION) == before[SECTION]
    return result


OVERLAP = {"overlap_comm": True}
OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}
NOT_OFFLOADED = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
"""Setting with which DeepSpeed reduces during backward, on streams."""
UNMANAGED = {"managed_gradient_accumulation": False}


@pytest.mark.parametrize(
    ("native", "parallelism", "result"),
    [
        ({}, None, {}),
        ({"zero_optimization": {"stage": 3}}, {}, {"zero_optimization": {"stage": 3}}),
        ({}, {"zero_stage": 2}, {"zero_optimization": {"stage": 2, **OVERLAP}}),
        (
            {"zero_optimization": {"overlap_comm": False}},
            {"zero_stage": 2},
            {"zero_optimization": {"overlap_comm": False, "stage": 2}},
        ),
        (
            {"zero_optimization": {"contiguous_gradients": False}},
            {"zero_stage": 2},
            {"zero_optimization": {"contiguous_gradients": False, "stage": 2}},
        ),
        ({"zero_optimization": {"stage": 2}}, {"zero_stage": 2}, {"zero_optimization": {"stage": 2, **OVERLAP}}),
        ({"zero_optimization": {"stage": "2"}}, {}, {"zero_optimization": {"stage": "2", **OVERLAP}}),
        (OFFLOADED, {}, OFFLOADED),
        (NOT_OFFLOADED, {}, {"zero_optimization": {**NOT_OFFLOADED["zero_optimization"], **OVERLAP}}),
        (UNMANAGED, {"zero_stage": 2}, {**UNMANAGED, "zero_optimization": {"stage": 2}}),
        ({}, {"tensor": 2}, {"tensor_parallel": {"autotp_size": 2}}),
        ({"tensor_parallel": {"autotp_size": 2}}, {}, {"tensor_parallel": {"autotp_size": 2}}),
        ({"tensor_parallel": {"autotp_size": 0}}, {"tensor": 1}, {"tensor_parallel": {"autotp_size": 0}}),
        ({}, {"tensor": 1}, {}),
        ({}, {"zero_stage": 1, "pipeline": 2}, {"zero_optimization": {"stage": 1}}),
    ],
)
def test_expansion(native: dict, parallelism: dict | None, result: dict) -> None:
    assert expanded(native, parallelism) == result


def test_the_copy_shares_nothing_with_its_source() -> None:
    ds_config = {"optimizer": {"params": {"lr": 1}}, SECTION: {}}
    expand(ds_config, parse_section(ds_config))["optimizer"]["params"]["lr"] = 2
    assert ds_config["optimizer"]["params"]["lr"] == 1


@pytest.mark.parametrize(
    ("native", "parallelism", "fragments"),
    [
        (
            {"zero_optimization": {"stage": 2}},
            {"zero_stage": 1},
            [f"/{SECTION}/parallelism/zero_stage: 1 disagrees", "/zero_optimization/stage: 2"],
        ),
        ({"zero_optimization": {"stage": "2"}}, {"zero_stage": 2}, ['/zero_optimization/stage: "2"']),
        ({"zero_optimization": True}, {"zero_stage": 1}, ["/zero_optimization: true", "an object"]),
        (
            {"tensor_parallel": {"autotp_size": 4}},
            {"tensor": 2},
            [f"/{SECTION}/parallelism/tensor: 2 disagrees", "/tensor_parallel/autotp_size: 4"],
        ),
        ({}, {"zero_stage": 2, "pipeline": 2}, ["/parallelism/zero_stage: 2", "/pipeline: 2", "0 or 1"]),
        ({"zero_optimization": {"stage": 3}}, {"pipeline": 4}, ["- /zero_optimization/stage: 3", "0 or 1"]),
    ],
)
def test_contradictions_name_both_places(native: dict, parallelism: dict, fragments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        expanded(native, parallelism)
    assert [text for text in fragments if text not in str(caught.value)] == []


def test_contradictions_come_together() -> None:
    native = {"zero_optimization": {"stage": 2}, "tensor_parallel": {"autotp_size": 4}}
    with pytest.raises(ConfigError, match=r"^2 problems"):
        expanded(native, {"zero_stage": 1, "tensor": 2})


@pytest.mark.parametrize(
    ("parallelism", "native", "world", "size"),
    [
        (None, None, 4, 4),
        ({"tensor": 2, "pipeline": 2}, None, 8, 2),
        ({"pipeline": 2}, {"tensor_parallel": {"autotp_size": 2}}, 8, 2),
        ({"tensor": 1}, {"tensor_parallel": {"autotp_size": 0}}, 3, 3),
    ],
)
def test_data_parallel_size(parallelism: dict | None, native: dict | None, world: int, size: int) -> None:
    section = parse_section({SECTION: {"parallelism": parallelism}})
    assert check_world(section, world, native) == size


@pytest.mark.parametrize(("parallelism", "world"), [({"tensor": 2, "pipeline": 3}, 8), ({}, 0)])
def test_world_that_the_parallelism_does_not_divide(parallelism: dict, world: int) -> None:
    section = parse_section({SECTION: {"parallelism": parallelism}})
    with pytest.raises(ConfigError, match=rf"do not divide the world size {world}\b.*multiple of"):
        check_world(section, world)


def test_a_single_data_parallel_rank_warns_unless_nothing_is_compressed() -> None:
    with pytest.warns(CompressWarning, match="data-parallel size is 1"):
        assert check_world(parse_section({SECTION: {}}), 1) == 1
    assert check_world(parse_section({SECTION: {"gradients": {"method": "none"}}}), 1) == 1
