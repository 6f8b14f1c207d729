"""The reducers that are built from a section of the configuration."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch.distributed import HashStore, ProcessGroup, ProcessGroupGloo

from deepspeed_compress.collectives.gather import EXACT
from deepspeed_compress.collectives.parameters import RAW, Parameters
from deepspeed_compress.collectives.payload import PayloadReducer
from deepspeed_compress.collectives.powersgd import PowerSGDReducer
from deepspeed_compress.collectives.reducer import CHUNK_NUMEL, ClippingReducer, Run, StepClock
from deepspeed_compress.collectives.reduction import Groups, Reduction, ReductionContext, Reductions
from deepspeed_compress.collectives.two_level import HierarchicalReducer
from deepspeed_compress.collectives.weight_reduction import WeightReduction
from deepspeed_compress.compression.codec import Codec, NoSend
from deepspeed_compress.compression.compressors import (
    Blockwise,
    Cast,
    Compressor,
    Linear,
    Sign,
    TopK,
)
from deepspeed_compress.compression.feedback import ErrorFeedback, MomentumCorrection, NoFeedback
from deepspeed_compress.compression.residual_stores import ResidualStores
from deepspeed_compress.compression.residuals import Residuals
from deepspeed_compress.compression.transforms import DCT
from deepspeed_compress.config import SECTION, CompressConfig, CompressedGradients, CompressedWeights, parse_section
from deepspeed_compress.errors import CompressWarning
from deepspeed_compress.monitor import Meter
from tests.support.threads import TIMEOUT

SHAPES = {"embed.weight": (100, 8), "layer.0.weight": (8, 4, 2), "layer.0.bias": (8,), "head.weight": (8, 100)}
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
INT4 = Blockwise(4, 256)


@pytest.fixture
def group() -> ProcessGroup:
    return ProcessGroupGloo(HashStore(), 0, 1, TIMEOUT)


def section(gradients: dict[str, Any], **others: Any) -> CompressConfig:
    return parse_section({SECTION: {"gradients": gradients, **others}})


@dataclass(frozen=True)
class Built:
    """The reducers of a section, and their stores."""

    config: CompressConfig
    reductions: Reductions

    def at(self, step: int) -> Reduction:
        assert isinstance(self.config.gradients, CompressedGradients)
        return self.reductions.at(self.config.gradients, step)

    @property
    def compressed(self) -> object:
        return self.at(0).compressed

    @property
    def plain(self) -> object:
        return self.at(0).plain

    @property
    def stores(self) -> Mapping[str, Residuals]:
        self.at(0)
        return self.reductions.context.stores.by_name


def build(
    groups: ProcessGroup | Groups,
    config: CompressConfig,
    transactional: bool = False,
    device: str = "cpu",
    **parameters: Any,
) -> Built:
    known = Parameters(**{"shapes": SHAPES, "everywhere": sorted(SHAPES), **parameters})
    groups = groups if isinstance(groups, Groups) else Groups(groups)
    run = Run(StepClock(), Meter(), config.seed, chunk_numel=CHUNK_NUMEL[device])
    built = Built(config, Reductions(ReductionContext(groups, known, ResidualStores(transactional), run)))
    built.at(0)
    return built


def payload(reducer: object) -> PayloadReducer:
    assert isinstance(reducer, PayloadReducer)
    return reducer


def channel_of(reducer: object, name: str) -> int:
    return payload(reducer).messages.channel_of.get(name, RAW)


def codecs(reducer: object) -> tuple[Codec, ...]:
    return tuple(channel.codec for channel in payload(reducer).messages.channels)


def codec_of(built: Built, name: str, step: int = 0) -> Codec:
    """Return the codec of parameter `name` in optimizer step `step`."""
    reducer = built.at(step).compressed
    return codecs(reducer)[channel_of(reducer, name)]


def feedback_of(reducer: object, channel: int = 1) -> tuple[object, object]:
    found = payload(reducer).messages.channels[channel]
    return found.feedback, found.mean_feedback


@pytest.mark.parametrize("transactional", [True, False])
@pytest.mark.parametrize(
    ("feedback", "dtype", "on_host", "decay"),
    [
        ({}, "bf16", False, 1.0),
        ({"dtype": "fp32", "decay": 0.5}, "fp32", False, 0.5),
        ({"dtype": "int8", "device": "cpu"}, "int8", True, 1.0),
    ],
)
def test_error_feedback_has_a_store_for_each_direction(
    group: ProcessGroup, feedback: dict[str, Any], dtype: str, on_host: bool, decay: float, transactional: bool
) -> None:
    reduction = build(group, section({"error_feedback": feedback}), transactional)
    assert reduction.stores.keys() == {"gradients", "means"}
    for found, name in zip(feedback_of(reduction.compressed), ("gradients", "means"), strict=True):
        assert found == ErrorFeedback(reduction.stores[name], decay)
    for store in reduction.stores.values():
        assert (store.dtype, store.on_host, store.transactional, store.scaled) == (dtype, on_host, transactional, True)


def test_dgc_has_two_buffers_and_clips(group: ProcessGroup) -> None:
    settings = {"method": "dgc", "momentum": 0.5, "nesterov": True, "clip_norm": 2.0, "memory": {"dtype": "int8"}}
    reduction = build(group, section(settings), transactional=True)
    clipping = reduction.compressed
    assert isinstance(clipping, ClippingReducer)
    assert (clipping.clip_norm, clipping.clock) == (2.0, payload(clipping.reducer).run.clock)
    stores = reduction.stores
    assert stores.keys() == {"velocity", "gradients", "means"}
    assert {(store.dtype, store.transactional) for store in stores.values()} == {("int8", True)}
    sent, back = feedback_of(payload(clipping.reducer))
    assert sent == MomentumCorrection(stores["velocity"], stores["gradients"], 0.5, nesterov=True)
    assert back == ErrorFeedback(stores["means"])


def test_demo_applies_a_decaying_residual_to_own_elements(group: ProcessGroup) -> None:
    reduction = build(group, section({"method": "demo", "momentum": 0.5, "memory": {"device": "cpu"}}))
    sent, back = feedback_of(reduction.compressed)
    assert sent == ErrorFeedback(reduction.stores["gradients"], 0.5, own_exact=False)
    assert back == ErrorFeedback(reduction.stores["means"])
    assert all(store.on_host for store in reduction.stores.values())


def powersgd(reduction: Built) -> PowerSGDReducer:
    reducer = reduction.compressed
    assert isinstance(reducer, PowerSGDReducer)
    return reducer


def test_powersgd_has_stores_for_residuals_and_factors(group: ProcessGroup) -> None:
    settings = {
        "method": "powersgd",
        "rank": 2,
        "factors": {"method": "fp16"},
        "error_feedback": {"dtype": "fp32"},
        "overrides": [{"parameters": "head", "method": "bf16"}],
    }
    reduction = build(group, section(settings, seed=7), excluded=frozenset({"embed.weight"}))
    reducer = powersgd(reduction)
    assert (reducer.low_rank.rank, reducer.factors.run.seed) == (2, 7)
    assert codecs(reducer.factors) == (Codec(Cast(FP16)),)
    assert reducer.low_rank.shapes == {name: SHAPES[name] for name in ("layer.0.weight", "layer.0.bias")}
    assert reducer.residuals is reduction.stores["gradients"]
    assert reducer.warm is reduction.stores["factors"]
    assert (reduction.stores["factors"].dtype, reduction.stores["factors"].scaled) == ("fp32", False)
    others = payload(reducer.others)
    assert codecs(others) == (Codec(Cast(FP32)), Codec(Cast(FP32)), Codec(Cast(BF16)))
    # Parameters without factors are sent uncompressed, together with residuals that other settings may have left.
    assert feedback_of(others, 1) == tuple(ErrorFeedback(reduction.stores[name]) for name in ("gradients", "means"))
    assert feedback_of(others, 2) == tuple(ErrorFeedback(reduction.stores[name]) for name in ("gradients", "means"))


OVERRIDES = [
    {"parameters": "bias", "method": "none"},
    {"parameters": "weight", "method": "linear"},
    {"parameters": "embed|head|extra", "method": "sign"},
]


@pytest.mark.parametrize(
    ("gradients", "excluded", "expected"),
    [
        ({}, (), [Blockwise()] * 4),
        ({"overrides": OVERRIDES}, (), [Linear(), Linear(), Cast(FP32), Linear()]),
        ({"overrides": OVERRIDES[::-1]}, (), [Sign(), Linear(), Cast(FP32), Sign()]),
        ({"overrides": OVERRIDES}, ("head.weight",), [Linear(), Linear(), Cast(FP32), Cast(FP32)]),
        (
            {"overrides": [{"parameters": r"^head|\.bias$", "method": "fp16"}]},
            (),
            [*2 * [Blockwise()], *2 * [Cast(FP16)]],
        ),
        ({"min_numel": 64}, (), [Blockwise(), Blockwise(), Cast(FP32), Blockwise()]),
        ({"min_numel": 65, "overrides": OVERRIDES}, (), [Linear(), Cast(FP32), Cast(FP32), Linear()]),
        ({}, ("embed.weight",), [Cast(FP32), Blockwise(), Blockwise(), Blockwise()]),
    ],
)
def test_the_first_override_applies_and_small_or_excluded_parameters_are_uncompressed(
    group: ProcessGroup, gradients: dict[str, Any], excluded: tuple[str, ...], expected: list[Compressor]
) -> None:
    names = [*sorted(SHAPES), "extra"]
    reduction = build(group, section(gradients), excluded=frozenset(excluded), everywhere=names)
    assert [codec_of(reduction, name).compressor for name in SHAPES] == expected


@pytest.mark.parametrize(("method", "sent"), [("none", Cast(BF16)), ("sign", Sign())])
def test_delayed_parameters_are_sent_in_every_nth_step(group: ProcessGroup, method: str, sent: Compressor) -> None:
    config = section({"overrides": [{"parameters": "embed", "method": method, "every": 3}]})
    reduction = build(group, config, dtype=BF16)
    found = [codec_of(reduction, "embed.weight", step).compressor for step in range(6)]
    assert found == [NoSend(), NoSend(), sent] * 2
    assert [codec_of(reduction, "head.weight", step).compressor for step in range(3)] == [Blockwise()] * 3
    reducer = reduction.compressed
    expected = tuple(ErrorFeedback(reduction.stores[name]) for name in ("gradients", "means"))
    assert feedback_of(reducer, channel_of(reducer, "embed.weight")) == expected


@pytest.mark.parametrize("method", ["dgc", "demo"])
def test_delayed_parameters_accumulate_in_the_residual_of_the_method(group: ProcessGroup, method: str) -> None:
    settings = {"method": method, "overrides": [{"parameters": "embed", "method": "none", "every": 2}]}
    reduction = build(group, section(settings))
    reducer = reduction.compressed
    kept, _ = feedback_of(reducer, channel_of(reducer, "embed.weight"))
    assert kept == ErrorFeedback(reduction.stores["gradients"])


def two_levels(reducer: object) -> tuple[PayloadReducer, PayloadReducer]:
    assert isinstance(reducer, HierarchicalReducer)
    return reducer.node, payload(reducer.across)


@pytest.fixture
def groups() -> Groups:
    return Groups(*(ProcessGroupGloo(HashStore(), 0, 1, TIMEOUT) for _ in range(3)))


@pytest.mark.parametrize(("dtype", "raw"), [(FP32, False), (BF16, True)])
def test_a_method_that_keeps_the_gradient_dtype_counts_as_uncompressed(
    group: ProcessGroup, dtype: torch.dtype, raw: bool
) -> None:
    reduction = build(group, section({"method": "bf16"}), dtype=dtype)
    assert [channel.uncompressed for channel in payload(reduction.compressed).messages.channels] == [True, raw]


def test_a_hierarchy_is_uncompressed_inside_a_node_by_default(groups: Groups) -> None:
    reduction = build(groups, section({"hierarchy": {"ranks_per_node": 2}}))
    compressed = reduction.at(0).compressed
    node, across = two_levels(compressed)
    assert compressed.group is groups.whole
    assert (node.group, across.group) == (groups.node, groups.across)
    assert codecs(node) == (Codec(Cast(FP32)),)
    assert {channel_of(node, name) for name in SHAPES} == {RAW}
    assert codecs(across) == (Codec(Cast(FP32)), Codec(Blockwise()))
    assert reduction.stores.keys() == {"gradients", "means"}


def test_a_method_inside_a_node_has_its_own_stores(groups: Groups) -> None:
    overrides = [{"parameters": "bias", "method": "none"}, {"parameters": "embed", "method": "sign"}]
    hierarchy = {"ranks_per_node": 2, "inside": {"bits": 4}}
    reduction = build(groups, section({"method": "demo", "hierarchy": hierarchy, "overrides": overrides}))
    node, across = two_levels(reduction.compressed)
    assert codecs(node) == (Codec(Cast(FP32)), Codec(INT4))
    assert [channel_of(node, name) for name in SHAPES] == [1, 1, RAW, 1]
    assert [channel_of(across, name) for name in SHAPES] == [2, 1, RAW, 1]
    assert feedback_of(node) == tuple(ErrorFeedback(reduction.stores[name]) for name in ("node", "node_means"))
    assert feedback_of(across)[0] == ErrorFeedback(reduction.stores["gradients"], 0.98, own_exact=False)
    assert reduction.stores.keys() == {"gradients", "means", "node", "node_means"}


def payload_reducers(reducer: object) -> Iterator[PayloadReducer]:
    """Yield the payload reducers that `reducer` consists of."""
    if isinstance(reducer, PayloadReducer):
        yield reducer
    parts = {
        HierarchicalReducer: ("node", "across"),
        PowerSGDReducer: ("others", "factors"),
        ClippingReducer: ("reducer",),
    }
    for part in parts.get(type(reducer), ()):
        yield from payload_reducers(getattr(reducer, part))


KINDS = [
    {"method": "qsgd"},
    {"method": "powersgd"},
    {"method": "qsgd", "hierarchy": {"ranks_per_node": 2}},
    {"method": "dgc", "clip_norm": 1.0, "values": {"method": "qsgd"}, "hierarchy": {"ranks_per_node": 2}},
]


@pytest.mark.parametrize(("dtype", "numel"), [(FP32, 16384), (BF16, 32768)])
@pytest.mark.parametrize("gradients", KINDS, ids=repr)
def test_all_reducers_get_the_common_settings(
    groups: Groups, gradients: dict[str, Any], dtype: torch.dtype, numel: int
) -> None:
    """These are the seed, the chunk size, the dtype of uncompressed elements, the clock and the meter."""
    config = section({**gradients, "chunk_bytes": 65536}, seed=7)
    levels = groups if "hierarchy" in gradients else Groups(groups.whole)
    reduction = build(levels, config, dtype=dtype)
    run = reduction.reductions.context.run
    assert run.seed == 7
    found = [*payload_reducers(reduction.compressed), *payload_reducers(reduction.plain)]
    for reducer in found:
        assert reducer.chunk_numel == numel
        assert reducer.run is run
        if reducer is not getattr(reduction.compressed, "factors", None):
            assert codecs(reducer)[RAW] == Codec(Cast(dtype))


@pytest.mark.parametrize("gradients", KINDS, ids=repr)
def test_the_plain_reducer_compresses_nothing(groups: Groups, gradients: dict[str, Any]) -> None:
    levels = groups if "hierarchy" in gradients else Groups(groups.whole)
    reduction = build(levels, section(gradients))
    assert reduction.at(0).plain.group is groups.whole
    assert isinstance(reduction.plain, HierarchicalReducer) == ("hierarchy" in gradients)
    for reducer in payload_reducers(reduction.plain):
        assert codecs(reducer) == (Codec(Cast(FP32)),)
        assert {channel_of(reducer, name) for name in SHAPES} == {RAW}
        assert feedback_of(reducer, RAW) == (NoFeedback(), NoFeedback())


def test_an_override_that_matches_nothing_warns_with_its_pointer(group: ProcessGroup) -> None:
    overrides = [{"parameters": pattern, "method": "none"} for pattern in ("bias", "^wte")]
    with pytest.warns(CompressWarning) as caught:
        build(group, section({"overrides": overrides}))
    [message] = [str(warning.message) for warning in caught]
    words = ("/deepspeed_compress/gradients/overrides/1/parameters", "'^wte'", "embed.weight", "no effect", "write")
    assert [word for word in words if word not in message] == []


def test_a_pattern_may_match_only_on_other_ranks(group: ProcessGroup) -> None:
    config = section({"overrides": [{"parameters": "bias", "method": "none"}]})
    reduction = build(group, config, shapes={}, everywhere=["layer.9.bias"])
    assert codec_of(reduction, "layer.9.bias").compressor == Cast(FP32)


@pytest.mark.parametrize(
    "gradients",
    [
        {"min_numel": 10_000},
        {"method": "powersgd", "rank": 64},
        {"overrides": [{"parameters": "weight|bias", "method": "none"}]},
    ],
)
def test_settings_that_compress_nothing_warn(group: ProcessGroup, gradients: dict[str, Any]) -> None:
    with pytest.warns(CompressWarning, match="compresses none of the 4 parameters"):
        build(group, section(gradients))


def test_patterns_match_user_facing_names(group: ProcessGroup) -> None:
    """A pipeline numbers its layers, but the pattern refers to the model of transformers."""
    calls = {"2.layer.attn.weight": "transformer.h.1.attn.weight"}
    config = section({"overrides": [{"parameters": r"h\.1\.attn", "method": "none"}]})
    names = sorted(calls.values())
    shapes = {"2.layer.attn.weight": (8, 8), "3.norm.weight": (8,)}
    reduction = build(group, config, shapes=shapes, everywhere=names, user_names=calls)
    assert codec_of(reduction, "2.layer.attn.weight").compressor == Cast(FP32)
    assert codec_of(reduction, "3.norm.weight").compressor != Cast(FP32)


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        ({}, Blockwise(4, 256)),
        ({"bits": 8, "block_size": 64, "rounding": "stochastic", "scale_dtype": "bf16"}, Blockwise(8, 64, True, BF16)),
        ({"method": "sign", "block_size": 64}, Sign(64)),
        ({"method": "topk", "density": 0.1, "values": {"bits": 4}}, TopK(0.1, 4096, INT4)),
    ],
    ids=repr,
)
def test_settings_of_weights_reach_their_gather(
    group: ProcessGroup, weights: dict[str, Any], expected: Compressor
) -> None:
    weights_config = section({}, weights={"min_numel": 64, **weights}).weights
    assert isinstance(weights_config, CompressedWeights)
    run = Run(StepClock(), Meter(), 3)
    reduction = WeightReduction(weights_config, Parameters(SHAPES, sorted(SHAPES), frozenset({"head.weight"})), run)
    sizes = [(name, math.prod(shape)) for name, shape in SHAPES.items()]
    gather = reduction.difference_gather(group, sizes, BF16)
    assert [channel.codec for channel in gather.messages.channels] == [Codec(Cast(BF16)), Codec(expected)]
    assert [gather.messages.channel_of[name] for name in SHAPES] == [1, 1, EXACT, EXACT]
    assert gather.run is run
    assert gather.own(torch.zeros(1672, dtype=BF16)).numel() == 1672
    reducer = reduction.rounding_reducer(group, BF16)
    assert [codecs(reducer)[channel_of(reducer, name)].compressor for name in SHAPES] == [
        *2 * [expected],
        *2 * [Cast(BF16)],
    ]


def test_null_disables_error_feedback(group: ProcessGroup) -> None:
    reduction = build(group, section({"error_feedback": None}))
    assert not reduction.stores
    assert feedback_of(reduction.compressed) == (NoFeedback(), NoFeedback())


def test_the_density_falls_during_its_warmup(group: ProcessGroup) -> None:
    override = {"parameters": "embed", "method": "topk", "density": 0.1, "density_warmup_steps": 2}
    config = section({"method": "dgc", "density": 0.005, "density_warmup_steps": 8, "overrides": [override]})
    reduction = build(group, config)
    for step, main, other in ((0, 0.25, 0.25), (2, 0.0625, 0.1), (8, 0.005, 0.1)):
        assert codec_of(reduction, "head.weight", step).compressor == TopK(main)
        assert codec_of(reduction, "embed.weight", step).compressor == TopK(other)


def test_transforms_get_the_widths_of_matrices(group: ProcessGroup) -> None:
    widths = {"embed.weight": 8, "layer.0.weight": 8, "head.weight": 100}
    assert codec_of(build(group, section({"method": "demo"})), "head.weight").transform == DCT(widths, 64)


def test_an_override_without_first_matches_warns(group: ProcessGroup) -> None:
    overrides = [{"parameters": "bias|weight", "method": "sign"}, {"parameters": "head", "method": "none"}]
    with pytest.warns(CompressWarning, match="overrides/1/parameters.*has no effect"):
        build(group, section({"overrides": overrides}))
